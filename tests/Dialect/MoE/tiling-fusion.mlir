// RUN: %moe-opt %s --transform-interpreter --canonicalize --cse --split-input-file | FileCheck %s

// The tile of a selection computes the logits of its own rows.

// CHECK-LABEL: func @fuses_a_producer_into_the_tile
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x352xf32>
// CHECK-NOT:     moe.router_logits
// CHECK:         scf.forall
// CHECK:           %[[TOKENS:.*]] = tensor.extract_slice %[[H]]
// CHECK:           %[[Z:.*]] = moe.router_logits ins(%[[TOKENS]],
// CHECK:           moe.topk_renorm ins(%[[Z]]
func.func @fuses_a_producer_into_the_tile(
    %h: tensor<?x352xf32>, %w: tensor<64x352xf32>, %z0: tensor<?x64xf32>,
    %g0: tensor<?x8xf32>, %i0: tensor<?x8xi32>)
    -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %z = moe.router_logits ins(%h, %w : tensor<?x352xf32>, tensor<64x352xf32>)
      outs(%z0 : tensor<?x64xf32>) -> tensor<?x64xf32>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%g0, %i0 : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %topk = transform.structured.match ops{["moe.topk_renorm"]} in %root
        : (!transform.any_op) -> !transform.any_op
    %tiled, %loop = transform.structured.fuse %topk tile_sizes [32] {use_forall}
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// A consumer that wants part of a dim which the producer keeps whole cannot
// have it: the producer stays outside, and nothing is wrong.

// CHECK-LABEL: func @leaves_a_producer_whose_dim_is_cut
// CHECK:         %[[G:.*]] = moe.adjacency_gate
// CHECK:         scf.for
// CHECK-NOT:       moe.adjacency_gate
// CHECK:           tensor.extract_slice %[[G]]
// CHECK:           linalg.exp
func.func @leaves_a_producer_whose_dim_is_cut(
    %p: tensor<64x16xf32>, %a: tensor<16x16xf32>, %init: tensor<64x16xf32>)
    -> tensor<64x16xf32> {
  %g = moe.adjacency_gate ins(%p, %a : tensor<64x16xf32>, tensor<16x16xf32>)
      outs(%init : tensor<64x16xf32>) -> tensor<64x16xf32>
  %e = linalg.exp ins(%g : tensor<64x16xf32>) outs(%init : tensor<64x16xf32>)
      -> tensor<64x16xf32>
  return %e : tensor<64x16xf32>
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %exp = transform.structured.match ops{["linalg.exp"]} in %root
        : (!transform.any_op) -> !transform.any_op
    %tiled, %loops:2 = transform.structured.fuse %exp tile_sizes [32, 4]
        : (!transform.any_op)
        -> (!transform.any_op, !transform.any_op, !transform.any_op)
    transform.yield
  }
}
