// RUN: %moe-opt %s --moe-select-kernel-config --moe-convert-to-softmax-mix --canonicalize --cse | FileCheck %s

// Tokens that mix with themselves are swept once, into the op's own destinations.

// CHECK-LABEL: func @similarity_of_tokens_to_themselves_is_one_sweep
// CHECK-SAME:    %[[U:[^:]*]]: tensor<2x?x8xf32>, %[[E:[^:]*]]: tensor<2x?x4xf32>
// CHECK-DAG:     %[[TOKENS:.*]] = tensor.expand_shape %[[U]]
// CHECK:         moe.softmax_mix_backward_self ins(%[[TOKENS]], %[[LSE:[a-z0-9_]*]], %[[DELTA:[a-z0-9_]*]], %[[E]], %[[DP:[a-z0-9_]*]] :
// CHECK-SAME:      {scale = 2.500000e-01 : f64, visibility = #moe.visibility<causal>}
// CHECK-NOT:     arith.addf
func.func @similarity_of_tokens_to_themselves_is_one_sweep(
    %u: tensor<2x?x8xf32>, %e: tensor<2x?x4xf32>, %p: tensor<2x?x4xf32>,
    %lse: tensor<2x?xf32>, %dp: tensor<2x?x4xf32>, %du: tensor<2x?x8xf32>,
    %de: tensor<2x?x4xf32>) -> (tensor<2x?x8xf32>, tensor<2x?x4xf32>) {
  %r:2 = moe.similarity_inform_backward
      ins(%u, %e, %p, %lse, %dp : tensor<2x?x8xf32>, tensor<2x?x4xf32>,
          tensor<2x?x4xf32>, tensor<2x?xf32>, tensor<2x?x4xf32>)
      outs(%du, %de : tensor<2x?x8xf32>, tensor<2x?x4xf32>)
      {tau = 4.0 : f64, visibility = #moe.visibility<causal>} -> tensor<2x?x8xf32>, tensor<2x?x4xf32>
  return %r#0, %r#1 : tensor<2x?x8xf32>, tensor<2x?x4xf32>
}

// Queries that are not the keys need both sweeps.

// CHECK-LABEL: func @other_keys_are_swept_twice
// CHECK:         moe.softmax_mix_backward_dq
// CHECK:         moe.softmax_mix_backward_dkv
func.func @other_keys_are_swept_twice(
    %u: tensor<1x3x8xf32>, %uk: tensor<1x9x8xf32>, %e: tensor<1x9x4xf32>,
    %p: tensor<1x3x4xf32>, %lse: tensor<1x3xf32>)
    -> (tensor<1x3x8xf32>, tensor<1x9x4xf32>, tensor<1x9x8xf32>) {
  %r:3 = moe.similarity_inform_backward
      ins(%u, %e, %p, %lse, %p : tensor<1x3x8xf32>, tensor<1x9x4xf32>,
          tensor<1x3x4xf32>, tensor<1x3xf32>, tensor<1x3x4xf32>)
      keys(%uk : tensor<1x9x8xf32>)
      outs(%u, %e, %uk : tensor<1x3x8xf32>, tensor<1x9x4xf32>, tensor<1x9x8xf32>)
      -> tensor<1x3x8xf32>, tensor<1x9x4xf32>, tensor<1x9x8xf32>
  return %r#0, %r#1, %r#2 : tensor<1x3x8xf32>, tensor<1x9x4xf32>, tensor<1x9x8xf32>
}

// Forward, each pair of tokens meets once unless the mix is causal: a pair has
// one role then.

// CHECK-LABEL: func @a_mix_with_itself_meets_each_pair_once
// CHECK-SAME:    %[[U:[^:]*]]: tensor<2x?x8xf32>, %[[E:[^:]*]]: tensor<2x?x4xf32>, %[[MASK:[^:]*]]: tensor<2x?xi1>
// CHECK:         %[[TOKENS:.*]] = tensor.expand_shape %[[U]]
// CHECK:         moe.softmax_mix_self ins(%[[TOKENS]], %[[E]] :
// CHECK-SAME:      mask(%[[MASK]] :
// CHECK-SAME:      {scale = 2.500000e-01 : f64, visibility = #moe.visibility<window = 3>}
func.func @a_mix_with_itself_meets_each_pair_once(
    %u: tensor<2x?x8xf32>, %e: tensor<2x?x4xf32>, %mask: tensor<2x?xi1>,
    %p: tensor<2x?x4xf32>, %lse: tensor<2x?xf32>) -> tensor<2x?x4xf32> {
  %r:2 = moe.similarity_inform ins(%u, %e : tensor<2x?x8xf32>, tensor<2x?x4xf32>)
      mask(%mask : tensor<2x?xi1>)
      outs(%p, %lse : tensor<2x?x4xf32>, tensor<2x?xf32>)
      {tau = 4.0 : f64, visibility = #moe.visibility<window = 3>} -> tensor<2x?x4xf32>, tensor<2x?xf32>
  return %r#0 : tensor<2x?x4xf32>
}

// CHECK-LABEL: func @causal_and_weighted_mixes_have_nothing_to_share
// CHECK-NOT:     moe.softmax_mix_self
// CHECK-COUNT-2: moe.softmax_mix ins
// CHECK-NOT:     moe.softmax_mix_self
func.func @causal_and_weighted_mixes_have_nothing_to_share(
    %u: tensor<2x?x8xf32>, %e: tensor<2x?x4xf32>, %ws: tensor<8x8xf32>,
    %p: tensor<2x?x4xf32>, %lse: tensor<2x?xf32>) -> (tensor<2x?x4xf32>, tensor<2x?x4xf32>) {
  %r:2 = moe.similarity_inform ins(%u, %e : tensor<2x?x8xf32>, tensor<2x?x4xf32>)
      outs(%p, %lse : tensor<2x?x4xf32>, tensor<2x?xf32>)
      {visibility = #moe.visibility<causal>} -> tensor<2x?x4xf32>, tensor<2x?xf32>
  %s:2 = moe.similarity_inform ins(%u, %e : tensor<2x?x8xf32>, tensor<2x?x4xf32>)
      ws(%ws : tensor<8x8xf32>)
      outs(%p, %lse : tensor<2x?x4xf32>, tensor<2x?xf32>)
      -> tensor<2x?x4xf32>, tensor<2x?xf32>
  return %r#0, %s#0 : tensor<2x?x4xf32>, tensor<2x?x4xf32>
}
