// RUN: %moe-opt %s --transform-interpreter --canonicalize --cse | FileCheck %s

// Each tileable dim of each op is cut once; operands that the dim indexes are
// sliced, the others are read whole.

// CHECK-LABEL: func @router_logits
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x352xf32>, %[[W:[^:]*]]: tensor<64x352xf32>, %[[BIAS:[^:]*]]: tensor<64xf32>
// CHECK:         scf.forall
// CHECK-DAG:       %[[TOKENS:.*]] = tensor.extract_slice %[[H]]
// CHECK-DAG:       %[[EXPERTS:.*]] = tensor.extract_slice %[[W]][%{{.*}}, 0] [16, 352]
// CHECK-DAG:       %[[OFFSETS:.*]] = tensor.extract_slice %[[BIAS]][%{{.*}}] [16]
// CHECK:           moe.router_logits ins(%[[TOKENS]], %[[EXPERTS]] : {{.*}}) bias(%[[OFFSETS]] : {{.*}}) outs(%{{.*}} : tensor<?x16xf32>)
func.func @router_logits(%h: tensor<?x352xf32>, %w: tensor<64x352xf32>,
                         %bias: tensor<64xf32>, %z0: tensor<?x64xf32>)
    -> tensor<?x64xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<?x352xf32>, tensor<64x352xf32>)
      bias(%bias : tensor<64xf32>) outs(%z0 : tensor<?x64xf32>)
      -> tensor<?x64xf32>
  return %z : tensor<?x64xf32>
}

// A mask is cut with the tokens. num_valid compares with positions in the whole
// problem, which a tile does not know: it becomes part of the mask.

// CHECK-LABEL: func @topk_renorm
// CHECK-SAME:    %[[Z:[^:]*]]: tensor<?x64xf32>, %[[MASK:[^:]*]]: tensor<?xi1>, %[[NUM_VALID:[^:]*]]: i32
// CHECK:         scf.forall
// CHECK:           %[[REAL:.*]] = linalg.generic {{.*}} ins(%[[MASK]] : tensor<?xi1>)
// CHECK-DAG:       %[[TOKENS:.*]] = tensor.extract_slice %[[Z]][%{{.*}}, 0] [%{{.*}}, 64]
// CHECK-DAG:       %[[REALS:.*]] = tensor.extract_slice %[[REAL]]
// CHECK:           moe.topk_renorm ins(%[[TOKENS]] : tensor<?x64xf32>) mask(%[[REALS]] : tensor<?xi1>) outs(
func.func @topk_renorm(%z: tensor<?x64xf32>, %mask: tensor<?xi1>,
                       %num_valid: i32, %g0: tensor<?x8xf32>,
                       %i0: tensor<?x8xi32>)
    -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>) mask(%mask : tensor<?xi1>)
      num_valid(%num_valid : i32)
      outs(%g0, %i0 : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}

// The keys of a self-similar op stay whole where its queries are cut, the mask
// of the tokens splits into both roles, and a given origin moves by the tile.

// CHECK-LABEL: func @similarity_inform
// CHECK-SAME:    %[[U:[^:]*]]: tensor<2x128x8xf32>, %[[E:[^:]*]]: tensor<2x128x4xf32>, %[[MASK:[^:]*]]: tensor<2x128xi1>, %[[ORIGIN:[^:]*]]: index
// CHECK:         scf.forall (%[[B:.*]], %[[ROW:.*]]) in (2, 4)
// CHECK:           %[[MOVED:.*]] = affine.apply #{{[a-z0-9]*}}(%[[ROW]])[%[[ORIGIN]]]
// CHECK:           moe.similarity_inform ins(%{{.*}}, %{{.*}} : tensor<1x32x8xf32>, tensor<1x128x4xf32>)
// CHECK-SAME:        keys(%{{.*}} : tensor<1x128x8xf32>)
// CHECK-SAME:        mask(%{{.*}} : tensor<1x128xi1>) query_mask(%{{.*}} : tensor<1x32xi1>)
// CHECK-SAME:        origin(%[[MOVED]] : index)
func.func @similarity_inform(
    %u: tensor<2x128x8xf32>, %e: tensor<2x128x4xf32>, %mask: tensor<2x128xi1>,
    %origin: index, %p: tensor<2x128x4xf32>, %l: tensor<2x128xf32>)
    -> tensor<2x128x4xf32> {
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x128x8xf32>, tensor<2x128x4xf32>)
      mask(%mask : tensor<2x128xi1>) origin(%origin : index)
      outs(%p, %l : tensor<2x128x4xf32>, tensor<2x128xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<2x128x4xf32>, tensor<2x128xf32>
  return %r#0 : tensor<2x128x4xf32>
}

// The head is chosen from all rows of a sequence: only sequences are cut.

// CHECK-LABEL: func @attention_posterior
// CHECK:         scf.forall (%{{.*}}) in (3)
// CHECK:           moe.attention_posterior ins(%{{.*}} : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>, tensor<1x?x64xf32>, tensor<1x?x8xf32>)
// CHECK-SAME:        outs(%{{.*}} : tensor<1x?x8xf32>, tensor<1xi32>, tensor<1x1x?xf32>, tensor<1x1x?xf32>)
func.func @attention_posterior(
    %q: tensor<3x4x?x16xf32>, %u: tensor<3x?x64xf32>, %e: tensor<3x?x8xf32>,
    %vp: tensor<3x4x?x64xf32>, %p: tensor<3x?x8xf32>, %head: tensor<3xi32>,
    %l: tensor<3x1x?xf32>) -> tensor<3x?x8xf32> {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<3x4x?x16xf32>, tensor<3x4x?x16xf32>,
          tensor<3x?x64xf32>, tensor<3x?x8xf32>)
      means(%vp : tensor<3x4x?x64xf32>)
      outs(%p, %head, %l, %l : tensor<3x?x8xf32>, tensor<3xi32>,
           tensor<3x1x?xf32>, tensor<3x1x?xf32>)
      -> tensor<3x?x8xf32>, tensor<3xi32>, tensor<3x1x?xf32>, tensor<3x1x?xf32>
  return %r#0 : tensor<3x?x8xf32>
}

// A bias that all heads share is read whole along them.

// CHECK-LABEL: func @softmax_mix
// CHECK-SAME:    %[[Q:[^:]*]]: tensor<2x4x64x8xf32>, %[[K:[^:]*]]: tensor<2x4x96x8xf32>, %[[BIAS:[^:]*]]: tensor<2x1x64x96xf32>
// CHECK:         scf.forall (%[[B:.*]], %[[H:.*]], %[[ROW:.*]]) in (2, 4, 2)
// CHECK-DAG:       tensor.extract_slice %[[BIAS]][%[[B]], 0, %{{.*}}, 0] [1, 1, 32, 96]
// CHECK-DAG:       tensor.extract_slice %[[K]][%[[B]], %[[H]], 0, 0] [1, 1, 96, 8]
// CHECK:           moe.softmax_mix
// CHECK-SAME:        origin(
func.func @softmax_mix(%q: tensor<2x4x64x8xf32>, %k: tensor<2x4x96x8xf32>,
                       %bias: tensor<2x1x64x96xf32>, %l: tensor<2x4x64xf32>)
    -> tensor<2x4x64xf32> {
  %r = moe.softmax_mix ins(%q, %k : tensor<2x4x64x8xf32>, tensor<2x4x96x8xf32>)
      bias(%bias : tensor<2x1x64x96xf32>) outs(%l : tensor<2x4x64xf32>)
      -> tensor<2x4x64xf32>
  return %r : tensor<2x4x64xf32>
}

// Counts do not span the features: each tile of features writes them again.

// CHECK-LABEL: func @mad_dispersion
// CHECK:         scf.for
// CHECK:           moe.mad_dispersion ins(%{{.*}} : tensor<?x128xf32>, tensor<?xi32>)
// CHECK-SAME:        outs(%{{.*}} : tensor<16x128xf32>, tensor<16x128xf32>, tensor<16xi32>)
func.func @mad_dispersion(
    %h: tensor<?x512xf32>, %assign: tensor<?xi32>, %s: tensor<16x512xf32>,
    %mean: tensor<16x512xf32>, %count: tensor<16xi32>)
    -> (tensor<16x512xf32>, tensor<16xi32>) {
  %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x512xf32>, tensor<?xi32>)
      outs(%s, %mean, %count : tensor<16x512xf32>, tensor<16x512xf32>,
           tensor<16xi32>)
      -> tensor<16x512xf32>, tensor<16x512xf32>, tensor<16xi32>
  return %r#0, %r#2 : tensor<16x512xf32>, tensor<16xi32>
}

// CHECK-LABEL: func @adjacency_gate
// CHECK-SAME:    %[[P:[^:]*]]: tensor<?x16xf32>, %[[A:[^:]*]]: tensor<16x16xf32>
// CHECK:         scf.forall
// CHECK:           %[[TOKENS:.*]] = tensor.extract_slice %[[P]]
// CHECK:           moe.adjacency_gate ins(%[[TOKENS]], %[[A]] : tensor<?x16xf32>, tensor<16x16xf32>)
func.func @adjacency_gate(%p: tensor<?x16xf32>, %a: tensor<16x16xf32>,
                          %g: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %r = moe.adjacency_gate ins(%p, %a : tensor<?x16xf32>, tensor<16x16xf32>)
      outs(%g : tensor<?x16xf32>) -> tensor<?x16xf32>
  return %r : tensor<?x16xf32>
}

module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %logits = transform.structured.match ops{["moe.router_logits"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_forall %logits tile_sizes [32, 16]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %topk = transform.structured.match ops{["moe.topk_renorm"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_forall %topk tile_sizes [32]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %inform = transform.structured.match ops{["moe.similarity_inform"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_forall %inform tile_sizes [1, 32]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %posterior = transform.structured.match ops{["moe.attention_posterior"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_forall %posterior tile_sizes [1]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %mix = transform.structured.match ops{["moe.softmax_mix"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_forall %mix tile_sizes [1, 1, 32]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %disperse = transform.structured.match ops{["moe.mad_dispersion"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_for %disperse tile_sizes [0, 128]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %gate = transform.structured.match ops{["moe.adjacency_gate"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_forall %gate tile_sizes [32]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}
