// RUN: %moe-opt %s --moe-decompose-for-cpu --remarks-filter-missed='moe-decompose-for-cpu' 2>&1 | FileCheck %s
// RUN: %moe-opt %s --moe-to-cpu | FileCheck %s --check-prefix=LLVM

// The kernel of a selection keeps its choices in registers, so it has to know
// their number; without it the selection still runs.

// CHECK: remark: [Missed] DecomposeForCPU | Category:moe-decompose-for-cpu
// CHECK-SAME: Reason="its kernel expects a static number of choices"
// CHECK-LABEL: func.func @unknown_number_of_choices
// CHECK-NOT:     moe.topk_renorm
// CHECK:         return
// LLVM-LABEL: llvm.func @unknown_number_of_choices
func.func @unknown_number_of_choices(
    %x: tensor<?x8xf32>, %g0: tensor<?x?xf32>, %i0: tensor<?x?xi32>)
    -> (tensor<?x?xf32>, tensor<?x?xi32>) {
  %r:2 = moe.topk_renorm ins(%x : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x?xf32>, tensor<?x?xi32>) -> tensor<?x?xf32>, tensor<?x?xi32>
  return %r#0, %r#1 : tensor<?x?xf32>, tensor<?x?xi32>
}
