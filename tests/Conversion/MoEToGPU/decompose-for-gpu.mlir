// RUN: %moe-opt %s --split-input-file --moe-decompose-for-gpu | FileCheck %s

// Only what has no GPU kernel becomes linalg: no list of ops says so. The
// threshold of the graph is applied where it is read, not in a buffer.

// CHECK-LABEL: func @route
// CHECK:         moe.router_logits
// CHECK-NOT:     moe.adjacency_gate
// CHECK:         linalg.generic
// CHECK:           arith.cmpf oge
// CHECK:           arith.mulf
// CHECK-NOT:     linalg.generic
// CHECK:         moe.topk_renorm
func.func @route(%h: tensor<?x8xf32>, %weight: tensor<4x8xf32>,
                 %a: tensor<4x4xf32>, %z: tensor<?x4xf32>,
                 %gates: tensor<?x2xf32>, %indices: tensor<?x2xi32>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %logits = moe.router_logits
      ins(%h, %weight : tensor<?x8xf32>, tensor<4x8xf32>)
      outs(%z : tensor<?x4xf32>) -> tensor<?x4xf32>
  %mixed = moe.adjacency_gate
      ins(%logits, %a : tensor<?x4xf32>, tensor<4x4xf32>)
      outs(%z : tensor<?x4xf32>) {threshold = 0.1 : f64} -> tensor<?x4xf32>
  %g, %i = moe.topk_renorm ins(%mixed : tensor<?x4xf32>)
      outs(%gates, %indices : tensor<?x2xf32>, tensor<?x2xi32>)
      {kind = #moe.score_kind<logits>} -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g, %i : tensor<?x2xf32>, tensor<?x2xi32>
}

// -----

// A kernel that refuses a form of its op leaves it to the decomposition: more
// experts than registers hold, distances between pairs.

// CHECK-LABEL: func @forms_without_a_kernel
// CHECK-NOT:     moe.
func.func @forms_without_a_kernel(
    %z: tensor<?x4096xf32>, %gates: tensor<?x2xf32>, %indices: tensor<?x2xi32>,
    %h: tensor<?x4xf32>, %assign: tensor<?xi32>, %s: tensor<2x4xf32>,
    %mean: tensor<2x4xf32>, %count: tensor<2xi32>)
    -> (tensor<?x2xf32>, tensor<2x4xf32>) {
  %r:2 = moe.topk_renorm ins(%z : tensor<?x4096xf32>)
      outs(%gates, %indices : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  %d:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x4xf32>, tensor<?xi32>)
      outs(%s, %mean, %count : tensor<2x4xf32>, tensor<2x4xf32>, tensor<2xi32>)
      {measure = #moe.dispersion_measure<pairwise>}
      -> tensor<2x4xf32>, tensor<2x4xf32>, tensor<2xi32>
  return %r#0, %d#0 : tensor<?x2xf32>, tensor<2x4xf32>
}

// Tokens that chose nothing leave no work for the kernel's threads.

// CHECK-LABEL: func @adjacency_without_choices
// CHECK-NOT:     moe.adjacency_update
func.func @adjacency_without_choices(%a: tensor<16x16xf32>, %indices: tensor<?x0xi32>,
                                     %init: tensor<16x16xf32>) -> tensor<16x16xf32> {
  %new = moe.adjacency_update
      ins(%a, %indices : tensor<16x16xf32>, tensor<?x0xi32>)
      outs(%init : tensor<16x16xf32>) -> tensor<16x16xf32>
  return %new : tensor<16x16xf32>
}
