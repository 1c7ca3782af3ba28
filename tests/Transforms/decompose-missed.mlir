// RUN: %moe-opt %s --moe-decompose --remarks-filter-missed='moe-.*' -o %t 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=IR < %t

// CHECK: remark: [Missed] Decompose | Category:moe-decompose
// CHECK-SAME: Reason="its meaning needs intermediate tensors and it works on buffers; decompose before bufferization"
// CHECK-SAME: moe.adjacency_gate

// IR-LABEL: func @refuses_buffers
// IR:         moe.adjacency_gate
func.func @refuses_buffers(%p: memref<?x4xf32>, %a: memref<4x4xf32>,
                           %g: memref<?x4xf32>) {
  moe.adjacency_gate ins(%p, %a : memref<?x4xf32>, memref<4x4xf32>)
      outs(%g : memref<?x4xf32>)
  return
}
