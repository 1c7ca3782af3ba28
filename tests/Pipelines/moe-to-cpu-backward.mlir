// RUN: %moe-opt %s --moe-to-cpu --mlir-disable-threading --mlir-print-ir-after=convert-moe-to-cpu -o /dev/null 2>&1 | FileCheck %s

// The gradients of mixing over tokens hold no matrix of tokens by tokens: no
// buffer has two sizes that grow with them, and the kernels' own buffers are
// static.

// CHECK-LABEL: func.func @similarity
// CHECK-NOT:     memref.alloc{{.*}}?x{{[0-9x]*}}?
// CHECK:         memref.alloca() {alignment = 64 : i64} : memref<192x64xf32>
// CHECK-NOT:     memref.alloc{{.*}}?x{{[0-9x]*}}?
// CHECK:         math.fma
// CHECK-NOT:     memref.alloc{{.*}}?x{{[0-9x]*}}?
// CHECK:         return
func.func @similarity(%u: tensor<2x?x32xf32>, %e: tensor<2x?x16xf32>,
    %p: tensor<2x?x16xf32>, %lse: tensor<2x?xf32>, %dp: tensor<2x?x16xf32>)
    -> (tensor<2x?x32xf32>, tensor<2x?x16xf32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %u, %c1 : tensor<2x?x32xf32>
  %du0 = tensor.empty(%n) : tensor<2x?x32xf32>
  %de0 = tensor.empty(%n) : tensor<2x?x16xf32>
  %du, %de = moe.similarity_inform_backward
      ins(%u, %e, %p, %lse, %dp : tensor<2x?x32xf32>, tensor<2x?x16xf32>,
          tensor<2x?x16xf32>, tensor<2x?xf32>, tensor<2x?x16xf32>)
      outs(%du0, %de0 : tensor<2x?x32xf32>, tensor<2x?x16xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<2x?x32xf32>, tensor<2x?x16xf32>
  return %du, %de : tensor<2x?x32xf32>, tensor<2x?x16xf32>
}

// CHECK-LABEL: func.func @posterior
// CHECK-NOT:     memref.alloc{{.*}}?x{{[0-9x]*}}?
// CHECK:         memref.alloca() {alignment = 64 : i64} : memref<96x48xf32>
// CHECK-NOT:     memref.alloc{{.*}}?x{{[0-9x]*}}?
// CHECK:         math.fma
// CHECK-NOT:     memref.alloc{{.*}}?x{{[0-9x]*}}?
// CHECK:         return
func.func @posterior(%q: tensor<1x2x?x16xf32>, %k: tensor<1x2x?x16xf32>,
    %u: tensor<1x?x32xf32>, %e: tensor<1x?x8xf32>, %p: tensor<1x?x8xf32>,
    %l1: tensor<1x2x?xf32>, %l2: tensor<1x2x?xf32>, %dp: tensor<1x?x8xf32>,
    %vp: tensor<1x2x?x32xf32>)
    -> (tensor<1x2x?x16xf32>, tensor<1x2x?x16xf32>, tensor<1x?x32xf32>,
        tensor<1x?x8xf32>, tensor<1x2x?x32xf32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %u, %c1 : tensor<1x?x32xf32>
  %dq0 = tensor.empty(%n) : tensor<1x2x?x16xf32>
  %dk0 = tensor.empty(%n) : tensor<1x2x?x16xf32>
  %du0 = tensor.empty(%n) : tensor<1x?x32xf32>
  %de0 = tensor.empty(%n) : tensor<1x?x8xf32>
  %dvp0 = tensor.empty(%n) : tensor<1x2x?x32xf32>
  %r:5 = moe.attention_posterior_backward
      ins(%q, %k, %u, %e, %p, %l1, %l2, %dp : tensor<1x2x?x16xf32>,
          tensor<1x2x?x16xf32>, tensor<1x?x32xf32>, tensor<1x?x8xf32>,
          tensor<1x?x8xf32>, tensor<1x2x?xf32>, tensor<1x2x?xf32>,
          tensor<1x?x8xf32>)
      means(%vp : tensor<1x2x?x32xf32>)
      outs(%dq0, %dk0, %du0, %de0, %dvp0 : tensor<1x2x?x16xf32>,
           tensor<1x2x?x16xf32>, tensor<1x?x32xf32>, tensor<1x?x8xf32>,
           tensor<1x2x?x32xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<1x2x?x16xf32>, tensor<1x2x?x16xf32>, tensor<1x?x32xf32>,
         tensor<1x?x8xf32>, tensor<1x2x?x32xf32>
  return %r#0, %r#1, %r#2, %r#3, %r#4 : tensor<1x2x?x16xf32>,
      tensor<1x2x?x16xf32>, tensor<1x?x32xf32>, tensor<1x?x8xf32>,
      tensor<1x2x?x32xf32>
}
