// RUN: %moe-opt %s --moe-convert-to-softmax-mix --canonicalize --cse | FileCheck %s
// RUN: %moe-opt %s --moe-convert-to-softmax-mix --moe-convert-to-softmax-mix --canonicalize --cse | FileCheck %s

// CHECK-NOT: moe.similarity_inform
// CHECK-NOT: moe.attention_entropy
// CHECK-NOT: moe.attention_posterior

// Queries are keys, one mask covers both, 1/tau is the scale, and the mix
// writes into the op's own destinations.

// CHECK-LABEL: func @similarity_is_attention_of_tokens_to_themselves
// CHECK-SAME:    %[[U:[^:]*]]: tensor<2x?x8xf32>, %[[E:[^:]*]]: tensor<2x?x4xf32>, %[[MASK:[^:]*]]: tensor<2x?xi1>, %[[P0:[^:]*]]: tensor<2x?x4xf32>
// CHECK-DAG:     %[[TOKENS:.*]] = tensor.expand_shape %[[U]]
// CHECK-DAG:     %[[OUT:.*]] = tensor.expand_shape %[[P0]]
// CHECK:         %[[MIX:.*]]:2 = moe.softmax_mix ins(%[[TOKENS]], %[[TOKENS]] :
// CHECK-SAME:      values(%[[E]] :
// CHECK-SAME:      query_mask(%[[MASK]] : tensor<2x?xi1>) key_mask(%[[MASK]] : tensor<2x?xi1>)
// CHECK-SAME:      outs(%[[OUT]], %{{.*}} : tensor<2x1x?x4xf32>, tensor<2x1x?xf32>)
// CHECK-SAME:      {scale = 2.500000e-01 : f64, visibility = #moe.visibility<causal>}
// CHECK:         %[[P:.*]] = tensor.collapse_shape %[[MIX]]#0
// CHECK:         return %[[P]]
func.func @similarity_is_attention_of_tokens_to_themselves(
    %u: tensor<2x?x8xf32>, %e: tensor<2x?x4xf32>, %mask: tensor<2x?xi1>,
    %p: tensor<2x?x4xf32>, %lse: tensor<2x?xf32>)
    -> (tensor<2x?x4xf32>, tensor<2x?xf32>) {
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x?x8xf32>, tensor<2x?x4xf32>)
      mask(%mask : tensor<2x?xi1>)
      outs(%p, %lse : tensor<2x?x4xf32>, tensor<2x?xf32>)
      {tau = 4.0 : f64, visibility = #moe.visibility<causal>}
      -> tensor<2x?x4xf32>, tensor<2x?xf32>
  return %r#0, %r#1 : tensor<2x?x4xf32>, tensor<2x?xf32>
}

// ws goes into the queries in f32, cached keys keep their own mask, and a
// learned tau divides the queries because the scale is an attribute.

// CHECK-LABEL: func @a_learned_tau_divides_the_queries
// CHECK-SAME:    %[[U:[^:]*]]: tensor<2x3x8xbf16>, %[[UK:[^:]*]]: tensor<2x9x6xbf16>, %[[WS:[^:]*]]: tensor<8x6xbf16>, {{.*}}, %[[TAU:[^:]*]]: f32, %[[ORIGIN:[^:]*]]: index
// CHECK:         %[[PROJECTED:.*]] = linalg.generic {{.*}} ins(%[[U]], %[[WS]] : {{.*}}) outs(%{{.*}} : tensor<2x3x6xf32>)
// CHECK:         %[[SCALED:.*]] = linalg.generic {{.*}} ins(%[[PROJECTED]] :
// CHECK:           arith.divf %{{.*}}, %[[TAU]]
// CHECK:         %[[Q:.*]] = tensor.expand_shape %[[SCALED]]
// CHECK:         %[[K:.*]] = tensor.expand_shape %[[UK]]
// CHECK:         moe.softmax_mix ins(%[[Q]], %[[K]] : tensor<2x1x3x6xf32>, tensor<2x1x9x6xbf16>)
// CHECK-NOT:       query_mask
// CHECK-SAME:      key_mask(
// CHECK-SAME:      origin(%[[ORIGIN]] : index)
// CHECK-NOT:       scale
func.func @a_learned_tau_divides_the_queries(
    %u: tensor<2x3x8xbf16>, %uk: tensor<2x9x6xbf16>, %ws: tensor<8x6xbf16>,
    %e: tensor<2x9x4xf32>, %mask: tensor<2x9xi1>, %tau: f32, %origin: index,
    %p: tensor<2x3x4xf32>, %lse: tensor<2x3xf32>) -> tensor<2x3x4xf32> {
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x3x8xbf16>, tensor<2x9x4xf32>)
      keys(%uk : tensor<2x9x6xbf16>) ws(%ws : tensor<8x6xbf16>)
      mask(%mask : tensor<2x9xi1>) tau(%tau : f32) origin(%origin : index)
      outs(%p, %lse : tensor<2x3x4xf32>, tensor<2x3xf32>)
      -> tensor<2x3x4xf32>, tensor<2x3xf32>
  return %r#0 : tensor<2x3x4xf32>
}

// The sets J_i are levels: one entropy a token, compared as key and as query.

// CHECK-LABEL: func @a_restriction_by_entropy_becomes_levels
// CHECK-SAME:    %[[U:[^:]*]]: tensor<2x?x8xf32>, %[[E:[^:]*]]: tensor<2x?x4xf32>
// CHECK:         %[[LEVEL:.*]] = linalg.generic {{.*}} ins(%[[E]] :
// CHECK:           math.log
// CHECK:         moe.softmax_mix
// CHECK-SAME:      levels(%[[LEVEL]], %[[LEVEL]] : tensor<2x?xf32>, tensor<2x?xf32>)
func.func @a_restriction_by_entropy_becomes_levels(
    %u: tensor<2x?x8xf32>, %e: tensor<2x?x4xf32>, %p: tensor<2x?x4xf32>,
    %lse: tensor<2x?xf32>) -> tensor<2x?x4xf32> {
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x?x8xf32>, tensor<2x?x4xf32>)
      outs(%p, %lse : tensor<2x?x4xf32>, tensor<2x?xf32>)
      {restrict = #moe.restrict<entropy>}
      -> tensor<2x?x4xf32>, tensor<2x?xf32>
  return %r#0 : tensor<2x?x4xf32>
}

// One mix of the prior for the entropies of all heads, without values; one of
// the posterior for the chosen head, over the features q and wo^T u against k
// and v. The means wo v, [.., 9, 6] here, are never formed.

// CHECK-LABEL: func @the_best_head_is_chosen_first
// CHECK-SAME:    %[[Q:[^:]*]]: tensor<2x4x7x3xf32>, %[[K:[^:]*]]: tensor<2x4x9x3xf32>, %[[U:[^:]*]]: tensor<2x7x6xf32>, %[[E:[^:]*]]: tensor<2x9x8xf32>, %[[V:[^:]*]]: tensor<2x4x9x5xf32>, %[[WO:[^:]*]]: tensor<4x6x5xf32>
// CHECK-NOT:     x9x6xf32
// CHECK:         %[[PRIOR:.*]]:2 = moe.softmax_mix ins(%[[Q]], %[[K]] :
// CHECK-SAME:      {scale = 5.000000e-01 : f64, visibility = #moe.visibility<causal>, with_entropy = true}
// CHECK:         linalg.generic {{.*}} ins(%[[PRIOR]]#1 :
// CHECK:         tensor.extract %[[Q]]
// CHECK:         tensor.extract %[[K]]
// CHECK:         tensor.extract %[[V]]
// CHECK:         tensor.extract %[[WO]]
// CHECK:         tensor.insert_slice {{.*}} into tensor<2x1x7x8xf32>
// CHECK:         %[[QUERIES:.*]] = tensor.insert_slice {{.*}} : tensor<2x1x7x5xf32> into tensor<2x1x7x8xf32>
// CHECK:         %[[KEYS:.*]] = tensor.insert_slice {{.*}} : tensor<2x1x9x5xf32> into tensor<2x1x9x8xf32>
// CHECK:         %[[NORMS:.*]] = linalg.generic {{.*}} outs(%{{.*}} : tensor<2x1x9xf32>)
// CHECK:         %[[KEY_BIAS:.*]] = linalg.generic {{.*}} ins(%[[NORMS]] : tensor<2x1x9xf32>)
// CHECK:         moe.softmax_mix ins(%[[QUERIES]], %[[KEYS]] : tensor<2x1x7x8xf32>, tensor<2x1x9x8xf32>)
// CHECK-SAME:      values(%[[E]] :
// CHECK-SAME:      key_bias(%[[KEY_BIAS]] :
// CHECK-SAME:      {visibility = #moe.visibility<causal>}
// CHECK-NOT:     x9x6xf32
func.func @the_best_head_is_chosen_first(
    %q: tensor<2x4x7x3xf32>, %k: tensor<2x4x9x3xf32>, %u: tensor<2x7x6xf32>,
    %e: tensor<2x9x8xf32>, %v: tensor<2x4x9x5xf32>, %wo: tensor<4x6x5xf32>,
    %p: tensor<2x7x8xf32>, %head: tensor<2xi32>, %l1: tensor<2x1x7xf32>,
    %l2: tensor<2x1x7xf32>) -> tensor<2x7x8xf32> {
  %r:4 = moe.attention_posterior
      ins(%q, %k, %u, %e : tensor<2x4x7x3xf32>, tensor<2x4x9x3xf32>,
          tensor<2x7x6xf32>, tensor<2x9x8xf32>)
      values(%v, %wo : tensor<2x4x9x5xf32>, tensor<4x6x5xf32>)
      outs(%p, %head, %l1, %l2 : tensor<2x7x8xf32>, tensor<2xi32>,
           tensor<2x1x7xf32>, tensor<2x1x7xf32>)
      {scale = 0.5 : f64, visibility = #moe.visibility<causal>}
      -> tensor<2x7x8xf32>, tensor<2xi32>, tensor<2x1x7xf32>, tensor<2x1x7xf32>
  return %r#0 : tensor<2x7x8xf32>
}

// A fixed head is a slice, and no entropy is asked for.

// CHECK-LABEL: func @a_fixed_head_is_a_slice
// CHECK-SAME:    %[[Q:[^:]*]]: tensor<2x4x7x3xf32>
// CHECK:         tensor.extract_slice %[[Q]][0, 2, 0, 0] [2, 1, 7, 3]
// CHECK-NOT:     with_entropy
// CHECK-NOT:     tensor.extract %
func.func @a_fixed_head_is_a_slice(
    %q: tensor<2x4x7x3xf32>, %u: tensor<2x7x6xf32>, %e: tensor<2x7x8xf32>,
    %vp: tensor<2x4x7x6xf32>, %p: tensor<2x7x8xf32>, %head: tensor<2xi32>,
    %l: tensor<2x1x7xf32>) -> tensor<2x7x8xf32> {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<2x4x7x3xf32>, tensor<2x4x7x3xf32>,
          tensor<2x7x6xf32>, tensor<2x7x8xf32>)
      means(%vp : tensor<2x4x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<2x7x8xf32>, tensor<2xi32>,
           tensor<2x1x7xf32>, tensor<2x1x7xf32>)
      {head_mode = #moe.head_mode<fixed>, head = 2 : i64}
      -> tensor<2x7x8xf32>, tensor<2xi32>, tensor<2x1x7xf32>, tensor<2x1x7xf32>
  return %r#0 : tensor<2x7x8xf32>
}

// The weights of the heads need both log-sum-exps: the prior's normaliser does
// not cancel between heads.

// CHECK-LABEL: func @all_heads_need_two_sums_each
// CHECK-SAME:    %[[PI:[^:]*]]: tensor<2x7x4xf32>
// CHECK:         %[[PRIOR:.*]] = moe.softmax_mix {{.*}} outs(%{{.*}} : tensor<2x4x7xf32>)
// CHECK:         %[[JOINT:.*]]:2 = moe.softmax_mix {{.*}} outs(%{{.*}}, %{{.*}} : tensor<2x4x7x8xf32>, tensor<2x4x7xf32>)
// CHECK:         linalg.generic {{.*}} ins(%[[PRIOR]], %[[JOINT]]#1, %[[PI]] :
// CHECK:           math.log
// CHECK:         linalg.generic {{.*}} ins(%{{.*}}, %[[JOINT]]#0 :
// CHECK:         return
func.func @all_heads_need_two_sums_each(
    %pi: tensor<2x7x4xf32>, %q: tensor<2x4x7x3xf32>, %u: tensor<2x7x6xf32>,
    %e: tensor<2x7x8xf32>, %vp: tensor<2x4x7x6xf32>, %p: tensor<2x7x8xf32>,
    %head: tensor<2xi32>, %l: tensor<2x4x7xf32>) -> tensor<2x7x8xf32> {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<2x4x7x3xf32>, tensor<2x4x7x3xf32>,
          tensor<2x7x6xf32>, tensor<2x7x8xf32>)
      means(%vp : tensor<2x4x7x6xf32>) head_prior(%pi : tensor<2x7x4xf32>)
      outs(%p, %head, %l, %l : tensor<2x7x8xf32>, tensor<2xi32>,
           tensor<2x4x7xf32>, tensor<2x4x7xf32>)
      {head_mode = #moe.head_mode<all>}
      -> tensor<2x7x8xf32>, tensor<2xi32>, tensor<2x4x7xf32>, tensor<2x4x7xf32>
  return %r#0 : tensor<2x7x8xf32>
}

// The masks of queries and of keys are operands of their own, whatever sizes
// are: nothing is decided at run time.

// CHECK-LABEL: func @masks_of_queries_and_keys_are_those_of_the_mix
// CHECK-SAME:    %[[QUERIES:[^:]*]]: tensor<?x?xi1>, %[[KEYS:[^:]*]]: tensor<?x?xi1>
// CHECK-NOT:     arith.cmpi
// CHECK:         moe.softmax_mix
// CHECK-SAME:      query_mask(%[[QUERIES]] : tensor<?x?xi1>) key_mask(%[[KEYS]] : tensor<?x?xi1>)
func.func @masks_of_queries_and_keys_are_those_of_the_mix(
    %query_mask: tensor<?x?xi1>, %key_mask: tensor<?x?xi1>, %q: tensor<?x4x?x3xf32>, %k: tensor<?x4x?x3xf32>,
    %u: tensor<?x?x6xf32>, %e: tensor<?x?x8xf32>, %vp: tensor<?x4x?x6xf32>,
    %p: tensor<?x?x8xf32>, %head: tensor<?xi32>, %l: tensor<?x1x?xf32>)
    -> tensor<?x?x8xf32> {
  %r:4 = moe.attention_posterior
      ins(%q, %k, %u, %e : tensor<?x4x?x3xf32>, tensor<?x4x?x3xf32>,
          tensor<?x?x6xf32>, tensor<?x?x8xf32>)
      means(%vp : tensor<?x4x?x6xf32>)
      query_mask(%query_mask : tensor<?x?xi1>) key_mask(%key_mask : tensor<?x?xi1>)
      outs(%p, %head, %l, %l : tensor<?x?x8xf32>, tensor<?xi32>,
           tensor<?x1x?xf32>, tensor<?x1x?xf32>)
      -> tensor<?x?x8xf32>, tensor<?xi32>, tensor<?x1x?xf32>, tensor<?x1x?xf32>
  return %r#0 : tensor<?x?x8xf32>
}

// Entropies come from the pass over the keys that forms the log-sum-exp, with
// no values to mix; their mean divides by the unmasked queries.

// CHECK-LABEL: func @entropies_are_emitted_by_the_mix
// CHECK-SAME:    %[[Q:[^:]*]]: tensor<2x4x?x3xf32>, %[[K:[^:]*]]: tensor<2x4x?x3xf32>, %[[MASK:[^:]*]]: tensor<2x?xi1>, %[[MEAN0:[^:]*]]: tensor<2x4xf32>, %[[ROWS0:[^:]*]]: tensor<2x4x?xf32>
// CHECK:         %[[MIX:.*]]:2 = moe.softmax_mix ins(%[[Q]], %[[K]] :
// CHECK-NOT:       values
// CHECK-SAME:      query_mask(%[[MASK]] : {{.*}}) key_mask(%[[MASK]] : {{.*}}) outs(%{{.*}}, %[[ROWS0]] :
// CHECK-SAME:      {scale = 5.000000e-01 : f64, visibility = #moe.visibility<causal, window = 9>, with_entropy = true}
// CHECK:         %[[SUMS:.*]] = linalg.generic {{.*}} ins(%[[MIX]]#1 :
// CHECK:         %[[VALID:.*]] = linalg.generic {{.*}} ins(%[[MASK]] : {{.*}}) outs(%{{.*}} : tensor<2xi64>)
// CHECK:         %[[MEAN:.*]] = linalg.generic {{.*}} outs(%[[MEAN0]] :
// CHECK:         return %[[MEAN]], %[[MIX]]#1
func.func @entropies_are_emitted_by_the_mix(
    %q: tensor<2x4x?x3xf32>, %k: tensor<2x4x?x3xf32>, %mask: tensor<2x?xi1>,
    %mean: tensor<2x4xf32>, %rows: tensor<2x4x?xf32>)
    -> (tensor<2x4xf32>, tensor<2x4x?xf32>) {
  %m, %r = moe.attention_entropy
      ins(%q, %k : tensor<2x4x?x3xf32>, tensor<2x4x?x3xf32>)
      query_mask(%mask : tensor<2x?xi1>) key_mask(%mask : tensor<2x?xi1>)
      outs(%mean, %rows : tensor<2x4xf32>, tensor<2x4x?xf32>)
      {scale = 0.5 : f64, visibility = #moe.visibility<causal, window = 9>}
      -> tensor<2x4xf32>, tensor<2x4x?xf32>
  return %m, %r : tensor<2x4xf32>, tensor<2x4x?xf32>
}

// The attention before the router emits what the router asks of its heads: no
// pass over the keys without values is left.

// CHECK-LABEL: func @attention_emits_its_entropies
// CHECK-SAME:    %[[Q:[^:]*]]: tensor<2x4x?x8xf32>, %[[K:[^:]*]]: tensor<2x4x?x8xf32>, %[[V:[^:]*]]: tensor<2x4x?x8xf32>
// CHECK:         %[[MIX:.*]]:3 = moe.softmax_mix ins(%[[Q]], %[[K]] :
// CHECK-SAME:      values(%[[V]] : tensor<2x4x?x8xf32>)
// CHECK-SAME:      with_entropy = true
// CHECK-NOT:     moe.softmax_mix ins(%[[Q]], %[[K]] :
// CHECK:         linalg.generic {{.*}} ins(%[[MIX]]#2 : tensor<2x4x?xf32>)
// CHECK:         moe.softmax_mix {{.*}} values(%{{.*}} : tensor<2x?x5xf32>)
// CHECK-NOT:     moe.softmax_mix
// CHECK:         return
func.func @attention_emits_its_entropies(
    %q: tensor<2x4x?x8xf32>, %k: tensor<2x4x?x8xf32>, %v: tensor<2x4x?x8xf32>,
    %u: tensor<2x?x16xf32>, %e: tensor<2x?x5xf32>, %wo: tensor<4x16x8xf32>,
    %out: tensor<2x4x?x8xf32>, %lse: tensor<2x4x?xf32>, %p: tensor<2x?x5xf32>,
    %head: tensor<2xi32>, %l1: tensor<2x1x?xf32>, %l2: tensor<2x1x?xf32>)
    -> (tensor<2x4x?x8xf32>, tensor<2x4x?xf32>, tensor<2x?x5xf32>) {
  %a:2 = moe.softmax_mix
      ins(%q, %k : tensor<2x4x?x8xf32>, tensor<2x4x?x8xf32>)
      values(%v : tensor<2x4x?x8xf32>)
      outs(%out, %lse : tensor<2x4x?x8xf32>, tensor<2x4x?xf32>)
      {scale = 0.5 : f64, visibility = #moe.visibility<causal>}
      -> tensor<2x4x?x8xf32>, tensor<2x4x?xf32>
  %r:4 = moe.attention_posterior
      ins(%q, %k, %u, %e : tensor<2x4x?x8xf32>, tensor<2x4x?x8xf32>,
          tensor<2x?x16xf32>, tensor<2x?x5xf32>)
      values(%v, %wo : tensor<2x4x?x8xf32>, tensor<4x16x8xf32>)
      outs(%p, %head, %l1, %l2 : tensor<2x?x5xf32>, tensor<2xi32>,
           tensor<2x1x?xf32>, tensor<2x1x?xf32>)
      {scale = 0.5 : f64, visibility = #moe.visibility<causal>}
      -> tensor<2x?x5xf32>, tensor<2xi32>, tensor<2x1x?xf32>, tensor<2x1x?xf32>
  return %a#0, %a#1, %r#0
      : tensor<2x4x?x8xf32>, tensor<2x4x?xf32>, tensor<2x?x5xf32>
}

// Another scale is another softmax: the entropies take a pass of their own.

// CHECK-LABEL: func @another_attention_is_left_alone
// CHECK:         moe.softmax_mix {{.*}} values(%{{.*}} : tensor<2x4x?x8xf32>)
// CHECK-NOT:       with_entropy
// CHECK:         moe.softmax_mix ins(
// CHECK-NOT:       values
// CHECK-SAME:      with_entropy = true
func.func @another_attention_is_left_alone(
    %q: tensor<2x4x?x8xf32>, %v: tensor<2x4x?x8xf32>,
    %out: tensor<2x4x?x8xf32>, %lse: tensor<2x4x?xf32>, %mean: tensor<2x4xf32>)
    -> (tensor<2x4x?x8xf32>, tensor<2x4xf32>) {
  %a:2 = moe.softmax_mix
      ins(%q, %q : tensor<2x4x?x8xf32>, tensor<2x4x?x8xf32>)
      values(%v : tensor<2x4x?x8xf32>)
      outs(%out, %lse : tensor<2x4x?x8xf32>, tensor<2x4x?xf32>)
      {scale = 0.25 : f64, visibility = #moe.visibility<causal>}
      -> tensor<2x4x?x8xf32>, tensor<2x4x?xf32>
  %m:2 = moe.attention_entropy
      ins(%q, %q : tensor<2x4x?x8xf32>, tensor<2x4x?x8xf32>)
      outs(%mean, %lse : tensor<2x4xf32>, tensor<2x4x?xf32>)
      {scale = 0.5 : f64, visibility = #moe.visibility<causal>} -> tensor<2x4xf32>, tensor<2x4x?xf32>
  return %a#0, %m#0 : tensor<2x4x?x8xf32>, tensor<2x4xf32>
}

// Rows that are given are masked and used; the prior takes no pass at all.

// CHECK-LABEL: func @given_rows_choose_the_head
// CHECK-SAME:    %[[MASK:[^:]*]]: tensor<2x7xi1>, %[[LSE:[^:]*]]: tensor<2x4x7xf32>, %[[ENTROPY:[^:]*]]: tensor<2x4x7xf32>
// CHECK-DAG:     linalg.generic {{.*}} ins(%[[LSE]], %[[MASK]] :
// CHECK-DAG:     linalg.generic {{.*}} ins(%[[ENTROPY]], %[[MASK]] :
// CHECK-COUNT-1: moe.softmax_mix
// CHECK-NOT:     moe.softmax_mix
// CHECK:         return
func.func @given_rows_choose_the_head(
    %mask: tensor<2x7xi1>, %row_lse: tensor<2x4x7xf32>,
    %row_entropy: tensor<2x4x7xf32>, %q: tensor<2x4x7x8xf32>,
    %u: tensor<2x7x16xf32>, %e: tensor<2x7x5xf32>, %vp: tensor<2x4x7x16xf32>,
    %p: tensor<2x7x5xf32>, %head: tensor<2xi32>, %l1: tensor<2x1x7xf32>,
    %l2: tensor<2x1x7xf32>) -> (tensor<2x7x5xf32>, tensor<2x1x7xf32>) {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<2x4x7x8xf32>, tensor<2x4x7x8xf32>,
          tensor<2x7x16xf32>, tensor<2x7x5xf32>)
      means(%vp : tensor<2x4x7x16xf32>)
      query_mask(%mask : tensor<2x7xi1>) key_mask(%mask : tensor<2x7xi1>)
      rows(%row_lse, %row_entropy : tensor<2x4x7xf32>, tensor<2x4x7xf32>)
      outs(%p, %head, %l1, %l2 : tensor<2x7x5xf32>, tensor<2xi32>,
           tensor<2x1x7xf32>, tensor<2x1x7xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<2x7x5xf32>, tensor<2xi32>, tensor<2x1x7xf32>, tensor<2x1x7xf32>
  return %r#0, %r#2 : tensor<2x7x5xf32>, tensor<2x1x7xf32>
}
