// RUN: %moe-opt %s --moe-decompose --canonicalize --cse | FileCheck %s
// RUN: %moe-opt %s --moe-decompose --moe-decompose --canonicalize --cse | FileCheck %s
// RUN: %moe-opt %s --moe-decompose=ops=moe.router_logits,adjacency_gate --canonicalize --cse | FileCheck %s --check-prefix=SOME
// RUN: %moe-opt %s --moe-decompose --mlir-pass-statistics --mlir-pass-statistics-display=list -o /dev/null 2>&1 | FileCheck %s --check-prefix=STATS

// STATS: MoEDecompose
// STATS: 10 num-decomposed
// STATS: 0 num-refused

// CHECK-NOT: moe.

// CHECK-LABEL: func @decomposes_a_router
// CHECK:         linalg.generic
// SOME-LABEL:  func @decomposes_a_router
// SOME-NOT:      moe.router_logits
// SOME:          %[[Z:.*]] = linalg.generic {{.*}} iterator_types = ["parallel", "parallel", "reduction"]
// SOME:          moe.topk_renorm ins(%[[Z]]
func.func @decomposes_a_router(
    %h: tensor<?x32xf32>, %w: tensor<8x32xf32>, %z0: tensor<?x8xf32>,
    %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %z = moe.router_logits ins(%h, %w : tensor<?x32xf32>, tensor<8x32xf32>)
      outs(%z0 : tensor<?x8xf32>) -> tensor<?x8xf32>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g, %i : tensor<?x2xf32>, tensor<?x2xi32>
}

// CHECK-LABEL: func @decomposes_a_grouped_selection
// CHECK:         math.log1p
// SOME-LABEL:  func @decomposes_a_grouped_selection
// SOME:          moe.topk_renorm
func.func @decomposes_a_grouped_selection(
    %z: tensor<3x?x8xbf16>, %bias: tensor<8xf32>, %forced: tensor<3x?x?xi32>,
    %mask: tensor<3x?xi1>, %n: i32, %g0: tensor<3x?x?xf32>,
    %i0: tensor<3x?x?xi32>) -> (tensor<3x?x?xf32>, tensor<3x?x?xi32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<3x?x8xbf16>) bias(%bias : tensor<8xf32>)
      forced(%forced : tensor<3x?x?xi32>) mask(%mask : tensor<3x?xi1>)
      num_valid(%n : i32)
      outs(%g0, %i0 : tensor<3x?x?xf32>, tensor<3x?x?xi32>)
      {score = #moe.score_function<sigmoid>, n_group = 4 : i64,
       topk_group = 2 : i64}
      -> tensor<3x?x?xf32>, tensor<3x?x?xi32>
  return %g, %i : tensor<3x?x?xf32>, tensor<3x?x?xi32>
}

// CHECK-LABEL: func @decomposes_mixing
// SOME-LABEL:  func @decomposes_mixing
// SOME:          moe.similarity_inform
// SOME:          moe.softmax_mix
// SOME:          moe.attention_posterior
func.func @decomposes_mixing(
    %u: tensor<?x?x?xf32>, %e: tensor<?x?x?xf32>, %q: tensor<?x?x?x?xf32>,
    %vp: tensor<?x?x?x?xf32>, %mask: tensor<?x?xi1>, %head: tensor<?xi32>,
    %rows: tensor<?x?xf32>, %lse: tensor<?x?x?xf32>)
    -> (tensor<?x?x?xf32>, tensor<?x?x?xf32>) {
  %p:2 = moe.similarity_inform ins(%u, %e : tensor<?x?x?xf32>, tensor<?x?x?xf32>)
      outs(%e, %rows : tensor<?x?x?xf32>, tensor<?x?xf32>)
      {restrict = #moe.restrict<entropy>}
      -> tensor<?x?x?xf32>, tensor<?x?xf32>
  %l:2 = moe.softmax_mix ins(%q, %q : tensor<?x?x?x?xf32>, tensor<?x?x?x?xf32>)
      outs(%lse, %lse : tensor<?x?x?xf32>, tensor<?x?x?xf32>)
      {visibility = #moe.visibility<window = 4, exclude_self>, with_entropy = true}
      -> tensor<?x?x?xf32>, tensor<?x?x?xf32>
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %p#0 : tensor<?x?x?x?xf32>, tensor<?x?x?x?xf32>,
          tensor<?x?x?xf32>, tensor<?x?x?xf32>)
      means(%vp : tensor<?x?x?x?xf32>)
      query_mask(%mask : tensor<?x?xi1>) key_mask(%mask : tensor<?x?xi1>)
      outs(%e, %head, %lse, %lse : tensor<?x?x?xf32>, tensor<?xi32>,
           tensor<?x?x?xf32>, tensor<?x?x?xf32>)
      {scale = 1.0 : f64, head_scope = #moe.head_scope<batch>}
      -> tensor<?x?x?xf32>, tensor<?xi32>, tensor<?x?x?xf32>, tensor<?x?x?xf32>
  return %r#0, %l#1 : tensor<?x?x?xf32>, tensor<?x?x?xf32>
}

// CHECK-LABEL: func @decomposes_statistics
// SOME-LABEL:  func @decomposes_statistics
// SOME:          moe.mad_dispersion
// SOME-NOT:      moe.adjacency_gate
// SOME:          moe.adjacency_update
func.func @decomposes_statistics(
    %h: tensor<?x?xf32>, %assign: tensor<?xi64>, %p: tensor<?x?xf32>,
    %a: tensor<?x?xf32>, %i: tensor<?x2xi32>, %count: tensor<?xi32>)
    -> (tensor<?x?xf32>, tensor<?x?xf32>, tensor<?x?xf32>) {
  %s:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x?xf32>, tensor<?xi64>)
      outs(%h, %h, %count : tensor<?x?xf32>, tensor<?x?xf32>, tensor<?xi32>)
      {measure = #moe.dispersion_measure<pairwise>}
      -> tensor<?x?xf32>, tensor<?x?xf32>, tensor<?xi32>
  %g = moe.adjacency_gate ins(%p, %a : tensor<?x?xf32>, tensor<?x?xf32>)
      outs(%p : tensor<?x?xf32>) {cold_start = #moe.cold_start<base>}
      -> tensor<?x?xf32>
  %new = moe.adjacency_update ins(%a, %i : tensor<?x?xf32>, tensor<?x2xi32>)
      outs(%a : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %s#0, %g, %new : tensor<?x?xf32>, tensor<?x?xf32>, tensor<?x?xf32>
}

// An op that aggregates but is not of the dialect is nobody's business here.

// CHECK-LABEL: func @leaves_other_dialects
// CHECK:         linalg.softmax
func.func @leaves_other_dialects(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %s = linalg.softmax dimension(1) ins(%x : tensor<4x8xf32>)
      outs(%x : tensor<4x8xf32>) -> tensor<4x8xf32>
  return %s : tensor<4x8xf32>
}
