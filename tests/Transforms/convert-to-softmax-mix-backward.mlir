// RUN: %moe-opt %s --moe-convert-to-softmax-mix --canonicalize --cse | FileCheck %s

// CHECK-NOT: moe.similarity_inform_backward
// CHECK-NOT: moe.attention_posterior_backward

// Both sweeps read the forward's log-sum-exps and the same delta; the gradients
// of the tokens as queries and as keys are added.

// CHECK-LABEL: func @similarity_is_differentiated_by_two_sweeps
// CHECK-SAME:    %[[U:[^:]*]]: tensor<2x?x8xf32>, %[[E:[^:]*]]: tensor<2x?x4xf32>
// CHECK-DAG:     %[[TOKENS:.*]] = tensor.expand_shape %[[U]]
// CHECK-DAG:     %[[LSE:.*]] = tensor.expand_shape {{.*}} : tensor<2x?xf32> into tensor<2x1x?xf32>
// CHECK:         %[[DQ:.*]] = moe.softmax_mix_backward_dq ins(%[[TOKENS]], %[[TOKENS]], %{{.*}}, %[[DELTA:[a-z0-9_]*]] : {{[^)]*}}) values(%[[E]], %[[DP:[a-z0-9_]*]] :
// CHECK-SAME:      {scale = 2.500000e-01 : f64, visibility = #moe.visibility<causal>}
// CHECK:         %[[DKV:.*]]:2 = moe.softmax_mix_backward_dkv ins(%[[TOKENS]], %[[TOKENS]], %{{.*}}, %[[DELTA]] : {{.*}}) values(%[[E]], %[[DP]] :
// CHECK:         linalg.generic
// CHECK:           arith.addf
func.func @similarity_is_differentiated_by_two_sweeps(
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

// The origin of the queries among the keys is, to the sweep over keys, the
// other way round.

// CHECK-LABEL: func @the_sweep_over_keys_turns_the_origin_round
// CHECK-SAME:    %[[ORIGIN:[a-z0-9]*]]: index
// CHECK:         moe.softmax_mix_backward_dq {{.*}} origin(%[[ORIGIN]] : index)
// CHECK:         %[[KEYS:.*]] = arith.subi %{{.*}}, %[[ORIGIN]] : index
// CHECK:         moe.softmax_mix_backward_dkv {{.*}} origin(%[[KEYS]] : index)
func.func @the_sweep_over_keys_turns_the_origin_round(
    %u: tensor<1x3x8xf32>, %uk: tensor<1x9x8xf32>, %e: tensor<1x9x4xf32>,
    %p: tensor<1x3x4xf32>, %lse: tensor<1x3xf32>, %duk: tensor<1x9x8xf32>,
    %origin: index) -> (tensor<1x3x8xf32>, tensor<1x9x8xf32>) {
  %r:3 = moe.similarity_inform_backward
      ins(%u, %e, %p, %lse, %p : tensor<1x3x8xf32>, tensor<1x9x4xf32>,
          tensor<1x3x4xf32>, tensor<1x3xf32>, tensor<1x3x4xf32>)
      keys(%uk : tensor<1x9x8xf32>) origin(%origin : index)
      outs(%u, %e, %duk : tensor<1x3x8xf32>, tensor<1x9x4xf32>, tensor<1x9x8xf32>)
      -> tensor<1x3x8xf32>, tensor<1x9x4xf32>, tensor<1x9x8xf32>
  return %r#0, %r#2 : tensor<1x3x8xf32>, tensor<1x9x8xf32>
}

// With all heads the prior's log-sum-exp has a gradient too: sweeps without
// values, whose delta is the row sums of the joint ones.

// CHECK-LABEL: func @all_heads_differentiate_the_prior
// CHECK:         %[[JOINT:.*]]:2 = moe.softmax_mix_backward_dq {{.*}} values({{.*}}with_sums = true
// CHECK:         moe.softmax_mix_backward_dkv {{.*}} values({{.*}}with_sums = true
// CHECK:         moe.softmax_mix_backward_dq ins(%{{.*}}, %{{.*}}, %{{.*}}, %[[JOINT]]#1 :
// CHECK-NOT:       values
// CHECK:         moe.softmax_mix_backward_dkv ins(%{{.*}}, %{{.*}}, %{{.*}}, %[[JOINT]]#1 :

// CHECK-LABEL: func @one_head_has_one_pair_of_sweeps
// CHECK-COUNT-1: moe.softmax_mix_backward_dq
// CHECK-COUNT-1: moe.softmax_mix_backward_dkv
// CHECK-NOT:     moe.softmax_mix_backward
func.func @all_heads_differentiate_the_prior(%q: tensor<1x4x?x16xf32>,
    %u: tensor<1x?x64xf32>, %e: tensor<1x?x8xf32>, %l: tensor<1x4x?xf32>,
    %vp: tensor<1x4x?x64xf32>)
    -> (tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>) {
  %r:5 = moe.attention_posterior_backward
      ins(%q, %q, %u, %e, %e, %l, %l, %e : tensor<1x4x?x16xf32>,
          tensor<1x4x?x16xf32>, tensor<1x?x64xf32>, tensor<1x?x8xf32>,
          tensor<1x?x8xf32>, tensor<1x4x?xf32>, tensor<1x4x?xf32>,
          tensor<1x?x8xf32>)
      means(%vp : tensor<1x4x?x64xf32>)
      outs(%q, %q, %u, %e, %vp : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>,
           tensor<1x?x64xf32>, tensor<1x?x8xf32>, tensor<1x4x?x64xf32>)
      -> tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>, tensor<1x?x64xf32>,
         tensor<1x?x8xf32>, tensor<1x4x?x64xf32>
  return %r#0, %r#1 : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>
}
func.func @one_head_has_one_pair_of_sweeps(%q: tensor<1x4x?x16xf32>,
    %u: tensor<1x?x64xf32>, %e: tensor<1x?x8xf32>, %l: tensor<1x1x?xf32>,
    %vp: tensor<1x4x?x64xf32>, %head: tensor<1xi32>)
    -> (tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>) {
  %r:5 = moe.attention_posterior_backward
      ins(%q, %q, %u, %e, %e, %l, %l, %e : tensor<1x4x?x16xf32>,
          tensor<1x4x?x16xf32>, tensor<1x?x64xf32>, tensor<1x?x8xf32>,
          tensor<1x?x8xf32>, tensor<1x1x?xf32>, tensor<1x1x?xf32>,
          tensor<1x?x8xf32>)
      means(%vp : tensor<1x4x?x64xf32>) head(%head : tensor<1xi32>)
      outs(%q, %q, %u, %e, %vp : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>,
           tensor<1x?x64xf32>, tensor<1x?x8xf32>, tensor<1x4x?x64xf32>)
      -> tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>, tensor<1x?x64xf32>,
         tensor<1x?x8xf32>, tensor<1x4x?x64xf32>
  return %r#0, %r#1 : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>
}
