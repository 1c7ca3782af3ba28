// RUN: %moe-opt %s --moe-convert-to-softmax-mix --remarks-filter-missed='moe-.*' -o %t 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=IR < %t

// CHECK: remark: [Missed] ConvertToSoftmaxMix | Category:moe-convert-to-softmax-mix
// CHECK-SAME: Reason="its conversion needs intermediate tensors and it works on buffers; convert before bufferization"
// CHECK-SAME: moe.similarity_inform

// IR-LABEL: func @refuses_buffers
// IR:         moe.similarity_inform
func.func @refuses_buffers(%u: memref<2x?x8xf32>, %e: memref<2x?x4xf32>,
                           %p: memref<2x?x4xf32>, %lse: memref<2x?xf32>) {
  moe.similarity_inform ins(%u, %e : memref<2x?x8xf32>, memref<2x?x4xf32>)
      outs(%p, %lse : memref<2x?x4xf32>, memref<2x?xf32>)
  return
}
