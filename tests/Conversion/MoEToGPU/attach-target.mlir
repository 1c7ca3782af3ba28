// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_80 | FileCheck %s --check-prefix=SM80
// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_90a | FileCheck %s --check-prefix=SM90A
// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_120 | FileCheck %s --check-prefix=SM120
// RUN: not %moe-opt %s --moe-attach-nvvm-target=chip=sm_70 2>&1 | FileCheck %s --check-prefix=UNKNOWN

// The PTX version follows from the chip.

// SM80: module attributes {moe.target = #nvvm.target<O = 3, chip = "sm_80", features = "+ptx70">}
// SM90A: module attributes {moe.target = #nvvm.target<O = 3, chip = "sm_90a", features = "+ptx80">}
// SM120: module attributes {moe.target = #nvvm.target<O = 3, chip = "sm_120", features = "+ptx87">}
// UNKNOWN: error: expected a chip out of sm_80, {{.*}}sm_90a, {{.*}}, found 'sm_70'
module {
}
