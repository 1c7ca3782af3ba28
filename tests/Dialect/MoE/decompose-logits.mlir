// RUN: %moe-opt %s --moe-decompose --canonicalize --cse | FileCheck %s

// The direction of a token is taken before the product, squares are summed in
// f64, and the norm of an expert is a factor of its column.

// CHECK-LABEL: func @cosine_logits
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x8xbf16>, %[[EMB:[^:]*]]: tensor<4x3xf32>, %[[OMEGA:[^:]*]]: tensor<3x8xf32>, %[[Z0:[^:]*]]: tensor<?x4xf32>
// CHECK:         %[[X:.*]] = linalg.generic {{.*}} ins(%[[H]], %[[OMEGA]] : {{.*}}) outs(%{{.*}} : tensor<?x3xf32>)
// CHECK:         %[[SQUARES:.*]] = linalg.generic {{.*}} ins(%[[X]] : {{.*}}) outs(%{{.*}} : tensor<?xf64>)
// CHECK:         %[[NORM:.*]] = linalg.generic {{.*}} ins(%[[SQUARES]] : {{.*}}) outs(%{{.*}} : tensor<?xf32>)
// CHECK:           math.sqrt
// CHECK-NEXT:      arith.maximumf
// CHECK:         %[[DIRECTION:.*]] = linalg.generic {{.*}} ins(%[[X]], %[[NORM]] :
// CHECK:           arith.divf
// CHECK:         %[[DOT:.*]] = linalg.generic {{.*}} ins(%[[DIRECTION]], %[[EMB]] : {{.*}}) outs(%{{.*}} : tensor<?x4xf32>)
// CHECK:         linalg.generic {{.*}} ins(%[[EMB]] : {{.*}}) outs(%{{.*}} : tensor<4xf64>)
// CHECK:         linalg.generic {{.*}} ins(%[[DOT]], %{{.*}} : tensor<?x4xf32>, tensor<4xf32>)
func.func @cosine_logits(
    %h: tensor<?x8xbf16>, %emb: tensor<4x3xf32>, %omega: tensor<3x8xf32>,
    %z0: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %z = moe.cosine_logits ins(%h, %emb : tensor<?x8xbf16>, tensor<4x3xf32>)
      omega(%omega : tensor<3x8xf32>) outs(%z0 : tensor<?x4xf32>)
      {tau = 0.5 : f64} -> tensor<?x4xf32>
  return %z : tensor<?x4xf32>
}

// The rows that the network generates are read as [e, d + 1].

// CHECK-LABEL: func @hyper_router
// CHECK-SAME:    %[[E:[^:]*]]: tensor<3xf32>, %[[W1:[^:]*]]: tensor<5x3xf32>, %{{[^:]*}}: tensor<5xf32>, %[[W2:[^:]*]]: tensor<36x5xf32>
// CHECK:         linalg.generic {{.*}} ins(%[[W1]], %[[E]] : {{.*}}) outs(%{{.*}} : tensor<5xf32>)
// CHECK:         %[[HIDDEN:.*]] = linalg.generic
// CHECK:           arith.maximumf
// CHECK:         %[[ROWS:.*]] = linalg.generic {{.*}} ins(%[[W2]], %[[HIDDEN]] : {{.*}}) outs(%{{.*}} : tensor<36xf32>)
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<4x8xf32>)
// CHECK:           arith.muli %{{.*}}, %c9
// CHECK:           tensor.extract %[[ROWS]]
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<4xf32>)
// CHECK:           tensor.extract %[[ROWS]]
func.func @hyper_router(
    %e: tensor<3xf32>, %w1: tensor<5x3xf32>, %b1: tensor<5xf32>,
    %w2: tensor<36x5xf32>, %b2: tensor<36xf32>, %weight: tensor<4x8xf32>,
    %bias: tensor<4xf32>) -> (tensor<4x8xf32>, tensor<4xf32>) {
  %w, %b = moe.hyper_router
      ins(%e, %w1, %b1, %w2, %b2 : tensor<3xf32>, tensor<5x3xf32>,
          tensor<5xf32>, tensor<36x5xf32>, tensor<36xf32>)
      outs(%weight, %bias : tensor<4x8xf32>, tensor<4xf32>)
      -> tensor<4x8xf32>, tensor<4xf32>
  return %w, %b : tensor<4x8xf32>, tensor<4xf32>
}

// The metric scales the tokens, a tensor over n and d, before one contraction
// with the embeddings; no tensor over n, d and e exists.

// CHECK-LABEL: func @ac_logits_scales_the_tokens
// CHECK-SAME:    %[[H:[^:]*]]: tensor<7x8xf32>, %[[M:[^:]*]]: tensor<4x8xf32>, %[[IDX:[^:]*]]: tensor<7x1xi32>, %[[EMB:[^:]*]]: tensor<4x8xf32>
// CHECK-NOT:     tensor<7x{{[48]}}x{{[48]}}
// CHECK:         %[[X:.*]] = linalg.generic {{.*}} ins(%[[H]], %[[IDX]] : {{.*}}) outs(%{{.*}} : tensor<7x8xf32>)
// CHECK:           tensor.extract %[[M]]
// CHECK:           arith.mulf
// CHECK:         linalg.generic {{.*}} iterator_types = ["parallel", "parallel", "reduction"]} ins(%[[X]], %[[EMB]] : {{.*}}) outs(%{{.*}} : tensor<7x4xf32>)
// CHECK-NOT:     tensor<7x{{[48]}}x{{[48]}}
func.func @ac_logits_scales_the_tokens(
    %h: tensor<7x8xf32>, %m: tensor<4x8xf32>, %idx: tensor<7x1xi32>,
    %emb: tensor<4x8xf32>, %z0: tensor<7x4xf32>) -> tensor<7x4xf32> {
  %z = moe.ac_logits
      ins(%h, %m, %idx, %emb : tensor<7x8xf32>, tensor<4x8xf32>,
          tensor<7x1xi32>, tensor<4x8xf32>)
      outs(%z0 : tensor<7x4xf32>) -> tensor<7x4xf32>
  return %z : tensor<7x4xf32>
}

// Mix-r: the shares of the places that have an expert, then the sum over them.

// CHECK-LABEL: func @ac_logits_mixes_metrics
// CHECK-SAME:    %[[GATES:[^:]*]]: tensor<7x2xf32>
// CHECK:         linalg.generic {{.*}} ins(%[[GATES]], %{{.*}} : tensor<7x2xf32>, tensor<7x2xi32>)
// CHECK:           arith.select
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<7xf32>)
// CHECK:         linalg.generic {{.*}} iterator_types = ["parallel", "reduction", "parallel"]}
// CHECK:           tensor.extract
func.func @ac_logits_mixes_metrics(
    %gates: tensor<7x2xf32>, %h: tensor<7x8xf32>, %m: tensor<4x8xf32>,
    %idx: tensor<7x2xi32>, %emb: tensor<4x8xf32>, %z0: tensor<7x4xf32>)
    -> tensor<7x4xf32> {
  %z = moe.ac_logits
      ins(%h, %m, %idx, %emb : tensor<7x8xf32>, tensor<4x8xf32>,
          tensor<7x2xi32>, tensor<4x8xf32>)
      gates(%gates : tensor<7x2xf32>) outs(%z0 : tensor<7x4xf32>)
      -> tensor<7x4xf32>
  return %z : tensor<7x4xf32>
}

// Clusters without tokens are not in the mean, and their rows are 1.

// CHECK-LABEL: func @dispersion_weights_e14
// CHECK-SAME:    %[[S:[^:]*]]: tensor<4x8xf32>, %[[COUNT:[^:]*]]: tensor<4xi32>
// CHECK-DAG:     %[[ONE:.*]] = arith.constant 1.0{{.*}} : f32
// CHECK:         %[[W:.*]] = linalg.generic {{.*}} ins(%[[S]] :
// CHECK:           arith.divf
// CHECK:         linalg.generic {{.*}} ins(%[[W]], %[[COUNT]] : {{.*}}) outs(%{{.*}} : tensor<f64>)
// CHECK:           arith.cmpi
// CHECK:         linalg.generic {{.*}} ins(%{{.*}}, %[[COUNT]] : {{.*}}) outs(%{{.*}} : tensor<4x8xf32>)
// CHECK:           arith.select %{{.*}}, %{{.*}}, %[[ONE]]
func.func @dispersion_weights_e14(
    %s: tensor<4x8xf32>, %count: tensor<4xi32>, %m0: tensor<4x8xf32>)
    -> tensor<4x8xf32> {
  %m = moe.dispersion_weights ins(%s, %count : tensor<4x8xf32>, tensor<4xi32>)
      outs(%m0 : tensor<4x8xf32>) {scale = #moe.dispersion_scale<global>}
      -> tensor<4x8xf32>
  return %m : tensor<4x8xf32>
}

// CHECK-LABEL: func @attention_entropy
// CHECK:         math.exp
// CHECK:         math.log
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<1x2xf64>)
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<1x2xf32>)
// CHECK-NOT:     moe.
func.func @attention_entropy(
    %q: tensor<1x2x7x8xf32>, %mask: tensor<1x7xi1>, %mean: tensor<1x2xf32>,
    %rows: tensor<1x2x7xf32>) -> (tensor<1x2xf32>, tensor<1x2x7xf32>) {
  %m, %r = moe.attention_entropy
      ins(%q, %q : tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>)
      query_mask(%mask : tensor<1x7xi1>) key_mask(%mask : tensor<1x7xi1>)
      outs(%mean, %rows : tensor<1x2xf32>, tensor<1x2x7xf32>)
      -> tensor<1x2xf32>, tensor<1x2x7xf32>
  return %m, %r : tensor<1x2xf32>, tensor<1x2x7xf32>
}
