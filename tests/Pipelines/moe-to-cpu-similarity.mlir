// RUN: %moe-opt %s --moe-to-cpu --mlir-disable-threading --mlir-print-ir-after=convert-moe-to-cpu -o /dev/null 2>&1 | FileCheck %s

// Mixing over tokens holds no matrix of tokens by tokens: no buffer has two
// sizes that grow with them, and the kernel's own buffers are static.

// CHECK-LABEL: func.func @inform
// CHECK-NOT:     memref.alloc{{.*}}?x{{[0-9x]*}}?
// CHECK:         memref.alloca() {alignment = 64 : i64} : memref<32x64xf32>
// CHECK-NOT:     memref.alloc{{.*}}?x{{[0-9x]*}}?
// CHECK:         math.fma
// CHECK-NOT:     memref.alloc{{.*}}?x{{[0-9x]*}}?
// CHECK:         return
func.func @inform(%u: tensor<2x?x32xf32>, %e: tensor<2x?x16xf32>)
    -> (tensor<2x?x16xf32>, tensor<2x?xf32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %u, %c1 : tensor<2x?x32xf32>
  %p0 = tensor.empty(%n) : tensor<2x?x16xf32>
  %l0 = tensor.empty(%n) : tensor<2x?xf32>
  %p, %l = moe.similarity_inform ins(%u, %e : tensor<2x?x32xf32>, tensor<2x?x16xf32>)
      outs(%p0, %l0 : tensor<2x?x16xf32>, tensor<2x?xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<2x?x16xf32>, tensor<2x?xf32>
  return %p, %l : tensor<2x?x16xf32>, tensor<2x?xf32>
}
