// RUN: %moe-opt %s --split-input-file --verify-diagnostics

// What every structured op checks, shown on one of them.

func.func @too_many_destinations(%h: tensor<5x8xf32>, %w: tensor<4x8xf32>,
                                 %z: tensor<5x4xf32>) {
  // expected-error @below {{expected 1 destinations in 'outs', found 2}}
  %r:2 = moe.router_logits ins(%h, %w : tensor<5x8xf32>, tensor<4x8xf32>)
      outs(%z, %z : tensor<5x4xf32>, tensor<5x4xf32>)
      -> tensor<5x4xf32>, tensor<5x4xf32>
  return
}

// -----

func.func @wrong_element_type_of_a_destination(%z: tensor<5x8xf32>,
                                               %g: tensor<5x2xf32>) {
  // expected-error @below {{expected elements of 'indices' to be i32 or i64, found 'f32'}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x8xf32>)
      outs(%g, %g : tensor<5x2xf32>, tensor<5x2xf32>)
      -> tensor<5x2xf32>, tensor<5x2xf32>
  return
}

// -----

func.func @gates_are_f32(%z: tensor<5x8xf32>, %g: tensor<5x2xbf16>,
                         %i: tensor<5x2xi32>) {
  // expected-error @below {{expected elements of 'gates' to be f32, found 'bf16'}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x8xf32>)
      outs(%g, %i : tensor<5x2xbf16>, tensor<5x2xi32>)
      -> tensor<5x2xbf16>, tensor<5x2xi32>
  return
}

// -----

func.func @counts_are_i32(%h: tensor<5x8xf32>, %assign: tensor<5xi32>,
                          %s: tensor<4x8xf32>, %count: tensor<4xi64>) {
  // expected-error @below {{expected elements of 'count' to be i32, found 'i64'}}
  %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<5x8xf32>, tensor<5xi32>)
      outs(%s, %s, %count : tensor<4x8xf32>, tensor<4x8xf32>, tensor<4xi64>)
      -> tensor<4x8xf32>, tensor<4x8xf32>, tensor<4xi64>
  return
}

// -----

func.func @tensors_and_buffers_mixed(%h: tensor<5x8xf32>, %w: memref<4x8xf32>,
                                     %z: tensor<5x4xf32>) {
  // expected-error @below {{expected all shaped operands to be tensors or all to be memrefs}}
  %r = moe.router_logits ins(%h, %w : tensor<5x8xf32>, memref<4x8xf32>)
      outs(%z : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @size_overflows(%h: tensor<4611686018427387904x8xf32>,
                          %w: tensor<4x8xf32>, %z: tensor<?x4xf32>) {
  // expected-error @below {{expected the size of 'h' in bytes to fit a signed 64-bit number}}
  %r = moe.router_logits
      ins(%h, %w : tensor<4611686018427387904x8xf32>, tensor<4x8xf32>)
      outs(%z : tensor<?x4xf32>) -> tensor<?x4xf32>
  return
}

// -----

func.func @wrong_rank(%h: tensor<5x8xf32>, %w: tensor<4xf32>,
                      %z: tensor<5x4xf32>) {
  // expected-error @below {{expected 'weight' to have rank 2 (e, d), found rank 1}}
  %r = moe.router_logits ins(%h, %w : tensor<5x8xf32>, tensor<4xf32>)
      outs(%z : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @dims_disagree(%h: tensor<5x8xf32>, %w: tensor<4x9xf32>,
                         %z: tensor<5x4xf32>) {
  // expected-error @below {{expected dim 1 of 'weight' (9) to match dim 1 of 'h' (8)}}
  %r = moe.router_logits ins(%h, %w : tensor<5x8xf32>, tensor<4x9xf32>)
      outs(%z : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

// A dynamic operand between two static ones does not hide the mismatch.

func.func @dims_disagree_across_a_dynamic_one(
    %h: tensor<?x8xf32>, %w: tensor<?x8xf32>, %bias: tensor<4xf32>,
    %z: tensor<5x3xf32>) {
  // expected-error @below {{expected dim 1 of 'z' (3) to match dim 0 of 'bias' (4)}}
  %r = moe.router_logits ins(%h, %w : tensor<?x8xf32>, tensor<?x8xf32>)
      bias(%bias : tensor<4xf32>) outs(%z : tensor<5x3xf32>) -> tensor<5x3xf32>
  return
}

// -----

func.func @token_without_dims(%h: tensor<f32>, %w: tensor<4x8xf32>,
                              %z: tensor<4xf32>) {
  // expected-error @below {{expected 'h' to have at least one dim, found a scalar}}
  %r = moe.router_logits ins(%h, %w : tensor<f32>, tensor<4x8xf32>)
      outs(%z : tensor<4xf32>) -> tensor<4xf32>
  return
}

// -----

func.func @integer_activations(%h: tensor<5x8xi32>, %w: tensor<4x8xf32>,
                               %z: tensor<5x4xf32>) {
  // expected-error @below {{operand #0 must be}}
  %r = moe.router_logits ins(%h, %w : tensor<5x8xi32>, tensor<4x8xf32>)
      outs(%z : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// topk_renorm
//===----------------------------------------------------------------------===//

func.func @topk_renorm_c1(%z: tensor<5x8xf32>, %g: tensor<5x9xf32>,
                          %i: tensor<5x9xi32>) {
  // expected-error @below {{expected k (9) to be at most e (8)}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x8xf32>)
      outs(%g, %i : tensor<5x9xf32>, tensor<5x9xi32>)
      -> tensor<5x9xf32>, tensor<5x9xi32>
  return
}

// -----

func.func @topk_renorm_c1_zero(%z: tensor<5x8xf32>, %g: tensor<5x0xf32>,
                               %i: tensor<5x0xi32>) {
  // expected-error @below {{expected k to be at least 1, found 0}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x8xf32>)
      outs(%g, %i : tensor<5x0xf32>, tensor<5x0xi32>)
      -> tensor<5x0xf32>, tensor<5x0xi32>
  return
}

// -----

func.func @topk_renorm_c2(%z: tensor<5x8xf32>, %g: tensor<5x2xf32>,
                          %i: tensor<5x3xi32>) {
  // expected-error @below {{expected dim 1 of 'indices' (3) to match dim 1 of 'gates' (2)}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x8xf32>)
      outs(%g, %i : tensor<5x2xf32>, tensor<5x3xi32>)
      -> tensor<5x2xf32>, tensor<5x3xi32>
  return
}

// -----

func.func @topk_renorm_c2_leading_dims(%z: tensor<2x5x8xf32>,
                                       %g: tensor<5x2xf32>,
                                       %i: tensor<5x2xi32>) {
  // expected-error @below {{expected 'gates' to have rank 3 (n0, n1, k), found rank 2}}
  %r:2 = moe.topk_renorm ins(%z : tensor<2x5x8xf32>)
      outs(%g, %i : tensor<5x2xf32>, tensor<5x2xi32>)
      -> tensor<5x2xf32>, tensor<5x2xi32>
  return
}

// -----

func.func @topk_renorm_c3(%z: tensor<5x10xf32>, %g: tensor<5x2xf32>,
                          %i: tensor<5x2xi32>) {
  // expected-error @below {{expected n_group (4) to divide the number of experts (10)}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x10xf32>)
      outs(%g, %i : tensor<5x2xf32>, tensor<5x2xi32>)
      {n_group = 4 : i64, topk_group = 2 : i64}
      -> tensor<5x2xf32>, tensor<5x2xi32>
  return
}

// -----

func.func @topk_renorm_c3_dynamic(%z: tensor<5x?xf32>, %g: tensor<5x2xf32>,
                                  %i: tensor<5x2xi32>) {
  // expected-error @below {{expected a static number of experts, which n_group (4) divides, found a dynamic one}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x?xf32>)
      outs(%g, %i : tensor<5x2xf32>, tensor<5x2xi32>)
      {n_group = 4 : i64, topk_group = 2 : i64}
      -> tensor<5x2xf32>, tensor<5x2xi32>
  return
}

// -----

func.func @topk_renorm_c3_topk_group(%z: tensor<5x8xf32>, %g: tensor<5x2xf32>,
                                     %i: tensor<5x2xi32>) {
  // expected-error @below {{expected topk_group to be in [1, n_group = 4], found 5}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x8xf32>)
      outs(%g, %i : tensor<5x2xf32>, tensor<5x2xi32>)
      {n_group = 4 : i64, topk_group = 5 : i64}
      -> tensor<5x2xf32>, tensor<5x2xi32>
  return
}

// -----

func.func @topk_renorm_c3_n_group(%z: tensor<5x8xf32>, %g: tensor<5x2xf32>,
                                  %i: tensor<5x2xi32>) {
  // expected-error @below {{expected n_group to be at least 1, found 0}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x8xf32>)
      outs(%g, %i : tensor<5x2xf32>, tensor<5x2xi32>)
      {n_group = 0 : i64} -> tensor<5x2xf32>, tensor<5x2xi32>
  return
}

// -----

func.func @topk_renorm_c4(%z: tensor<5x8xf32>, %g: tensor<5x5xf32>,
                          %i: tensor<5x5xi32>) {
  // expected-error @below {{expected k (5) to be at most the number of experts in the topk_group kept groups (4)}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x8xf32>)
      outs(%g, %i : tensor<5x5xf32>, tensor<5x5xi32>)
      {n_group = 4 : i64, topk_group = 2 : i64}
      -> tensor<5x5xf32>, tensor<5x5xi32>
  return
}

// -----

func.func @topk_renorm_c5(%p: tensor<5x8xf32>, %g: tensor<5x2xf32>,
                          %i: tensor<5x2xi32>) {
  // expected-error @below {{expected score to be none with kind = probs, found sigmoid}}
  %r:2 = moe.topk_renorm ins(%p : tensor<5x8xf32>)
      outs(%g, %i : tensor<5x2xf32>, tensor<5x2xi32>)
      {kind = #moe.score_kind<probs>, score = #moe.score_function<sigmoid>}
      -> tensor<5x2xf32>, tensor<5x2xi32>
  return
}

// -----

func.func @topk_renorm_c5_logits(%z: tensor<5x8xf32>, %g: tensor<5x2xf32>,
                                 %i: tensor<5x2xi32>) {
  // expected-error @below {{expected a score function with kind = logits, found none; scores that need none are kind = probs}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x8xf32>)
      outs(%g, %i : tensor<5x2xf32>, tensor<5x2xi32>)
      {score = #moe.score_function<none>} -> tensor<5x2xf32>, tensor<5x2xi32>
  return
}

// -----

func.func @topk_renorm_negative_eps(%z: tensor<5x8xf32>, %g: tensor<5x2xf32>,
                                    %i: tensor<5x2xi32>) {
  // expected-error @below {{expected eps to be at least 0, found -1}}
  %r:2 = moe.topk_renorm ins(%z : tensor<5x8xf32>)
      outs(%g, %i : tensor<5x2xf32>, tensor<5x2xi32>)
      {eps = -1.0 : f64} -> tensor<5x2xf32>, tensor<5x2xi32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// similarity_inform
//===----------------------------------------------------------------------===//

func.func @similarity_inform_c1(%u: tensor<2x7x8xf32>, %e: tensor<2x9x4xf32>,
                                %p: tensor<2x7x4xf32>, %l: tensor<2x7xf32>) {
  // expected-error @below {{expected dim 1 of 'e' (9) to match dim 1 of 'u' (7)}}
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x7x8xf32>, tensor<2x9x4xf32>)
      outs(%p, %l : tensor<2x7x4xf32>, tensor<2x7xf32>)
      -> tensor<2x7x4xf32>, tensor<2x7xf32>
  return
}

// -----

func.func @similarity_inform_c2(%u: tensor<2x7x8xf32>, %e: tensor<2x7x4xf32>,
                                %p: tensor<2x7x4xf32>, %l: tensor<2x7xf32>) {
  // expected-error @below {{expected tau to be positive and finite, found 0}}
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x7x8xf32>, tensor<2x7x4xf32>)
      outs(%p, %l : tensor<2x7x4xf32>, tensor<2x7xf32>) {tau = 0.0 : f64}
      -> tensor<2x7x4xf32>, tensor<2x7xf32>
  return
}

// -----

func.func @similarity_inform_c2_nan(
    %u: tensor<2x7x8xf32>, %e: tensor<2x7x4xf32>, %p: tensor<2x7x4xf32>,
    %l: tensor<2x7xf32>) {
  // expected-error @below {{expected tau to be positive and finite, found nan}}
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x7x8xf32>, tensor<2x7x4xf32>)
      outs(%p, %l : tensor<2x7x4xf32>, tensor<2x7xf32>)
      {tau = 0x7FF8000000000000 : f64} -> tensor<2x7x4xf32>, tensor<2x7xf32>
  return
}

// -----

func.func @similarity_inform_c3(%u: tensor<2x7x8xf32>, %e: tensor<2x9x4xf32>,
                                %uk: tensor<2x9x8xf32>, %p: tensor<2x7x4xf32>,
                                %l: tensor<2x7xf32>) {
  // expected-error @below {{expected no keys of their own with restrict = entropy, because the entropies of queries and keys are compared; found uk}}
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x7x8xf32>, tensor<2x9x4xf32>)
      keys(%uk : tensor<2x9x8xf32>)
      outs(%p, %l : tensor<2x7x4xf32>, tensor<2x7xf32>)
      {restrict = #moe.restrict<entropy>}
      -> tensor<2x7x4xf32>, tensor<2x7xf32>
  return
}

// -----

func.func @similarity_inform_c4(%u: tensor<2x7x8xf32>, %e: tensor<2x7x4xf32>,
                                %p: tensor<2x7x4xf32>, %l: tensor<2x7xf32>) {
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x7x8xf32>, tensor<2x7x4xf32>)
      // expected-error @below {{expected window to be at least 1, found 0}}
      outs(%p, %l : tensor<2x7x4xf32>, tensor<2x7xf32>) {visibility = #moe.visibility<window = 0>}
      -> tensor<2x7x4xf32>, tensor<2x7xf32>
  return
}

// -----

func.func @similarity_inform_square_ws(
    %u: tensor<2x7x8xf32>, %e: tensor<2x7x4xf32>, %ws: tensor<8x6xf32>,
    %p: tensor<2x7x4xf32>, %l: tensor<2x7xf32>) {
  // expected-error @below {{expected 'ws' to be square without 'uk', found 'tensor<8x6xf32>'}}
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x7x8xf32>, tensor<2x7x4xf32>)
      ws(%ws : tensor<8x6xf32>)
      outs(%p, %l : tensor<2x7x4xf32>, tensor<2x7xf32>)
      -> tensor<2x7x4xf32>, tensor<2x7xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// attention_posterior
//===----------------------------------------------------------------------===//

func.func @attention_posterior_c1(
    %q: tensor<1x4x7x8xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %p: tensor<1x7x5xf32>, %head: tensor<1xi32>, %l: tensor<1x1x7xf32>) {
  // expected-error @below {{expected exactly one of 'vp' and ('v', 'wo'), found neither}}
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>)
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return
}

// -----

func.func @attention_posterior_c1_both(
    %q: tensor<1x4x7x8xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %vp: tensor<1x4x7x6xf32>, %v: tensor<1x4x7x3xf32>, %wo: tensor<4x6x3xf32>,
    %p: tensor<1x7x5xf32>, %head: tensor<1xi32>, %l: tensor<1x1x7xf32>) {
  // expected-error @below {{expected exactly one of 'vp' and ('v', 'wo'), found both}}
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>)
      means(%vp : tensor<1x4x7x6xf32>)
      values(%v, %wo : tensor<1x4x7x3xf32>, tensor<4x6x3xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>)
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return
}

// -----

func.func @attention_posterior_c2(
    %q: tensor<1x4x7x8xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %vp: tensor<1x4x7x6xf32>, %p: tensor<1x7x5xf32>, %head: tensor<1xi32>,
    %l: tensor<1x1x7xf32>) {
  // expected-error @below {{expected sigma to be positive and finite, found -1}}
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>) means(%vp : tensor<1x4x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>) {sigma = -1.0 : f64}
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return
}

// -----

func.func @attention_posterior_c3(
    %q: tensor<1x4x7x8xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %vp: tensor<1x4x7x6xf32>, %p: tensor<1x7x5xf32>, %head: tensor<1xi32>,
    %l: tensor<1x1x7xf32>) {
  // expected-error @below {{expected head to be in [0, 4), found 4}}
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>) means(%vp : tensor<1x4x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>)
      {head_mode = #moe.head_mode<fixed>, head = 4 : i64}
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return
}

// -----

func.func @attention_posterior_c3_negative(
    %q: tensor<1x4x7x8xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %vp: tensor<1x4x7x6xf32>, %p: tensor<1x7x5xf32>, %head: tensor<1xi32>,
    %l: tensor<1x1x7xf32>) {
  // expected-error @below {{expected head to be in [0, 4), found -1}}
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>) means(%vp : tensor<1x4x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>)
      {head_mode = #moe.head_mode<fixed>, head = -1 : i64}
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return
}

// -----

func.func @attention_posterior_c3_negative_of_unknown_heads(
    %q: tensor<1x?x7x8xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %vp: tensor<1x?x7x6xf32>, %p: tensor<1x7x5xf32>, %head: tensor<1xi32>,
    %l: tensor<1x1x7xf32>) {
  // expected-error @below {{expected head to be at least 0, found -1}}
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x?x7x8xf32>, tensor<1x?x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>) means(%vp : tensor<1x?x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>)
      {head_mode = #moe.head_mode<fixed>, head = -1 : i64}
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return
}

// -----

func.func @attention_posterior_c3_head_with_another_mode(
    %q: tensor<1x4x7x8xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %vp: tensor<1x4x7x6xf32>, %p: tensor<1x7x5xf32>, %head: tensor<1xi32>,
    %l: tensor<1x1x7xf32>) {
  // expected-error @below {{expected 'head' with head_mode = fixed and only then, found it with head_mode = min_entropy}}
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>) means(%vp : tensor<1x4x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>) {head = 0 : i64}
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return
}

// -----

func.func @attention_posterior_c3_no_head(
    %q: tensor<1x4x7x8xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %vp: tensor<1x4x7x6xf32>, %p: tensor<1x7x5xf32>, %head: tensor<1xi32>,
    %l: tensor<1x1x7xf32>) {
  // expected-error @below {{expected 'head' with head_mode = fixed and only then, found none with head_mode = fixed}}
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>) means(%vp : tensor<1x4x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>)
      {head_mode = #moe.head_mode<fixed>}
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return
}

// -----

func.func @attention_posterior_c4(
    %q: tensor<1x4x7x8xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %vp: tensor<1x4x7x6xf32>, %p: tensor<1x7x5xf32>, %head: tensor<1xi32>,
    %l: tensor<1x1x7xf32>) {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>) means(%vp : tensor<1x4x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           // expected-error @below {{expected window to be at least 1, found -2}}
           tensor<1x1x7xf32>, tensor<1x1x7xf32>) {visibility = #moe.visibility<window = -2>}
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return
}

// -----

func.func @attention_posterior_scale_of_unknown_width(
    %q: tensor<1x4x7x?xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %vp: tensor<1x4x7x6xf32>, %p: tensor<1x7x5xf32>, %head: tensor<1xi32>,
    %l: tensor<1x1x7xf32>) {
  // expected-error @below {{expected 'scale' where the width of 'q' is not static and positive, found none}}
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x?xf32>, tensor<1x4x7x?xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>) means(%vp : tensor<1x4x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>)
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return
}

// -----

func.func @attention_posterior_heads_of_the_sums(
    %q: tensor<1x4x7x8xf32>, %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>,
    %vp: tensor<1x4x7x6xf32>, %p: tensor<1x7x5xf32>, %head: tensor<1xi32>,
    %l: tensor<1x4x7xf32>) {
  // expected-error @below {{expected dim 1 of 'prior_lse' to be 1 with head_mode = min_entropy, found 4}}
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>) means(%vp : tensor<1x4x7x6xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x4x7xf32>, tensor<1x4x7xf32>)
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x4x7xf32>, tensor<1x4x7xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// softmax_mix
//===----------------------------------------------------------------------===//

func.func @softmax_mix_destinations(%q: tensor<1x2x7x8xf32>,
                                    %v: tensor<1x7x4xf32>,
                                    %o: tensor<1x2x7x4xf32>) {
  // expected-error @below {{expected 2 destinations in 'outs' (mixed with values, lse, entropy with with_entropy), found 1}}
  %r = moe.softmax_mix ins(%q, %q : tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>)
      values(%v : tensor<1x7x4xf32>) outs(%o : tensor<1x2x7x4xf32>)
      -> tensor<1x2x7x4xf32>
  return
}

// -----

func.func @posterior_with_half_of_the_rows(
    %rows: tensor<1x2x7xf32>, %q: tensor<1x2x7x8xf32>, %u: tensor<1x7x16xf32>,
    %e: tensor<1x7x5xf32>, %vp: tensor<1x2x7x16xf32>, %p: tensor<1x7x5xf32>,
    %head: tensor<1xi32>, %l: tensor<1x1x7xf32>) {
  // expected-error @below {{expected 'row_lse' and 'row_entropy' together}}
  %r:4 = "moe.attention_posterior"(%q, %q, %u, %e, %vp, %rows, %p, %head, %l, %l)
      <{operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 4>}>
      : (tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>, tensor<1x7x16xf32>,
         tensor<1x7x5xf32>, tensor<1x2x7x16xf32>, tensor<1x2x7xf32>,
         tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>)
      -> (tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>)
  return
}

// -----

// Values are those of each head, or shared by all: never broadcast.

func.func @softmax_mix_values_of_one_head(%q: tensor<1x2x7x8xf32>,
                                          %v: tensor<1x1x7x4xf32>,
                                          %o: tensor<1x2x7x4xf32>,
                                          %l: tensor<1x2x7xf32>) {
  // expected-error @below {{expected dim 1 of 'v' (1) to match dim 1 of 'q' (2)}}
  %r:2 = moe.softmax_mix ins(%q, %q : tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>)
      values(%v : tensor<1x1x7x4xf32>)
      outs(%o, %l : tensor<1x2x7x4xf32>, tensor<1x2x7xf32>)
      -> tensor<1x2x7x4xf32>, tensor<1x2x7xf32>
  return
}

// -----

func.func @softmax_mix_values_rank(%q: tensor<1x2x7x8xf32>,
                                   %v: tensor<7x4xf32>,
                                   %o: tensor<1x2x7x4xf32>,
                                   %l: tensor<1x2x7xf32>) {
  // expected-error @below {{expected 'v' to have rank 3 (b, j, e), found rank 2}}
  %r:2 = moe.softmax_mix ins(%q, %q : tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>)
      values(%v : tensor<7x4xf32>)
      outs(%o, %l : tensor<1x2x7x4xf32>, tensor<1x2x7xf32>)
      -> tensor<1x2x7x4xf32>, tensor<1x2x7xf32>
  return
}

// -----

// A bias is broadcast where its dim is 1, and only there.

func.func @softmax_mix_bias_heads(%q: tensor<1x4x7x8xf32>,
                                  %bias: tensor<1x2x7x7xf32>,
                                  %l: tensor<1x4x7xf32>) {
  // expected-error @below {{expected dim 1 of 'bias' (2) to match dim 1 of 'q' (4)}}
  %r = moe.softmax_mix ins(%q, %q : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>)
      bias(%bias : tensor<1x2x7x7xf32>) outs(%l : tensor<1x4x7xf32>)
      -> tensor<1x4x7xf32>
  return
}

// -----

func.func @softmax_mix_bias_rank(%q: tensor<1x4x7x8xf32>, %bias: tensor<7x7xf32>,
                                 %l: tensor<1x4x7xf32>) {
  // expected-error @below {{expected 'bias' to have rank 4 (b, h, i, j), found rank 2}}
  %r = moe.softmax_mix ins(%q, %q : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>)
      bias(%bias : tensor<7x7xf32>) outs(%l : tensor<1x4x7xf32>)
      -> tensor<1x4x7xf32>
  return
}

// -----

func.func @softmax_mix_window(%q: tensor<1x2x7x8xf32>, %l: tensor<1x2x7xf32>) {
  %r = moe.softmax_mix ins(%q, %q : tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>)
      // expected-error @below {{expected window to be at least 1, found 0}}
      outs(%l : tensor<1x2x7xf32>) {visibility = #moe.visibility<window = 0>} -> tensor<1x2x7xf32>
  return
}

// -----

// The assembly format has no way to say this; the generic form has.

func.func @softmax_mix_one_level(%q: tensor<1x2x7x8xf32>, %level: tensor<1x7xf32>,
                                 %l: tensor<1x2x7xf32>) {
  // expected-error @below {{expected 'query_level' and 'key_level' together}}
  %r = "moe.softmax_mix"(%q, %q, %level, %l) <{
      operandSegmentSizes = array<i32: 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1>}>
      : (tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>, tensor<1x7xf32>,
         tensor<1x2x7xf32>) -> tensor<1x2x7xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// mad_dispersion
//===----------------------------------------------------------------------===//

func.func @mad_dispersion_experts(
    %h: tensor<5x8xf32>, %assign: tensor<5xi32>, %s: tensor<4x8xf32>,
    %count: tensor<3xi32>) {
  // expected-error @below {{expected dim 0 of 'count' (3) to match dim 0 of 's' (4)}}
  %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<5x8xf32>, tensor<5xi32>)
      outs(%s, %s, %count : tensor<4x8xf32>, tensor<4x8xf32>, tensor<3xi32>)
      -> tensor<4x8xf32>, tensor<4x8xf32>, tensor<3xi32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// adjacency_gate, adjacency_update
//===----------------------------------------------------------------------===//

func.func @adjacency_gate_c1(%p: tensor<5x8xf32>, %a: tensor<4x8xf32>,
                             %g: tensor<5x4xf32>) {
  // expected-error @below {{expected 'a' to be square, found 4 x 8}}
  %r = moe.adjacency_gate ins(%p, %a : tensor<5x8xf32>, tensor<4x8xf32>)
      outs(%g : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @adjacency_gate_scalar(%p: tensor<f32>, %a: tensor<4x4xf32>,
                                 %g: tensor<4xf32>) {
  // expected-error @below {{expected 'p' to have at least one dim, found a scalar}}
  %r = moe.adjacency_gate ins(%p, %a : tensor<f32>, tensor<4x4xf32>)
      outs(%g : tensor<4xf32>) -> tensor<4xf32>
  return
}

// -----

func.func @adjacency_update_c1(%a: tensor<4x5xf32>, %i: tensor<9x2xi32>) {
  // expected-error @below {{expected 'a' to be square, found 4 x 5}}
  %r = moe.adjacency_update ins(%a, %i : tensor<4x5xf32>, tensor<9x2xi32>)
      outs(%a : tensor<4x5xf32>) -> tensor<4x5xf32>
  return
}

// -----

func.func @adjacency_update_c2(%a: tensor<4x4xf32>, %i: tensor<9x2xi32>) {
  // expected-error @below {{expected beta to be in [0, 1], found 1.5}}
  %r = moe.adjacency_update ins(%a, %i : tensor<4x4xf32>, tensor<9x2xi32>)
      outs(%a : tensor<4x4xf32>) {beta = 1.5 : f64} -> tensor<4x4xf32>
  return
}

// -----

func.func @adjacency_update_c3(%a: tensor<4x4xf32>, %i: tensor<9x2xi32>) {
  // expected-error @below {{expected diagonal = true with norm = eq7, which divides by the diagonal}}
  %r = moe.adjacency_update ins(%a, %i : tensor<4x4xf32>, tensor<9x2xi32>)
      outs(%a : tensor<4x4xf32>)
      {norm = #moe.adjacency_norm<eq7>, diagonal = false} -> tensor<4x4xf32>
  return
}

// -----

func.func @adjacency_update_more_choices_than_experts(%a: tensor<4x4xf32>,
                                                      %i: tensor<9x5xi32>) {
  // expected-error @below {{expected k (5) to be at most e (4)}}
  %r = moe.adjacency_update ins(%a, %i : tensor<4x4xf32>, tensor<9x5xi32>)
      outs(%a : tensor<4x4xf32>) -> tensor<4x4xf32>
  return
}

// -----

// The embeddings live in the space of omega's results, or in that of the
// tokens.

func.func @cosine_logits_c1(%h: tensor<5x8xf32>, %emb: tensor<4x8xf32>,
                            %omega: tensor<3x8xf32>, %z: tensor<5x4xf32>) {
  // expected-error @below {{expected dim 0 of 'omega' (3) to match dim 1 of 'emb' (8)}}
  %r = moe.cosine_logits ins(%h, %emb : tensor<5x8xf32>, tensor<4x8xf32>)
      omega(%omega : tensor<3x8xf32>) outs(%z : tensor<5x4xf32>)
      -> tensor<5x4xf32>
  return
}

// -----

func.func @cosine_logits_c1_without_omega(
    %h: tensor<5x8xf32>, %emb: tensor<4x3xf32>, %z: tensor<5x4xf32>) {
  // expected-error @below {{expected dim 1 of 'emb' (3) to match dim 1 of 'h' (8)}}
  %r = moe.cosine_logits ins(%h, %emb : tensor<5x8xf32>, tensor<4x3xf32>)
      outs(%z : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @cosine_logits_c2(%h: tensor<5x8xf32>, %emb: tensor<4x8xf32>,
                            %z: tensor<5x4xf32>) {
  // expected-error @below {{expected eps to be positive and finite, found 0}}
  %r = moe.cosine_logits ins(%h, %emb : tensor<5x8xf32>, tensor<4x8xf32>)
      outs(%z : tensor<5x4xf32>) {eps = 0.0 : f64} -> tensor<5x4xf32>
  return
}

// -----

func.func @cosine_logits_c3(%h: tensor<5x8xf32>, %emb: tensor<4x8xf32>,
                            %z: tensor<5x4xf32>) {
  // expected-error @below {{expected tau to be positive and finite, found -1}}
  %r = moe.cosine_logits ins(%h, %emb : tensor<5x8xf32>, tensor<4x8xf32>)
      outs(%z : tensor<5x4xf32>) {tau = -1.0 : f64} -> tensor<5x4xf32>
  return
}

// -----

func.func @hyper_router_c1(
    %e: tensor<3xf32>, %w1: tensor<5x3xf32>, %b1: tensor<5xf32>,
    %w2: tensor<32x5xf32>, %b2: tensor<32xf32>, %weight: tensor<4x8xf32>,
    %bias: tensor<4xf32>) {
  // expected-error @below {{expected dim 0 of 'w2' to be e (d + 1) = 4 * (8 + 1), found 32}}
  %r:2 = moe.hyper_router
      ins(%e, %w1, %b1, %w2, %b2 : tensor<3xf32>, tensor<5x3xf32>,
          tensor<5xf32>, tensor<32x5xf32>, tensor<32xf32>)
      outs(%weight, %bias : tensor<4x8xf32>, tensor<4xf32>)
      -> tensor<4x8xf32>, tensor<4xf32>
  return
}

// -----

func.func @ac_logits_c1(%h: tensor<5x8xf32>, %m: tensor<4x8xf32>,
                        %idx: tensor<5x2xi32>, %z: tensor<5x4xf32>) {
  // expected-error @below {{expected 'prev_gates' unless 'prev_idx' holds one expert a token, found none with r = 2}}
  %r = moe.ac_logits
      ins(%h, %m, %idx, %m : tensor<5x8xf32>, tensor<4x8xf32>, tensor<5x2xi32>,
          tensor<4x8xf32>)
      outs(%z : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @ac_logits_c1_dynamic(%h: tensor<5x8xf32>, %m: tensor<4x8xf32>,
                                %idx: tensor<5x?xi32>, %z: tensor<5x4xf32>) {
  // expected-error @below {{expected 'prev_gates' unless 'prev_idx' holds one expert a token, found none with r dynamic}}
  %r = moe.ac_logits
      ins(%h, %m, %idx, %m : tensor<5x8xf32>, tensor<4x8xf32>, tensor<5x?xi32>,
          tensor<4x8xf32>)
      outs(%z : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @ac_logits_without_places(
    %h: tensor<5x8xf32>, %m: tensor<4x8xf32>, %idx: tensor<5x0xi32>,
    %z: tensor<5x4xf32>) {
  // expected-error @below {{expected r, the last dim of 'prev_idx', to be at least 1, found 0}}
  %r = moe.ac_logits
      ins(%h, %m, %idx, %m : tensor<5x8xf32>, tensor<4x8xf32>, tensor<5x0xi32>,
          tensor<4x8xf32>)
      outs(%z : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

// The metric has one row an expert.

func.func @ac_logits_with_a_smaller_metric(
    %h: tensor<5x8xf32>, %m: tensor<3x8xf32>, %idx: tensor<5x1xi32>,
    %emb: tensor<4x8xf32>, %z: tensor<5x4xf32>) {
  // expected-error @below {{expected e (4) to be at most l (3)}}
  %r = moe.ac_logits
      ins(%h, %m, %idx, %emb : tensor<5x8xf32>, tensor<3x8xf32>,
          tensor<5x1xi32>, tensor<4x8xf32>)
      outs(%z : tensor<5x4xf32>) -> tensor<5x4xf32>
  return
}

// -----

func.func @dispersion_weights_c1(%s: tensor<4x8xf32>, %count: tensor<4xi32>) {
  // expected-error @below {{expected eps to be positive and finite, found 0}}
  %r = moe.dispersion_weights ins(%s, %count : tensor<4x8xf32>, tensor<4xi32>)
      outs(%s : tensor<4x8xf32>) {eps = 0.0 : f64} -> tensor<4x8xf32>
  return
}

// -----

func.func @dispersion_weights_c2(%s: tensor<4x8xf32>, %count: tensor<4xi32>) {
  // expected-error @below {{expected clamp to be positive and finite, found -1.5}}
  %r = moe.dispersion_weights ins(%s, %count : tensor<4x8xf32>, tensor<4xi32>)
      outs(%s : tensor<4x8xf32>) {clamp = -1.5 : f64} -> tensor<4x8xf32>
  return
}

// -----

func.func @attention_entropy_has_a_scale(
    %q: tensor<1x4x7x?xf32>, %mean: tensor<1x4xf32>, %rows: tensor<1x4x7xf32>) {
  // expected-error @below {{expected 'scale' where the width of 'q' is not static and positive, found none}}
  %r:2 = moe.attention_entropy
      ins(%q, %q : tensor<1x4x7x?xf32>, tensor<1x4x7x?xf32>)
      outs(%mean, %rows : tensor<1x4xf32>, tensor<1x4x7xf32>)
      -> tensor<1x4xf32>, tensor<1x4x7xf32>
  return
}

// -----

func.func @attention_entropy_window(
    %q: tensor<1x4x7x3xf32>, %mean: tensor<1x4xf32>, %rows: tensor<1x4x7xf32>) {
  %r:2 = moe.attention_entropy
      ins(%q, %q : tensor<1x4x7x3xf32>, tensor<1x4x7x3xf32>)
      outs(%mean, %rows : tensor<1x4xf32>, tensor<1x4x7xf32>)
      // expected-error @below {{expected window to be at least 1, found 0}}
      {visibility = #moe.visibility<window = 0>} -> tensor<1x4xf32>, tensor<1x4x7xf32>
  return
}

// -----

//===----------------------------------------------------------------------===//
// co_selections
//===----------------------------------------------------------------------===//

func.func @co_selections_c1(%i: tensor<9x2xi32>, %c: tensor<4x5xi32>) {
  // expected-error @below {{expected 'counts' to be square, found 4 x 5}}
  %r = moe.co_selections ins(%i : tensor<9x2xi32>) outs(%c : tensor<4x5xi32>)
      -> tensor<4x5xi32>
  return
}

// -----

func.func @co_selections_of_floats(%i: tensor<9x2xi32>, %c: tensor<4x4xf32>) {
  // expected-error @below {{expected elements of 'counts' to be i32, found 'f32'}}
  %r = moe.co_selections ins(%i : tensor<9x2xi32>) outs(%c : tensor<4x4xf32>)
      -> tensor<4x4xf32>
  return
}

// -----

func.func @visibility_part_twice(%q: tensor<1x2x7x8xf32>, %l: tensor<1x2x7xf32>) {
  %r = moe.softmax_mix ins(%q, %q : tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>)
      outs(%l : tensor<1x2x7xf32>)
      // expected-error @below {{expected causal, window = <keys> and exclude_self, each at most once, found 'causal'}}
      {visibility = #moe.visibility<causal, causal>} -> tensor<1x2x7xf32>
  return
}

// -----

func.func @visibility_part_unknown(%q: tensor<1x2x7x8xf32>, %l: tensor<1x2x7xf32>) {
  %r = moe.softmax_mix ins(%q, %q : tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>)
      outs(%l : tensor<1x2x7xf32>)
      // expected-error @below {{expected causal, window = <keys> and exclude_self, each at most once, found 'future'}}
      {visibility = #moe.visibility<future>} -> tensor<1x2x7xf32>
  return
}

// -----

// Under its old names a visibility would hide nothing.
func.func @visibility_by_old_names(%q: tensor<1x2x7x8xf32>, %l: tensor<1x2x7xf32>) {
  // expected-error @below {{expected visibility = #moe.visibility<causal, window = 4, exclude_self> with the parts that apply, found the attribute 'causal'}}
  %r = moe.softmax_mix ins(%q, %q : tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>)
      outs(%l : tensor<1x2x7xf32>) {causal = true} -> tensor<1x2x7xf32>
  return
}

// -----

func.func @similarity_inform_c5(%u: tensor<2x7x8xf32>, %e: tensor<2x7x4xf32>,
                                %p: tensor<2x7x4xf32>, %l: tensor<2x7xf32>) {
  // expected-error @below {{expected a visibility without exclude_self, because a token always informs itself; found #moe.visibility<exclude_self>}}
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x7x8xf32>, tensor<2x7x4xf32>)
      outs(%p, %l : tensor<2x7x4xf32>, tensor<2x7xf32>)
      {visibility = #moe.visibility<exclude_self>} -> tensor<2x7x4xf32>, tensor<2x7xf32>
  return
}

// -----

func.func @softmax_mix_self_is_not_causal(%u: tensor<2x1x7x8xf32>, %v: tensor<2x7x4xf32>,
    %mixed: tensor<2x1x7x4xf32>, %lse: tensor<2x1x7xf32>) {
  // expected-error @below {{expected a visibility that is not causal, because then pairs of tokens have one role and share nothing; found #moe.visibility<causal>}}
  %r:2 = moe.softmax_mix_self ins(%u, %v : tensor<2x1x7x8xf32>, tensor<2x7x4xf32>)
      outs(%mixed, %lse : tensor<2x1x7x4xf32>, tensor<2x1x7xf32>)
      {visibility = #moe.visibility<causal>} -> tensor<2x1x7x4xf32>, tensor<2x1x7xf32>
  return
}
