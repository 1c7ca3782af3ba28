// The verifier's message reaches the user with the line that it is about.

// RUN: not moe-compile %s -o %t 2>&1 | FileCheck %s
// RUN: not ls %t

// CHECK: k-too-large.mlir:[[# @LINE + 4]]:10: error: 'moe.topk_renorm' op expected k (9) to be at most e (8)
// CHECK-NEXT: %r:2 = moe.topk_renorm
func.func @f(%s: tensor<4x8xf32>, %g: tensor<4x9xf32>, %i: tensor<4x9xi32>)
    -> (tensor<4x9xf32>, tensor<4x9xi32>) {
  %r:2 = moe.topk_renorm ins(%s : tensor<4x8xf32>)
    outs(%g, %i : tensor<4x9xf32>, tensor<4x9xi32>) -> tensor<4x9xf32>, tensor<4x9xi32>
  return %r#0, %r#1 : tensor<4x9xf32>, tensor<4x9xi32>
}
