// RUN: %moe-opt %s --canonicalize --split-input-file | FileCheck %s
// RUN: %moe-opt %s --canonicalize --canonicalize --split-input-file | FileCheck %s

// The last query sits at the last key: a window over all keys hides none.

// CHECK-LABEL: func @forgets_a_window_over_all_keys
// CHECK:         moe.similarity_inform
// CHECK-NOT:       window
// CHECK:         moe.attention_entropy
// CHECK-NOT:       window
// CHECK:         moe.softmax_mix
// CHECK-NOT:       window
func.func @forgets_a_window_over_all_keys(
    %u: tensor<2x7x8xf32>, %e: tensor<2x7x4xf32>, %l: tensor<2x7xf32>,
    %q: tensor<2x3x5x8xf32>, %k: tensor<2x3x9x8xf32>, %mean: tensor<2x3xf32>,
    %rows: tensor<2x3x5xf32>)
    -> (tensor<2x7x4xf32>, tensor<2x3xf32>, tensor<2x3x5xf32>) {
  %p:2 = moe.similarity_inform ins(%u, %e : tensor<2x7x8xf32>, tensor<2x7x4xf32>)
      outs(%e, %l : tensor<2x7x4xf32>, tensor<2x7xf32>)
      {visibility = #moe.visibility<causal, window = 7>} -> tensor<2x7x4xf32>, tensor<2x7xf32>
  %h:2 = moe.attention_entropy
      ins(%q, %k : tensor<2x3x5x8xf32>, tensor<2x3x9x8xf32>)
      outs(%mean, %rows : tensor<2x3xf32>, tensor<2x3x5xf32>)
      {visibility = #moe.visibility<causal, window = 9>} -> tensor<2x3xf32>, tensor<2x3x5xf32>
  %m = moe.softmax_mix ins(%q, %k : tensor<2x3x5x8xf32>, tensor<2x3x9x8xf32>)
      outs(%rows : tensor<2x3x5xf32>) {visibility = #moe.visibility<window = 9>} -> tensor<2x3x5xf32>
  return %p#0, %h#0, %m : tensor<2x7x4xf32>, tensor<2x3xf32>, tensor<2x3x5xf32>
}

// -----

// One key less, sizes that are not known, and queries at a position of their
// own keep their window.

// CHECK-LABEL: func @keeps_a_window_that_may_hide
// CHECK-COUNT-3: window = 8
func.func @keeps_a_window_that_may_hide(
    %q: tensor<2x3x5x8xf32>, %k: tensor<2x3x9x8xf32>, %rows: tensor<2x3x5xf32>,
    %long: tensor<2x3x?x8xf32>, %short: tensor<2x3x4x8xf32>, %origin: index)
    -> (tensor<2x3x5xf32>, tensor<2x3x5xf32>, tensor<2x3x5xf32>) {
  %a = moe.softmax_mix ins(%q, %k : tensor<2x3x5x8xf32>, tensor<2x3x9x8xf32>)
      outs(%rows : tensor<2x3x5xf32>) {visibility = #moe.visibility<window = 8>} -> tensor<2x3x5xf32>
  %b = moe.softmax_mix ins(%q, %long : tensor<2x3x5x8xf32>, tensor<2x3x?x8xf32>)
      outs(%rows : tensor<2x3x5xf32>) {visibility = #moe.visibility<window = 8>} -> tensor<2x3x5xf32>
  %c = moe.softmax_mix ins(%q, %short : tensor<2x3x5x8xf32>, tensor<2x3x4x8xf32>)
      origin(%origin : index) outs(%rows : tensor<2x3x5xf32>)
      {visibility = #moe.visibility<window = 8>} -> tensor<2x3x5xf32>
  return %a, %b, %c : tensor<2x3x5xf32>, tensor<2x3x5xf32>, tensor<2x3x5xf32>
}

// -----

// A decode step has one query, which no key follows.

// CHECK-LABEL: func @one_query_sees_all_keys
// CHECK:         moe.softmax_mix
// CHECK-NOT:       causal
func.func @one_query_sees_all_keys(
    %q: tensor<2x3x1x8xf32>, %k: tensor<2x3x?x8xf32>, %rows: tensor<2x3x1xf32>)
    -> tensor<2x3x1xf32> {
  %m = moe.softmax_mix ins(%q, %k : tensor<2x3x1x8xf32>, tensor<2x3x?x8xf32>)
      outs(%rows : tensor<2x3x1xf32>) {visibility = #moe.visibility<causal>} -> tensor<2x3x1xf32>
  return %m : tensor<2x3x1xf32>
}

// -----

// CHECK-LABEL: func @forgets_an_identity_of_the_similarity
// CHECK:         moe.similarity_inform
// CHECK-NOT:       ws
// CHECK:         moe.similarity_inform
// CHECK-SAME:      ws(
func.func @forgets_an_identity_of_the_similarity(
    %u: tensor<2x7x2xf32>, %e: tensor<2x7x4xf32>, %l: tensor<2x7xf32>)
    -> (tensor<2x7x4xf32>, tensor<2x7x4xf32>) {
  %i = arith.constant dense<[[1.0, 0.0], [0.0, 1.0]]> : tensor<2x2xf32>
  %j = arith.constant dense<[[1.0, 1.0], [0.0, 1.0]]> : tensor<2x2xf32>
  %p:2 = moe.similarity_inform ins(%u, %e : tensor<2x7x2xf32>, tensor<2x7x4xf32>)
      ws(%i : tensor<2x2xf32>)
      outs(%e, %l : tensor<2x7x4xf32>, tensor<2x7xf32>)
      -> tensor<2x7x4xf32>, tensor<2x7xf32>
  %q:2 = moe.similarity_inform ins(%u, %e : tensor<2x7x2xf32>, tensor<2x7x4xf32>)
      ws(%j : tensor<2x2xf32>)
      outs(%e, %l : tensor<2x7x4xf32>, tensor<2x7xf32>)
      -> tensor<2x7x4xf32>, tensor<2x7xf32>
  return %p#0, %q#0 : tensor<2x7x4xf32>, tensor<2x7x4xf32>
}

// -----

// CHECK-LABEL: func @forgets_masks_and_biases_without_effect
// CHECK:         moe.softmax_mix ins(%{{[^)]*}}) outs(
// CHECK:         moe.softmax_mix ins(%{{[^)]*}}) bias({{.*}}) key_mask(
func.func @forgets_masks_and_biases_without_effect(
    %q: tensor<2x3x5x8xf32>, %rows: tensor<2x3x5xf32>)
    -> (tensor<2x3x5xf32>, tensor<2x3x5xf32>) {
  %trues = arith.constant dense<true> : tensor<2x5xi1>
  %falses = arith.constant dense<false> : tensor<2x5xi1>
  %zeros = arith.constant dense<0.0> : tensor<1x1x5x5xf32>
  %ones = arith.constant dense<1.0> : tensor<1x1x5x5xf32>
  %none = arith.constant dense<0.0> : tensor<2x3x5xf32>
  %a = moe.softmax_mix ins(%q, %q : tensor<2x3x5x8xf32>, tensor<2x3x5x8xf32>)
      key_bias(%none : tensor<2x3x5xf32>) bias(%zeros : tensor<1x1x5x5xf32>)
      query_mask(%trues : tensor<2x5xi1>) key_mask(%trues : tensor<2x5xi1>)
      outs(%rows : tensor<2x3x5xf32>) -> tensor<2x3x5xf32>
  // A bias of ones is a part of the log-sum-exp.
  %b = moe.softmax_mix ins(%q, %q : tensor<2x3x5x8xf32>, tensor<2x3x5x8xf32>)
      bias(%ones : tensor<1x1x5x5xf32>) key_mask(%falses : tensor<2x5xi1>)
      outs(%rows : tensor<2x3x5xf32>) -> tensor<2x3x5xf32>
  return %a, %b : tensor<2x3x5xf32>, tensor<2x3x5xf32>
}

// -----

// A prior that prefers no head cancels between heads; one that nobody weighs
// heads by is not read.

// CHECK-LABEL: func @forgets_head_priors_without_effect
// CHECK-COUNT-2: moe.attention_posterior ins(%{{[^)]*}}) means(%{{[^)]*}}) outs(
func.func @forgets_head_priors_without_effect(
    %q: tensor<2x4x7x3xf32>, %u: tensor<2x7x6xf32>, %e: tensor<2x7x8xf32>,
    %vp: tensor<2x4x7x6xf32>, %pi: tensor<2x7x4xf32>, %p: tensor<2x7x8xf32>,
    %head: tensor<2xi32>, %l: tensor<2x4x7xf32>, %one: tensor<2x1x7xf32>)
    -> (tensor<2x7x8xf32>, tensor<2x7x8xf32>) {
  %uniform = arith.constant dense<0.25> : tensor<2x7x4xf32>
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<2x4x7x3xf32>, tensor<2x4x7x3xf32>,
          tensor<2x7x6xf32>, tensor<2x7x8xf32>)
      means(%vp : tensor<2x4x7x6xf32>) head_prior(%uniform : tensor<2x7x4xf32>)
      outs(%p, %head, %l, %l : tensor<2x7x8xf32>, tensor<2xi32>,
           tensor<2x4x7xf32>, tensor<2x4x7xf32>)
      {head_mode = #moe.head_mode<all>}
      -> tensor<2x7x8xf32>, tensor<2xi32>, tensor<2x4x7xf32>, tensor<2x4x7xf32>
  %s:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<2x4x7x3xf32>, tensor<2x4x7x3xf32>,
          tensor<2x7x6xf32>, tensor<2x7x8xf32>)
      means(%vp : tensor<2x4x7x6xf32>) head_prior(%pi : tensor<2x7x4xf32>)
      outs(%p, %head, %one, %one : tensor<2x7x8xf32>, tensor<2xi32>,
           tensor<2x1x7xf32>, tensor<2x1x7xf32>)
      -> tensor<2x7x8xf32>, tensor<2xi32>, tensor<2x1x7xf32>, tensor<2x1x7xf32>
  return %r#0, %s#0 : tensor<2x7x8xf32>, tensor<2x7x8xf32>
}

// -----

// The surest of one head needs no entropies, and a head that is not chosen from
// rows has no scope.

// CHECK-LABEL: func @takes_the_only_head
// CHECK:         moe.attention_posterior
// CHECK-NOT:       head_scope
// CHECK-SAME:      {head = 0 : i64, head_mode = #moe.head_mode<fixed>}
func.func @takes_the_only_head(
    %q: tensor<2x1x7x3xf32>, %u: tensor<2x7x6xf32>, %e: tensor<2x7x8xf32>,
    %vp: tensor<2x1x7x6xf32>, %p: tensor<2x7x8xf32>, %head: tensor<2xi32>,
    %l: tensor<2x1x7xf32>) -> tensor<2x7x8xf32> {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<2x1x7x3xf32>, tensor<2x1x7x3xf32>,
          tensor<2x7x6xf32>, tensor<2x7x8xf32>)
      means(%vp : tensor<2x1x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<2x7x8xf32>, tensor<2xi32>,
           tensor<2x1x7xf32>, tensor<2x1x7xf32>)
      {head_scope = #moe.head_scope<batch>}
      -> tensor<2x7x8xf32>, tensor<2xi32>, tensor<2x1x7xf32>, tensor<2x1x7xf32>
  return %r#0 : tensor<2x7x8xf32>
}

// -----

// One sequence is the batch.

// CHECK-LABEL: func @the_scope_of_one_sequence_is_the_sequence
// CHECK:         moe.attention_posterior
// CHECK-NOT:       head_scope
// CHECK:         moe.attention_posterior
// CHECK-SAME:      head_scope = #moe.head_scope<batch>
func.func @the_scope_of_one_sequence_is_the_sequence(
    %q: tensor<1x4x7x3xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x8xf32>,
    %vp: tensor<1x4x7x6xf32>, %p: tensor<1x7x8xf32>, %head: tensor<1xi32>,
    %l: tensor<1x1x7xf32>, %q2: tensor<?x4x7x3xf32>, %u2: tensor<?x7x6xf32>,
    %e2: tensor<?x7x8xf32>, %vp2: tensor<?x4x7x6xf32>, %p2: tensor<?x7x8xf32>,
    %head2: tensor<?xi32>, %l2: tensor<?x1x7xf32>)
    -> (tensor<1x7x8xf32>, tensor<?x7x8xf32>) {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x3xf32>, tensor<1x4x7x3xf32>,
          tensor<1x7x6xf32>, tensor<1x7x8xf32>)
      means(%vp : tensor<1x4x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x8xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>)
      {head_scope = #moe.head_scope<batch>}
      -> tensor<1x7x8xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  %s:4 = moe.attention_posterior
      ins(%q2, %q2, %u2, %e2 : tensor<?x4x7x3xf32>, tensor<?x4x7x3xf32>,
          tensor<?x7x6xf32>, tensor<?x7x8xf32>)
      means(%vp2 : tensor<?x4x7x6xf32>)
      outs(%p2, %head2, %l2, %l2 : tensor<?x7x8xf32>, tensor<?xi32>,
           tensor<?x1x7xf32>, tensor<?x1x7xf32>)
      {head_scope = #moe.head_scope<batch>}
      -> tensor<?x7x8xf32>, tensor<?xi32>, tensor<?x1x7xf32>, tensor<?x1x7xf32>
  return %r#0, %s#0 : tensor<1x7x8xf32>, tensor<?x7x8xf32>
}
