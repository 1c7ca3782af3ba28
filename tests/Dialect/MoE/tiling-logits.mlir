// RUN: %moe-opt %s --transform-interpreter --canonicalize --cse | FileCheck %s

// Tokens and experts are cut; the features, and what lies along them, are whole.

// CHECK-LABEL: func @cosine_logits
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x352xf32>, %[[EMB:[^:]*]]: tensor<64x8xf32>, %[[OMEGA:[^:]*]]: tensor<8x352xf32>
// CHECK:         scf.forall
// CHECK-DAG:       %[[TOKENS:.*]] = tensor.extract_slice %[[H]]
// CHECK-DAG:       %[[EXPERTS:.*]] = tensor.extract_slice %[[EMB]][%{{.*}}, 0] [16, 8]
// CHECK:           moe.cosine_logits ins(%[[TOKENS]], %[[EXPERTS]] : {{.*}}) omega(%[[OMEGA]] : {{.*}}) outs(%{{.*}} : tensor<?x16xf32>)
func.func @cosine_logits(%h: tensor<?x352xf32>, %emb: tensor<64x8xf32>,
                         %omega: tensor<8x352xf32>, %z0: tensor<?x64xf32>)
    -> tensor<?x64xf32> {
  %z = moe.cosine_logits ins(%h, %emb : tensor<?x352xf32>, tensor<64x8xf32>)
      omega(%omega : tensor<8x352xf32>) outs(%z0 : tensor<?x64xf32>)
      -> tensor<?x64xf32>
  return %z : tensor<?x64xf32>
}

// The previous experts are absolute: the metric stays whole where the experts
// of this layer are cut.

// CHECK-LABEL: func @ac_logits
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x352xf32>, %[[M:[^:]*]]: tensor<64x352xf32>, %[[IDX:[^:]*]]: tensor<?x2xi32>, %[[EMB:[^:]*]]: tensor<64x352xf32>, %[[GATES:[^:]*]]: tensor<?x2xf32>
// CHECK:         scf.forall
// CHECK-DAG:       %[[TOKENS:.*]] = tensor.extract_slice %[[H]]
// CHECK-DAG:       %[[BEFORE:.*]] = tensor.extract_slice %[[IDX]][%{{.*}}, 0] [%{{.*}}, 2]
// CHECK-DAG:       %[[SHARES:.*]] = tensor.extract_slice %[[GATES]][%{{.*}}, 0] [%{{.*}}, 2]
// CHECK-DAG:       %[[EXPERTS:.*]] = tensor.extract_slice %[[EMB]][%{{.*}}, 0] [16, 352]
// CHECK:           moe.ac_logits ins(%[[TOKENS]], %[[M]], %[[BEFORE]], %[[EXPERTS]] : {{.*}}) gates(%[[SHARES]] : {{.*}}) outs(%{{.*}} : tensor<?x16xf32>)
func.func @ac_logits(%h: tensor<?x352xf32>, %m: tensor<64x352xf32>,
                     %idx: tensor<?x2xi32>, %emb: tensor<64x352xf32>,
                     %gates: tensor<?x2xf32>, %z0: tensor<?x64xf32>)
    -> tensor<?x64xf32> {
  %z = moe.ac_logits
      ins(%h, %m, %idx, %emb : tensor<?x352xf32>, tensor<64x352xf32>,
          tensor<?x2xi32>, tensor<64x352xf32>)
      gates(%gates : tensor<?x2xf32>) outs(%z0 : tensor<?x64xf32>)
      -> tensor<?x64xf32>
  return %z : tensor<?x64xf32>
}

// The mean spans the queries of a head: sequences and heads are cut.

// CHECK-LABEL: func @attention_entropy
// CHECK:         scf.forall (%{{.*}}, %{{.*}}) in (3, 4)
// CHECK:           moe.attention_entropy ins(%{{.*}} : tensor<1x1x?x16xf32>, tensor<1x1x?x16xf32>)
// CHECK-SAME:        outs(%{{.*}} : tensor<1x1xf32>, tensor<1x1x?xf32>)
func.func @attention_entropy(
    %q: tensor<3x4x?x16xf32>, %mean: tensor<3x4xf32>, %rows: tensor<3x4x?xf32>)
    -> tensor<3x4xf32> {
  %m, %r = moe.attention_entropy
      ins(%q, %q : tensor<3x4x?x16xf32>, tensor<3x4x?x16xf32>)
      outs(%mean, %rows : tensor<3x4xf32>, tensor<3x4x?xf32>)
      -> tensor<3x4xf32>, tensor<3x4x?xf32>
  return %m : tensor<3x4xf32>
}

module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %cosine = transform.structured.match ops{["moe.cosine_logits"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_forall %cosine tile_sizes [32, 16]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %metric = transform.structured.match ops{["moe.ac_logits"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_forall %metric tile_sizes [32, 16]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    %entropy = transform.structured.match ops{["moe.attention_entropy"]} in %root
        : (!transform.any_op) -> !transform.any_op
    transform.structured.tile_using_forall %entropy tile_sizes [1, 1]
        : (!transform.any_op) -> (!transform.any_op, !transform.any_op)
    transform.yield
  }
}
