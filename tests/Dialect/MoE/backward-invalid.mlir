// RUN: %moe-opt %s --split-input-file --verify-diagnostics

func.func @mix_values_without_their_cotangent(%q: tensor<1x1x4x8xf32>, %l: tensor<1x1x4xf32>,
    %v: tensor<1x4x2xf32>) {
  // expected-error @below {{expected 'v' and 'dmixed' together}}
  %r = "moe.softmax_mix_backward_dq"(%q, %q, %l, %l, %v, %q)
      {operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1>}
      : (tensor<1x1x4x8xf32>, tensor<1x1x4x8xf32>, tensor<1x1x4xf32>,
         tensor<1x1x4xf32>, tensor<1x4x2xf32>, tensor<1x1x4x8xf32>) -> tensor<1x1x4x8xf32>
  return
}

// -----

func.func @self_mix_that_sees_nothing(%q: tensor<1x1x4x8xf32>, %l: tensor<1x1x4xf32>,
    %v: tensor<1x4x2xf32>, %dm: tensor<1x1x4x2xf32>) {
  %r:2 = moe.softmax_mix_backward_self
      ins(%q, %l, %l, %v, %dm : tensor<1x1x4x8xf32>, tensor<1x1x4xf32>, tensor<1x1x4xf32>,
          tensor<1x4x2xf32>, tensor<1x1x4x2xf32>)
      // expected-error @below {{expected window to be at least 1, found 0}}
      outs(%q, %dm : tensor<1x1x4x8xf32>, tensor<1x1x4x2xf32>) {visibility = #moe.visibility<window = 0>}
      -> tensor<1x1x4x8xf32>, tensor<1x1x4x2xf32>
  return
}

// -----

func.func @mix_bias_gradient_without_bias(%q: tensor<1x1x4x8xf32>, %l: tensor<1x1x4xf32>,
    %b: tensor<1x1x4x4xf32>) {
  // expected-error @below {{expected 'bias' with with_dbias, found none}}
  %r:2 = moe.softmax_mix_backward_dq
      ins(%q, %q, %l, %l : tensor<1x1x4x8xf32>, tensor<1x1x4x8xf32>,
          tensor<1x1x4xf32>, tensor<1x1x4xf32>)
      outs(%q, %b : tensor<1x1x4x8xf32>, tensor<1x1x4x4xf32>) {with_dbias = true}
      -> tensor<1x1x4x8xf32>, tensor<1x1x4x4xf32>
  return
}

// -----

func.func @mix_missing_destination(%q: tensor<1x1x4x8xf32>, %l: tensor<1x1x4xf32>) {
  // expected-error @below {{expected 2 destinations in 'outs' (dk, sums), found 1}}
  %r = moe.softmax_mix_backward_dkv
      ins(%q, %q, %l, %l : tensor<1x1x4x8xf32>, tensor<1x1x4x8xf32>,
          tensor<1x1x4xf32>, tensor<1x1x4xf32>)
      outs(%q : tensor<1x1x4x8xf32>) {with_sums = true} -> tensor<1x1x4x8xf32>
  return
}

// -----

// Destinations are named by what is there: without values the second is `sums`.

func.func @mix_wrong_size(%q: tensor<1x1x4x8xf32>, %l: tensor<1x1x4xf32>,
    %s: tensor<1x1x5xf32>) {
  // expected-error @below {{expected dim 2 of 'sums' (5) to match dim 2 of 'k' (4)}}
  %r:2 = moe.softmax_mix_backward_dkv
      ins(%q, %q, %l, %l : tensor<1x1x4x8xf32>, tensor<1x1x4x8xf32>,
          tensor<1x1x4xf32>, tensor<1x1x4xf32>)
      outs(%q, %s : tensor<1x1x4x8xf32>, tensor<1x1x5xf32>) {with_sums = true}
      -> tensor<1x1x4x8xf32>, tensor<1x1x5xf32>
  return
}

// -----

func.func @similarity_inform_c2(%u: tensor<1x4x8xf32>, %e: tensor<1x4x2xf32>,
    %l: tensor<1x4xf32>) {
  // expected-error @below {{expected tau to be positive and finite, found 0}}
  %r:2 = moe.similarity_inform_backward
      ins(%u, %e, %e, %l, %e : tensor<1x4x8xf32>, tensor<1x4x2xf32>,
          tensor<1x4x2xf32>, tensor<1x4xf32>, tensor<1x4x2xf32>)
      outs(%u, %e : tensor<1x4x8xf32>, tensor<1x4x2xf32>) {tau = 0.0 : f64}
      -> tensor<1x4x8xf32>, tensor<1x4x2xf32>
  return
}

// -----

func.func @similarity_needs_a_destination_for_ws(%u: tensor<1x4x8xf32>,
    %e: tensor<1x4x2xf32>, %l: tensor<1x4xf32>, %ws: tensor<8x8xf32>) {
  // expected-error @below {{expected 3 destinations in 'outs' (du, de, dws), found 2}}
  %r:2 = moe.similarity_inform_backward
      ins(%u, %e, %e, %l, %e : tensor<1x4x8xf32>, tensor<1x4x2xf32>,
          tensor<1x4x2xf32>, tensor<1x4xf32>, tensor<1x4x2xf32>)
      ws(%ws : tensor<8x8xf32>)
      outs(%u, %e : tensor<1x4x8xf32>, tensor<1x4x2xf32>)
      -> tensor<1x4x8xf32>, tensor<1x4x2xf32>
  return
}

// -----

func.func @attention_posterior_c1(%q: tensor<1x2x4x8xf32>, %u: tensor<1x4x6xf32>,
    %e: tensor<1x4x2xf32>, %l: tensor<1x1x4xf32>) {
  // expected-error @below {{expected exactly one of 'vp' and ('v', 'wo'), found neither}}
  %r:4 = moe.attention_posterior_backward
      ins(%q, %q, %u, %e, %e, %l, %l, %e : tensor<1x2x4x8xf32>,
          tensor<1x2x4x8xf32>, tensor<1x4x6xf32>, tensor<1x4x2xf32>,
          tensor<1x4x2xf32>, tensor<1x1x4xf32>, tensor<1x1x4xf32>, tensor<1x4x2xf32>)
      outs(%q, %q, %u, %e : tensor<1x2x4x8xf32>, tensor<1x2x4x8xf32>,
           tensor<1x4x6xf32>, tensor<1x4x2xf32>)
      -> tensor<1x2x4x8xf32>, tensor<1x2x4x8xf32>, tensor<1x4x6xf32>, tensor<1x4x2xf32>
  return
}

// -----

func.func @posterior_lse_of_one_head_without_a_head(%q: tensor<1x2x4x8xf32>,
    %u: tensor<1x4x6xf32>, %e: tensor<1x4x2xf32>, %l: tensor<1x1x4xf32>,
    %vp: tensor<1x2x4x6xf32>) {
  // expected-error @below {{expected dim 1 of 'prior_lse' to be 2 without 'head', found 1}}
  %r:5 = moe.attention_posterior_backward
      ins(%q, %q, %u, %e, %e, %l, %l, %e : tensor<1x2x4x8xf32>,
          tensor<1x2x4x8xf32>, tensor<1x4x6xf32>, tensor<1x4x2xf32>,
          tensor<1x4x2xf32>, tensor<1x1x4xf32>, tensor<1x1x4xf32>, tensor<1x4x2xf32>)
      means(%vp : tensor<1x2x4x6xf32>)
      outs(%q, %q, %u, %e, %vp : tensor<1x2x4x8xf32>, tensor<1x2x4x8xf32>,
           tensor<1x4x6xf32>, tensor<1x4x2xf32>, tensor<1x2x4x6xf32>)
      -> tensor<1x2x4x8xf32>, tensor<1x2x4x8xf32>, tensor<1x4x6xf32>,
         tensor<1x4x2xf32>, tensor<1x2x4x6xf32>
  return
}

// -----

func.func @selection_without_the_scores_it_reads(%g: tensor<4x2xf32>,
    %i: tensor<4x2xi32>, %z: tensor<4x8xf32>) {
  // expected-error @below {{expected 'scores', which this form's gradient reads, found none}}
  %r = moe.topk_renorm_backward ins(%g, %g, %i : tensor<4x2xf32>, tensor<4x2xf32>, tensor<4x2xi32>)
      outs(%z : tensor<4x8xf32>) {renorm = false} -> tensor<4x8xf32>
  return
}

// -----

func.func @topk_renorm_c5(%g: tensor<4x2xf32>, %i: tensor<4x2xi32>, %z: tensor<4x8xf32>) {
  // expected-error @below {{expected score to be none with kind = probs and only then, found sigmoid with kind = probs}}
  %r = moe.topk_renorm_backward ins(%g, %g, %i : tensor<4x2xf32>, tensor<4x2xf32>, tensor<4x2xi32>)
      scores(%z : tensor<4x8xf32>) outs(%z : tensor<4x8xf32>)
      {kind = #moe.score_kind<probs>, score = #moe.score_function<sigmoid>} -> tensor<4x8xf32>
  return
}
