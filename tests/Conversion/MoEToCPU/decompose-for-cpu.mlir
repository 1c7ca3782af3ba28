// RUN: %moe-opt %s --moe-decompose-for-cpu | FileCheck %s

// Only what convert-moe-to-cpu has no pattern for becomes linalg: no list of
// ops says so.

// CHECK-LABEL: func @route
// CHECK-NOT: moe.router_logits
// CHECK: linalg.generic
// CHECK-NOT: moe.adjacency_gate
// CHECK: linalg.generic
// CHECK: moe.topk_renorm
func.func @route(%h: tensor<?x8xf32>, %weight: tensor<4x8xf32>,
                 %a: tensor<4x4xf32>, %z: tensor<?x4xf32>,
                 %gates: tensor<?x2xf32>, %indices: tensor<?x2xi32>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %logits = moe.router_logits
      ins(%h, %weight : tensor<?x8xf32>, tensor<4x8xf32>)
      outs(%z : tensor<?x4xf32>) -> tensor<?x4xf32>
  %mixed = moe.adjacency_gate
      ins(%logits, %a : tensor<?x4xf32>, tensor<4x4xf32>)
      outs(%z : tensor<?x4xf32>) -> tensor<?x4xf32>
  %g, %i = moe.topk_renorm ins(%mixed : tensor<?x4xf32>)
      outs(%gates, %indices : tensor<?x2xf32>, tensor<?x2xi32>)
      {kind = #moe.score_kind<logits>} -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g, %i : tensor<?x2xf32>, tensor<?x2xi32>
}
