// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_90 --moe-distribute-to-grid --remarks-filter-missed='moe-distribute-to-grid' -o %t 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=IR < %t

// A kernel that was asked for is not replaced without a word.

// CHECK:      remark: [Missed] KernelConfig
// CHECK-SAME: Reason="the op has no such kernel on GPUs"
// CHECK-SAME: moe.combine runs with schedule any in place of mma
// IR-LABEL: func.func @combine_on_tensor_cores
// IR:         scf.forall
// IR-NOT:     moe.combine
func.func @combine_on_tensor_cores(%out: memref<?x64xbf16>, %gates: memref<?x2xf32>,
                                   %slots: memref<?x2xi64>, %y: memref<?x64xbf16>) {
  moe.combine ins(%out, %gates, %slots : memref<?x64xbf16>, memref<?x2xf32>, memref<?x2xi64>)
      outs(%y : memref<?x64xbf16>)
      {moe.kernel_config = #moe.kernel_config<schedule = mma>}
  return
}

// -----

// What was chosen needs none.

// CHECK-NOT: remark
// IR-LABEL: func.func @combine_as_chosen
func.func @combine_as_chosen(%out: memref<?x64xbf16>, %gates: memref<?x2xf32>,
                             %slots: memref<?x2xi64>, %y: memref<?x64xbf16>) {
  moe.combine ins(%out, %gates, %slots : memref<?x64xbf16>, memref<?x2xf32>, memref<?x2xi64>)
      outs(%y : memref<?x64xbf16>)
      {moe.kernel_config = #moe.kernel_config<loop = kernel>}
  return
}
