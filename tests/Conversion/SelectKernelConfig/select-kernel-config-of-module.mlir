// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_90a --moe-convert-to-softmax-mix --moe-select-kernel-config | FileCheck %s --check-prefixes=CHECK,SM90A
// RUN: sed 's/schedule = mma/rows = 192/; s/rows = 64/rows = 192/; s/schedule = float/schedule = queries/' %s > %t.cpu.mlir
// RUN: %moe-opt %t.cpu.mlir --moe-select-kernel-config --moe-convert-to-softmax-mix --moe-select-kernel-config | FileCheck %s --check-prefixes=CHECK,CPU

// A module asks for the kernels of all ops of a name. What a program does not
// have is left aside.

module attributes {moe.kernel_configs = {
    softmax_mix = #moe.kernel_config<schedule = mma>,
    similarity_inform = #moe.kernel_config<schedule = float>,
    softmax_mix_backward_dq = #moe.kernel_config<rows = 7>}} {

// CHECK-LABEL: func.func @of_the_name
// SM90A:         moe.softmax_mix {{.*}}#moe.kernel_config<rows = 128, threads = 128, schedule = mma,
// CPU:           moe.softmax_mix {{.*}}#moe.kernel_config<rows = 192, schedule = queries>
func.func @of_the_name(%q: tensor<1x2x?x64xbf16>, %l0: tensor<1x2x?xf32>) -> tensor<1x2x?xf32> {
  %l = moe.softmax_mix ins(%q, %q : tensor<1x2x?x64xbf16>, tensor<1x2x?x64xbf16>)
      outs(%l0 : tensor<1x2x?xf32>) -> tensor<1x2x?xf32>
  return %l : tensor<1x2x?xf32>
}

// What an op asks for itself comes first.

// CHECK-LABEL: func.func @of_the_op
// SM90A:         moe.softmax_mix {{.*}}#moe.kernel_config<rows = 64, threads = 256, schedule = wgmma,
func.func @of_the_op(%q: tensor<1x2x?x64xbf16>, %l0: tensor<1x2x?xf32>) -> tensor<1x2x?xf32> {
  %l = moe.softmax_mix ins(%q, %q : tensor<1x2x?x64xbf16>, tensor<1x2x?x64xbf16>)
      outs(%l0 : tensor<1x2x?xf32>)
      {moe.kernel_config = #moe.kernel_config<rows = 64>} -> tensor<1x2x?xf32>
  return %l : tensor<1x2x?xf32>
}

// So does what is asked for the op that becomes one of the name.

// CHECK-LABEL: func.func @of_what_it_was
// SM90A:         moe.softmax_mix {{.*}}schedule = float
// CPU-NOT:       moe.softmax_mix_self
// CPU:           moe.softmax_mix {{.*}}#moe.kernel_config<rows = 192, schedule = queries>
func.func @of_what_it_was(
    %u: tensor<2x?x64xbf16>, %e: tensor<2x?x16xf32>, %p0: tensor<2x?x16xf32>,
    %l0: tensor<2x?xf32>) -> tensor<2x?x16xf32> {
  %p:2 = moe.similarity_inform ins(%u, %e : tensor<2x?x64xbf16>, tensor<2x?x16xf32>)
      outs(%p0, %l0 : tensor<2x?x16xf32>, tensor<2x?xf32>) -> tensor<2x?x16xf32>, tensor<2x?xf32>
  return %p#0 : tensor<2x?x16xf32>
}
}
