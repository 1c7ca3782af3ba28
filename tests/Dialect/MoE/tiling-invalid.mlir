// RUN: not %moe-opt %s --transform-interpreter --split-input-file 2>&1 | FileCheck %s

// A dim that an op reduces inside, or along which indices are absolute, is
// refused by name; the message says what to do.

// CHECK: 'moe.topk_renorm' op expected dim e to stay whole (it is reduced inside the op), found a tile of it; use tile size 0
func.func @topk_renorm_e(%z: tensor<?x64xf32>, %g: tensor<?x8xf32>,
                       %i: tensor<?x8xi32>) {
  %r:2 = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%g, %i : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.topk_renorm"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 16]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.topk_renorm' op expected dim k to stay whole (indices along it are absolute), found a tile of it; use tile size 0
func.func @topk_renorm_k(%z: tensor<?x64xf32>, %g: tensor<?x8xf32>,
                       %i: tensor<?x8xi32>) {
  %r:2 = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%g, %i : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.topk_renorm"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 0, 2]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.router_logits' op expected dim d to stay whole (it is reduced inside the op), found a tile of it; use tile size 0
func.func @router_logits_d(%h: tensor<?x352xf32>, %w: tensor<64x352xf32>,
                         %z0: tensor<?x64xf32>) {
  %z = moe.router_logits ins(%h, %w : tensor<?x352xf32>, tensor<64x352xf32>)
      outs(%z0 : tensor<?x64xf32>) -> tensor<?x64xf32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.router_logits"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 0, 32]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.similarity_inform' op expected dim i to stay whole (indices along it are absolute), found a tile of it; use tile size 0
func.func @similarity_inform_i_restricted(
    %u: tensor<2x?x8xf32>, %e: tensor<2x?x4xf32>, %p: tensor<2x?x4xf32>,
    %l: tensor<2x?xf32>) {
  %r:2 = moe.similarity_inform ins(%u, %e : tensor<2x?x8xf32>, tensor<2x?x4xf32>)
      outs(%p, %l : tensor<2x?x4xf32>, tensor<2x?xf32>)
      {restrict = #moe.restrict<entropy>}
      -> tensor<2x?x4xf32>, tensor<2x?xf32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.similarity_inform"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 32]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.softmax_mix' op expected dim j to stay whole (it is reduced inside the op), found a tile of it; use tile size 0
func.func @softmax_mix_j(%q: tensor<1x2x64x8xf32>, %l: tensor<1x2x64xf32>) {
  %r = moe.softmax_mix ins(%q, %q : tensor<1x2x64x8xf32>, tensor<1x2x64x8xf32>)
      outs(%l : tensor<1x2x64xf32>) -> tensor<1x2x64xf32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.softmax_mix"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 0, 0, 0, 32]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.attention_posterior' op expected dim b to stay whole (indices along it are absolute), found a tile of it; use tile size 0
func.func @attention_posterior_b_of_a_batch(
    %q: tensor<3x4x?x16xf32>, %u: tensor<3x?x64xf32>, %e: tensor<3x?x8xf32>,
    %vp: tensor<3x4x?x64xf32>, %p: tensor<3x?x8xf32>, %head: tensor<3xi32>,
    %l: tensor<3x1x?xf32>) {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<3x4x?x16xf32>, tensor<3x4x?x16xf32>,
          tensor<3x?x64xf32>, tensor<3x?x8xf32>)
      means(%vp : tensor<3x4x?x64xf32>)
      outs(%p, %head, %l, %l : tensor<3x?x8xf32>, tensor<3xi32>,
           tensor<3x1x?xf32>, tensor<3x1x?xf32>)
      {head_scope = #moe.head_scope<batch>}
      -> tensor<3x?x8xf32>, tensor<3xi32>, tensor<3x1x?xf32>, tensor<3x1x?xf32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.attention_posterior"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [1]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.attention_posterior' op expected dim i to stay whole (indices along it are absolute), found a tile of it; use tile size 0
func.func @attention_posterior_i_of_a_batch(
    %q: tensor<3x4x?x16xf32>, %u: tensor<3x?x64xf32>, %e: tensor<3x?x8xf32>,
    %vp: tensor<3x4x?x64xf32>, %p: tensor<3x?x8xf32>, %head: tensor<3xi32>,
    %l: tensor<3x1x?xf32>) {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<3x4x?x16xf32>, tensor<3x4x?x16xf32>,
          tensor<3x?x64xf32>, tensor<3x?x8xf32>)
      means(%vp : tensor<3x4x?x64xf32>)
      outs(%p, %head, %l, %l : tensor<3x?x8xf32>, tensor<3xi32>,
           tensor<3x1x?xf32>, tensor<3x1x?xf32>)
      {head_scope = #moe.head_scope<batch>}
      -> tensor<3x?x8xf32>, tensor<3xi32>, tensor<3x1x?xf32>, tensor<3x1x?xf32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.attention_posterior"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 0, 32]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.mad_dispersion' op expected dim e to stay whole (indices along it are absolute), found a tile of it; use tile size 0
func.func @mad_dispersion_e(%h: tensor<?x8xf32>, %assign: tensor<?xi32>,
                          %s: tensor<16x8xf32>, %count: tensor<16xi32>) {
  %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x8xf32>, tensor<?xi32>)
      outs(%s, %s, %count : tensor<16x8xf32>, tensor<16x8xf32>, tensor<16xi32>)
      -> tensor<16x8xf32>, tensor<16x8xf32>, tensor<16xi32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.mad_dispersion"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [4]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.mad_dispersion' op expected dim n to stay whole (it is reduced inside the op), found a tile of it; use tile size 0
func.func @mad_dispersion_n(%h: tensor<?x8xf32>, %assign: tensor<?xi32>,
                          %s: tensor<16x8xf32>, %count: tensor<16xi32>) {
  %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x8xf32>, tensor<?xi32>)
      outs(%s, %s, %count : tensor<16x8xf32>, tensor<16x8xf32>, tensor<16xi32>)
      -> tensor<16x8xf32>, tensor<16x8xf32>, tensor<16xi32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.mad_dispersion"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 0, 32]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.adjacency_gate' op expected dim e to stay whole (indices along it are absolute), found a tile of it; use tile size 0
func.func @adjacency_gate_e(%p: tensor<?x16xf32>, %a: tensor<16x16xf32>,
                          %g: tensor<?x16xf32>) {
  %r = moe.adjacency_gate ins(%p, %a : tensor<?x16xf32>, tensor<16x16xf32>)
      outs(%g : tensor<?x16xf32>) -> tensor<?x16xf32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.adjacency_gate"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 4]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.adjacency_update' op expected dim e to stay whole (indices along it are absolute), found a tile of it; use tile size 0
func.func @adjacency_update_e(%a: tensor<16x16xf32>, %i: tensor<?x2xi32>) {
  %r = moe.adjacency_update ins(%a, %i : tensor<16x16xf32>, tensor<?x2xi32>)
      outs(%a : tensor<16x16xf32>) -> tensor<16x16xf32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.adjacency_update"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [4]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.adjacency_update' op expected dim n to stay whole (it is reduced inside the op), found a tile of it; use tile size 0
func.func @adjacency_update_n(%a: tensor<16x16xf32>, %i: tensor<?x2xi32>) {
  %r = moe.adjacency_update ins(%a, %i : tensor<16x16xf32>, tensor<?x2xi32>)
      outs(%a : tensor<16x16xf32>) -> tensor<16x16xf32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.adjacency_update"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 0, 32]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.ac_logits' op expected dim r to stay whole (it is reduced inside the op), found a tile of it; use tile size 0
func.func @ac_logits_r(%h: tensor<?x8xf32>, %m: tensor<4x8xf32>,
                       %idx: tensor<?x4xi32>, %gates: tensor<?x4xf32>,
                       %z0: tensor<?x4xf32>) {
  %z = moe.ac_logits
      ins(%h, %m, %idx, %m : tensor<?x8xf32>, tensor<4x8xf32>, tensor<?x4xi32>,
          tensor<4x8xf32>)
      gates(%gates : tensor<?x4xf32>) outs(%z0 : tensor<?x4xf32>)
      -> tensor<?x4xf32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.ac_logits"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 0, 0, 2]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}

// -----

// CHECK: 'moe.attention_entropy' op expected dim i to stay whole (indices along it are absolute), found a tile of it; use tile size 0
func.func @attention_entropy_i(%q: tensor<1x4x64x3xf32>, %mean: tensor<1x4xf32>,
                               %rows: tensor<1x4x64xf32>) {
  %r:2 = moe.attention_entropy
      ins(%q, %q : tensor<1x4x64x3xf32>, tensor<1x4x64x3xf32>)
      outs(%mean, %rows : tensor<1x4xf32>, tensor<1x4x64xf32>)
      -> tensor<1x4xf32>, tensor<1x4x64xf32>
  return
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.attention_entropy"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %op tile_sizes [0, 0, 16]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}
