// RUN: %moe-opt %s --canonicalize --cse --moe-convert-to-softmax-mix --moe-propagate-reshapes --canonicalize --cse --moe-privatize-destinations --moe-tile-and-fuse --canonicalize --cse | FileCheck %s

// Similarity-SMoE: the probabilities exist for one tile of tokens, between the
// mix and the selection, and are never stored (docs/Spec.md 3.11 (b)).

// CHECK-LABEL: func @similarity_and_selection_are_one_loop
// CHECK:         scf.forall
// CHECK:           %[[P:.*]]:2 = moe.softmax_mix
// CHECK:           moe.topk_renorm ins(%[[P]]#0
// CHECK:           scf.forall.in_parallel
// CHECK-COUNT-2:     tensor.parallel_insert_slice
// CHECK-NOT:     scf.forall
func.func @similarity_and_selection_are_one_loop(
    %u: tensor<2x?x352xf32>, %e: tensor<2x?x16xf32>, %n: index)
    -> (tensor<2x?x2xf32>, tensor<2x?x2xi64>) {
  %e0 = tensor.empty(%n) : tensor<2x?x16xf32>
  %l0 = tensor.empty(%n) : tensor<2x?xf32>
  %g0 = tensor.empty(%n) : tensor<2x?x2xf32>
  %i0 = tensor.empty(%n) : tensor<2x?x2xi64>
  %p, %lse = moe.similarity_inform ins(%u, %e : tensor<2x?x352xf32>, tensor<2x?x16xf32>)
      outs(%e0, %l0 : tensor<2x?x16xf32>, tensor<2x?xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<2x?x16xf32>, tensor<2x?xf32>
  %g, %i = moe.topk_renorm ins(%p : tensor<2x?x16xf32>)
      outs(%g0, %i0 : tensor<2x?x2xf32>, tensor<2x?x2xi64>) {kind = #moe.score_kind<probs>}
      -> tensor<2x?x2xf32>, tensor<2x?x2xi64>
  return %g, %i : tensor<2x?x2xf32>, tensor<2x?x2xi64>
}

// The same with a fixed head of the attention posterior.

// CHECK-LABEL: func @posterior_and_selection_are_one_loop
// CHECK:         scf.forall
// CHECK:           moe.softmax_mix
// CHECK:           moe.topk_renorm
// CHECK:           scf.forall.in_parallel
// CHECK-NOT:     moe.topk_renorm
func.func @posterior_and_selection_are_one_loop(
    %q: tensor<2x4x?x16xf32>, %u: tensor<2x?x64xf32>, %e: tensor<2x?x16xf32>,
    %vp: tensor<2x4x?x64xf32>, %n: index) -> (tensor<2x?x2xf32>, tensor<2x?x2xi64>) {
  %e0 = tensor.empty(%n) : tensor<2x?x16xf32>
  %h0 = tensor.empty() : tensor<2xi32>
  %l0 = tensor.empty(%n) : tensor<2x1x?xf32>
  %g0 = tensor.empty(%n) : tensor<2x?x2xf32>
  %i0 = tensor.empty(%n) : tensor<2x?x2xi64>
  %p:4 = moe.attention_posterior ins(%q, %q, %u, %e : tensor<2x4x?x16xf32>, tensor<2x4x?x16xf32>, tensor<2x?x64xf32>, tensor<2x?x16xf32>)
      means(%vp : tensor<2x4x?x64xf32>)
      outs(%e0, %h0, %l0, %l0 : tensor<2x?x16xf32>, tensor<2xi32>, tensor<2x1x?xf32>, tensor<2x1x?xf32>)
      {head_mode = #moe.head_mode<fixed>, head = 1 : i64, visibility = #moe.visibility<causal>}
      -> tensor<2x?x16xf32>, tensor<2xi32>, tensor<2x1x?xf32>, tensor<2x1x?xf32>
  %g, %i = moe.topk_renorm ins(%p#0 : tensor<2x?x16xf32>)
      outs(%g0, %i0 : tensor<2x?x2xf32>, tensor<2x?x2xi64>) {kind = #moe.score_kind<probs>}
      -> tensor<2x?x2xf32>, tensor<2x?x2xi64>
  return %g, %i : tensor<2x?x2xf32>, tensor<2x?x2xi64>
}
