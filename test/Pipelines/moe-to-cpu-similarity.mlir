// RUN: %moe-opt %s --moe-to-cpu | FileCheck %s

// Mixing over tokens holds no matrix of tokens by tokens: nothing is allocated
// at all but the stack tiles of the kernel.

// CHECK-NOT: @malloc
// CHECK:     llvm.func @_mlir_ciface_inform
// CHECK-NOT: @malloc
func.func @inform(%u: tensor<2x?x32xf32>, %e: tensor<2x?x16xf32>)
    -> (tensor<2x?x16xf32>, tensor<2x?xf32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %u, %c1 : tensor<2x?x32xf32>
  %p0 = tensor.empty(%n) : tensor<2x?x16xf32>
  %l0 = tensor.empty(%n) : tensor<2x?xf32>
  %p, %l = moe.similarity_inform ins(%u, %e : tensor<2x?x32xf32>, tensor<2x?x16xf32>)
      outs(%p0, %l0 : tensor<2x?x16xf32>, tensor<2x?xf32>) {causal = true}
      -> tensor<2x?x16xf32>, tensor<2x?xf32>
  return %p, %l : tensor<2x?x16xf32>, tensor<2x?xf32>
}
