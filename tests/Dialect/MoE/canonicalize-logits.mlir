// RUN: %moe-opt %s --canonicalize --split-input-file | FileCheck %s
// RUN: %moe-opt %s --canonicalize --canonicalize --split-input-file | FileCheck %s

// Constant embeddings are normalised once: (3, 4) has norm 5, and the row of
// zeros is divided by eps.

// CHECK-LABEL: func @normalises_constant_embeddings
// CHECK:         %[[EMB:.*]] = arith.constant dense<{{\[}}[6.000000e-01, 8.000000e-01], [0.000000e+00, 0.000000e+00], [-1.000000e+00, 0.000000e+00]]> : tensor<3x2xf32>
// CHECK:         moe.cosine_logits ins(%{{.*}}, %[[EMB]] :
// CHECK-SAME:      {norm_emb = false, tau = 5.000000e-01 : f64}
func.func @normalises_constant_embeddings(%h: tensor<?x2xf32>,
                                          %z0: tensor<?x3xf32>)
    -> tensor<?x3xf32> {
  %emb = arith.constant dense<[[3.0, 4.0], [0.0, 0.0], [-2.0, 0.0]]> : tensor<3x2xf32>
  %z = moe.cosine_logits ins(%h, %emb : tensor<?x2xf32>, tensor<3x2xf32>)
      outs(%z0 : tensor<?x3xf32>) {tau = 0.5 : f64} -> tensor<?x3xf32>
  return %z : tensor<?x3xf32>
}

// -----

// Without a norm of the token, emb omega / tau is one matrix.

// CHECK-LABEL: func @folds_omega_into_the_embeddings
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x2xf32>
// CHECK:         %[[W:.*]] = arith.constant dense<{{\[}}[1.200000e+00, 3.200000e+00], [2.000000e+00, 0.000000e+00]]> : tensor<2x2xf32>
// CHECK-NOT:     moe.cosine_logits
// CHECK:         moe.router_logits ins(%[[H]], %[[W]] :
func.func @folds_omega_into_the_embeddings(%h: tensor<?x2xf32>,
                                           %z0: tensor<?x2xf32>)
    -> tensor<?x2xf32> {
  %emb = arith.constant dense<[[3.0, 4.0], [5.0, 0.0]]> : tensor<2x2xbf16>
  %omega = arith.constant dense<[[1.0, 0.0], [0.0, 2.0]]> : tensor<2x2xf32>
  %z = moe.cosine_logits ins(%h, %emb : tensor<?x2xf32>, tensor<2x2xbf16>)
      omega(%omega : tensor<2x2xf32>) outs(%z0 : tensor<?x2xf32>)
      {tau = 0.5 : f64, norm_token = false} -> tensor<?x2xf32>
  return %z : tensor<?x2xf32>
}

// -----

// 4 x 8 products a token become 2 x 8 + 4 x 2 through a space of width 2: the
// fold would be more work.

// CHECK-LABEL: func @keeps_a_narrow_embedding_space
// CHECK:         moe.cosine_logits
// CHECK-SAME:      omega(
// CHECK-SAME:      {norm_emb = false, norm_token = false}
func.func @keeps_a_narrow_embedding_space(%h: tensor<?x8xf32>,
                                          %z0: tensor<?x4xf32>)
    -> tensor<?x4xf32> {
  %emb = arith.constant dense<1.0> : tensor<4x2xf32>
  %omega = arith.constant dense<2.0> : tensor<2x8xf32>
  %z = moe.cosine_logits ins(%h, %emb : tensor<?x8xf32>, tensor<4x2xf32>)
      omega(%omega : tensor<2x8xf32>) outs(%z0 : tensor<?x4xf32>)
      {norm_token = false} -> tensor<?x4xf32>
  return %z : tensor<?x4xf32>
}

// -----

// With the norm of the token omega h is needed anyway.

// CHECK-LABEL: func @keeps_omega_for_the_norm_of_the_token
// CHECK:         moe.cosine_logits
// CHECK-SAME:      omega(
func.func @keeps_omega_for_the_norm_of_the_token(%h: tensor<?x2xf32>,
                                                 %z0: tensor<?x2xf32>)
    -> tensor<?x2xf32> {
  %emb = arith.constant dense<[[3.0, 4.0], [5.0, 0.0]]> : tensor<2x2xf32>
  %omega = arith.constant dense<[[1.0, 0.0], [0.0, 2.0]]> : tensor<2x2xf32>
  %z = moe.cosine_logits ins(%h, %emb : tensor<?x2xf32>, tensor<2x2xf32>)
      omega(%omega : tensor<2x2xf32>) outs(%z0 : tensor<?x2xf32>)
      -> tensor<?x2xf32>
  return %z : tensor<?x2xf32>
}

// -----

// A product that nothing is left of but itself needs no constants.

// CHECK-LABEL: func @is_a_plain_product_without_norms
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x8xf32>, %[[EMB:[^:]*]]: tensor<4x8xf32>
// CHECK:         moe.router_logits ins(%[[H]], %[[EMB]] :
func.func @is_a_plain_product_without_norms(
    %h: tensor<?x8xf32>, %emb: tensor<4x8xf32>, %z0: tensor<?x4xf32>)
    -> tensor<?x4xf32> {
  %z = moe.cosine_logits ins(%h, %emb : tensor<?x8xf32>, tensor<4x8xf32>)
      outs(%z0 : tensor<?x4xf32>) {norm_token = false, norm_emb = false}
      -> tensor<?x4xf32>
  return %z : tensor<?x4xf32>
}

// -----

// A learned temperature is a value: the op stays.

// CHECK-LABEL: func @keeps_a_learned_temperature
// CHECK:         moe.cosine_logits
func.func @keeps_a_learned_temperature(
    %h: tensor<?x8xf32>, %emb: tensor<4x8xf32>, %tau: f32,
    %z0: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %z = moe.cosine_logits ins(%h, %emb : tensor<?x8xf32>, tensor<4x8xf32>)
      tau(%tau : f32) outs(%z0 : tensor<?x4xf32>)
      {norm_token = false, norm_emb = false} -> tensor<?x4xf32>
  return %z : tensor<?x4xf32>
}

// -----

// rows = w2 relu(w1 e + b1) + b2 = w2 (3, 0) + b2: the second hidden unit is
// off. Each row is the weights of an expert, then its bias.

// CHECK-LABEL: func @folds_a_constant_hyper_router
// CHECK-DAG:     %[[W:.*]] = arith.constant dense<{{\[}}[3.000000e+00, 7.000000e+00], [9.000000e+00, 1.600000e+01]]> : tensor<2x2xf32>
// CHECK-DAG:     %[[B:.*]] = arith.constant dense<[5.000000e+00, 1.400000e+01]> : tensor<2xf32>
// CHECK-NOT:     moe.
// CHECK:         return %[[W]], %[[B]]
func.func @folds_a_constant_hyper_router(%w0: tensor<2x2xf32>,
                                         %b0: tensor<2xf32>)
    -> (tensor<2x2xf32>, tensor<2xf32>) {
  %e = arith.constant dense<[1.0, 2.0]> : tensor<2xf32>
  %w1 = arith.constant dense<[[1.0, 1.0], [-1.0, -1.0]]> : tensor<2x2xf32>
  %b1 = arith.constant dense<0.0> : tensor<2xf32>
  %w2 = arith.constant dense<[[1.0, 5.0], [2.0, 5.0], [1.0, 5.0], [2.0, 5.0], [4.0, 5.0], [3.0, 5.0]]> : tensor<6x2xf32>
  %b2 = arith.constant dense<[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]> : tensor<6xf32>
  %w, %b = moe.hyper_router
      ins(%e, %w1, %b1, %w2, %b2 : tensor<2xf32>, tensor<2x2xf32>,
          tensor<2xf32>, tensor<6x2xf32>, tensor<6xf32>)
      outs(%w0, %b0 : tensor<2x2xf32>, tensor<2xf32>)
      -> tensor<2x2xf32>, tensor<2xf32>
  return %w, %b : tensor<2x2xf32>, tensor<2xf32>
}

// -----

// An embedding in training is an operand: the op stays.

// CHECK-LABEL: func @keeps_a_hyper_router_in_training
// CHECK:         moe.hyper_router
func.func @keeps_a_hyper_router_in_training(
    %e: tensor<2xf32>, %w0: tensor<2x2xf32>, %b0: tensor<2xf32>)
    -> (tensor<2x2xf32>, tensor<2xf32>) {
  %w1 = arith.constant dense<1.0> : tensor<2x2xf32>
  %b1 = arith.constant dense<0.0> : tensor<2xf32>
  %w2 = arith.constant dense<1.0> : tensor<6x2xf32>
  %b2 = arith.constant dense<0.0> : tensor<6xf32>
  %w, %b = moe.hyper_router
      ins(%e, %w1, %b1, %w2, %b2 : tensor<2xf32>, tensor<2x2xf32>,
          tensor<2xf32>, tensor<6x2xf32>, tensor<6xf32>)
      outs(%w0, %b0 : tensor<2x2xf32>, tensor<2xf32>)
      -> tensor<2x2xf32>, tensor<2xf32>
  return %w, %b : tensor<2x2xf32>, tensor<2xf32>
}

// -----

// Weights as large as a model's are resources, before and after: 64 x 33
// elements of 1 + 2 * 3.

// CHECK-LABEL: func @folds_resources
// CHECK:         arith.constant dense_resource<router_weight> : tensor<64x33xf32>
// CHECK-NOT:     moe.
// CHECK:         router_weight: "0x040000000000E0400000E0400000E040
func.func @folds_resources(%w0: tensor<64x33xf32>, %b0: tensor<64xf32>)
    -> tensor<64x33xf32> {
  %e = arith.constant dense_resource<embedding> : tensor<2xf32>
  %w1 = arith.constant dense<1.5> : tensor<1x2xf32>
  %b1 = arith.constant dense<0.0> : tensor<1xf32>
  %w2 = arith.constant dense<2.0> : tensor<2176x1xf32>
  %b2 = arith.constant dense<1.0> : tensor<2176xf32>
  %w, %b = moe.hyper_router
      ins(%e, %w1, %b1, %w2, %b2 : tensor<2xf32>, tensor<1x2xf32>,
          tensor<1xf32>, tensor<2176x1xf32>, tensor<2176xf32>)
      outs(%w0, %b0 : tensor<64x33xf32>, tensor<64xf32>)
      -> tensor<64x33xf32>, tensor<64xf32>
  return %w : tensor<64x33xf32>
}
{-#
  dialect_resources: {
    builtin: {
      // (1.0, 1.0)
      embedding: "0x040000000000803F0000803F"
    }
  }
#-}

// -----

// Remark 1: a metric of ones, or a token without a previous expert, is the
// plain router.

// CHECK-LABEL: func @is_the_plain_router_in_the_metric_of_ones
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x8xf32>, %[[EMB:[^:]*]]: tensor<4x8xf32>, %[[BIAS:[^:]*]]: tensor<4xf32>
// CHECK-NOT:     moe.ac_logits
// CHECK:         moe.router_logits ins(%[[H]], %[[EMB]] : {{.*}}) bias(%[[BIAS]] :
func.func @is_the_plain_router_in_the_metric_of_ones(
    %h: tensor<?x8xf32>, %emb: tensor<4x8xf32>, %bias: tensor<4xf32>,
    %idx: tensor<?x1xi32>, %z0: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %m = arith.constant dense<1.0> : tensor<4x8xf32>
  %z = moe.ac_logits
      ins(%h, %m, %idx, %emb : tensor<?x8xf32>, tensor<4x8xf32>,
          tensor<?x1xi32>, tensor<4x8xf32>)
      bias(%bias : tensor<4xf32>) outs(%z0 : tensor<?x4xf32>)
      -> tensor<?x4xf32>
  return %z : tensor<?x4xf32>
}

// -----

// CHECK-LABEL: func @is_the_plain_router_in_the_first_layer
// CHECK-NOT:     moe.ac_logits
// CHECK:         moe.router_logits
func.func @is_the_plain_router_in_the_first_layer(
    %h: tensor<5x8xf32>, %m: tensor<4x8xf32>, %gates: tensor<5x2xf32>,
    %z0: tensor<5x4xf32>) -> tensor<5x4xf32> {
  %idx = arith.constant dense<-1> : tensor<5x2xi64>
  %z = moe.ac_logits
      ins(%h, %m, %idx, %m : tensor<5x8xf32>, tensor<4x8xf32>, tensor<5x2xi64>,
          tensor<4x8xf32>)
      gates(%gates : tensor<5x2xf32>) outs(%z0 : tensor<5x4xf32>)
      -> tensor<5x4xf32>
  return %z : tensor<5x4xf32>
}

// -----

// CHECK-LABEL: func @keeps_a_metric_with_an_effect
// CHECK:         moe.ac_logits
func.func @keeps_a_metric_with_an_effect(
    %h: tensor<5x8xf32>, %m: tensor<4x8xf32>, %z0: tensor<5x4xf32>)
    -> tensor<5x4xf32> {
  %idx = arith.constant dense<0> : tensor<5x1xi64>
  %z = moe.ac_logits
      ins(%h, %m, %idx, %m : tensor<5x8xf32>, tensor<4x8xf32>, tensor<5x1xi64>,
          tensor<4x8xf32>)
      outs(%z0 : tensor<5x4xf32>) -> tensor<5x4xf32>
  return %z : tensor<5x4xf32>
}
