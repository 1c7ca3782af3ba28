// RUN: %moe-opt %s --moe-decompose --canonicalize --cse | FileCheck %s

// What is checked is the shape of the computation and the points where a
// paraphrase would differ; the numbers are compared with the reference elsewhere.

// One contraction in f32 on top of the bias, in the form that contraction
// lowerings recognise.

// CHECK-DAG:   #[[NE:.*]] = affine_map<(d0, d1) -> (d0, d1)>
// CHECK-DAG:   #[[E:.*]] = affine_map<(d0, d1) -> (d1)>
// CHECK-DAG:   #[[ND:.*]] = affine_map<(d0, d1, d2) -> (d0, d2)>
// CHECK-DAG:   #[[ED:.*]] = affine_map<(d0, d1, d2) -> (d1, d2)>
// CHECK-LABEL: func @router_logits
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x8xbf16>, %[[W:[^:]*]]: tensor<4x8xf32>, %[[BIAS:[^:]*]]: tensor<4xf32>, %[[Z0:[^:]*]]: tensor<?x4xf32>
// CHECK:         %[[START:.*]] = linalg.generic {indexing_maps = [#[[E]], #[[NE]]]
// CHECK-SAME:      ins(%[[BIAS]] : tensor<4xf32>) outs(%[[Z0]] : tensor<?x4xf32>)
// CHECK:         linalg.generic {indexing_maps = [#[[ND]], #[[ED]], #{{.*}}], iterator_types = ["parallel", "parallel", "reduction"]}
// CHECK-SAME:      ins(%[[H]], %[[W]] : tensor<?x8xbf16>, tensor<4x8xf32>) outs(%[[START]] : tensor<?x4xf32>)
// CHECK-NEXT:    ^bb0(%[[HE:.*]]: bf16, %[[WE:.*]]: f32, %[[ACC:.*]]: f32):
// CHECK-NEXT:      %[[WIDE:.*]] = arith.extf %[[HE]]
// CHECK-NEXT:      %[[PRODUCT:.*]] = arith.mulf %[[WIDE]], %[[WE]]
// CHECK-NEXT:      %[[SUM:.*]] = arith.addf %[[ACC]], %[[PRODUCT]]
// CHECK-NEXT:      linalg.yield %[[SUM]]
func.func @router_logits(%h: tensor<?x8xbf16>, %w: tensor<4x8xf32>,
                         %bias: tensor<4xf32>, %z0: tensor<?x4xf32>)
    -> tensor<?x4xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<?x8xbf16>, tensor<4x8xf32>)
      bias(%bias : tensor<4xf32>) outs(%z0 : tensor<?x4xf32>) -> tensor<?x4xf32>
  return %z : tensor<?x4xf32>
}

// Without a bias the sum starts at 0; buffers need no more than tensors.

// CHECK-LABEL: func @router_logits_on_buffers
// CHECK-SAME:    %[[Z:[^:,]*]]: memref<?x4xf32>)
// CHECK:         linalg.fill ins(%{{.*}} : f32) outs(%[[Z]] : memref<?x4xf32>)
// CHECK:         linalg.generic
// CHECK-SAME:      iterator_types = ["parallel", "parallel", "reduction"]
// CHECK-SAME:      outs(%[[Z]] : memref<?x4xf32>)
func.func @router_logits_on_buffers(%h: memref<?x8xf32>, %w: memref<4x8xf32>,
                                    %z: memref<?x4xf32>) {
  moe.router_logits ins(%h, %w : memref<?x8xf32>, memref<4x8xf32>)
      outs(%z : memref<?x4xf32>)
  return
}

// The rank of an expert is the number of experts before it, NaN after -inf and
// equal values by index; the choice of rank k is a second reduction. Nothing is
// chosen by masking with -inf (Trap 11).

// CHECK-LABEL: func @topk_renorm_e3
// CHECK-SAME:    %[[Z:[^:]*]]: tensor<?x8xf32>, %[[G0:[^:]*]]: tensor<?x2xf32>, %[[I0:[^:]*]]: tensor<?x2xi64>
// CHECK:         %[[RANK:.*]] = linalg.generic {{.*}} iterator_types = ["parallel", "parallel", "reduction"]
// CHECK-SAME:      ins(%[[Z]], %[[Z]] : tensor<?x8xf32>, tensor<?x8xf32>) outs(%{{.*}} : tensor<?x8xi32>)
// CHECK:         ^bb0(%[[THIS:.*]]: f32, %[[OTHER:.*]]: f32, %[[ACC:.*]]: i32):
// CHECK-DAG:       %[[OTHER_NAN:.*]] = arith.cmpf uno, %[[OTHER]], %[[OTHER]]
// CHECK-DAG:       %[[THIS_NAN:.*]] = arith.cmpf uno, %[[THIS]], %[[THIS]]
// CHECK-DAG:       arith.cmpf olt, %[[THIS]], %[[OTHER]]
// CHECK-DAG:       arith.cmpf oeq, %[[OTHER]], %[[THIS]]
// CHECK-DAG:       arith.andi %[[OTHER_NAN]], %[[THIS_NAN]]
// CHECK:         %[[CHOICE:.*]] = linalg.generic {{.*}} iterator_types = ["parallel", "reduction", "parallel"]
// CHECK-SAME:      ins(%[[RANK]] : tensor<?x8xi32>) outs(%{{.*}} : tensor<?x2xi64>)
// CHECK:         %[[GATES:.*]] = linalg.generic {{.*}} outs(%[[G0]] : tensor<?x2xf32>)
// CHECK:         %[[INDICES:.*]] = linalg.generic {{.*}} outs(%[[I0]] : tensor<?x2xi64>)
// CHECK:         return %[[GATES]], %[[INDICES]]
func.func @topk_renorm_e3(%z: tensor<?x8xf32>, %g0: tensor<?x2xf32>,
                          %i0: tensor<?x2xi64>)
    -> (tensor<?x2xf32>, tensor<?x2xi64>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x8xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi64>)
      -> tensor<?x2xf32>, tensor<?x2xi64>
  return %g, %i : tensor<?x2xf32>, tensor<?x2xi64>
}

// What a masked key holds is selected away, not multiplied by 0 (E11), and a
// row without a visible key has no 0/0.

// CHECK-LABEL: func @softmax_mix_e11
// CHECK-SAME:    %[[Q:[^:]*]]: tensor<1x2x?x8xf32>, %[[K:[^:]*]]: tensor<1x2x?x8xf32>, %[[V:[^:]*]]: tensor<1x?x4xf32>, %[[MASK:[^:]*]]: tensor<1x?xi1>
// CHECK:         %[[DOT:.*]] = linalg.generic {{.*}} ins(%[[Q]], %[[K]] :
// CHECK:         %[[LOGITS:.*]] = linalg.generic {{.*}} ins(%[[DOT]], %[[MASK]] :
// CHECK:           %[[LOGIT:.*]] = arith.select %{{.*}}, %{{.*}}, %[[NEG_INF:.*]] : f32
// CHECK-NEXT:      linalg.yield %[[LOGIT]]
// CHECK:         linalg.generic {{.*}} ins(%[[LOGITS]], %{{.*}}, %[[V]] :
// CHECK:         ^bb0(%[[X:.*]]: f32, %[[WEIGHT:.*]]: f32, %[[VALUE:.*]]: f32, %[[ACC:.*]]: f32):
// CHECK:           %[[HIDDEN:.*]] = arith.cmpf oeq, %[[X]], %[[NEG_INF]]
// CHECK:           %[[SUM:.*]] = arith.select %[[HIDDEN]], %[[ACC]], %{{.*}}
// CHECK-NEXT:      linalg.yield %[[SUM]]
// CHECK:           arith.divf
// CHECK:           arith.select
func.func @softmax_mix_e11(
    %q: tensor<1x2x?x8xf32>, %k: tensor<1x2x?x8xf32>, %v: tensor<1x?x4xf32>,
    %mask: tensor<1x?xi1>, %o: tensor<1x2x?x4xf32>, %l: tensor<1x2x?xf32>)
    -> tensor<1x2x?x4xf32> {
  %r:2 = moe.softmax_mix ins(%q, %k : tensor<1x2x?x8xf32>, tensor<1x2x?x8xf32>)
      values(%v : tensor<1x?x4xf32>) key_mask(%mask : tensor<1x?xi1>)
      outs(%o, %l : tensor<1x2x?x4xf32>, tensor<1x2x?xf32>)
      -> tensor<1x2x?x4xf32>, tensor<1x2x?xf32>
  return %r#0 : tensor<1x2x?x4xf32>
}

// Values of each head: attention.

// CHECK-LABEL: func @softmax_mix_of_each_head
// CHECK-SAME:    %[[Q:[^:]*]]: tensor<1x2x?x8xf32>, %[[V:[^:]*]]: tensor<1x2x?x4xf32>
// CHECK:         linalg.generic {{.*}} ins(%{{.*}}, %{{.*}}, %[[V]] : tensor<1x2x?x?xf32>, tensor<1x2x?x?xf32>, tensor<1x2x?x4xf32>)
func.func @softmax_mix_of_each_head(
    %q: tensor<1x2x?x8xf32>, %v: tensor<1x2x?x4xf32>,
    %o: tensor<1x2x?x4xf32>, %l: tensor<1x2x?xf32>) -> tensor<1x2x?x4xf32> {
  %r:2 = moe.softmax_mix ins(%q, %q : tensor<1x2x?x8xf32>, tensor<1x2x?x8xf32>)
      values(%v : tensor<1x2x?x4xf32>)
      outs(%o, %l : tensor<1x2x?x4xf32>, tensor<1x2x?xf32>)
      -> tensor<1x2x?x4xf32>, tensor<1x2x?xf32>
  return %r#0 : tensor<1x2x?x4xf32>
}

// Rows that the attention has emitted choose the head; those of masked queries
// do not count.

// CHECK-LABEL: func @posterior_with_rows
// CHECK-SAME:    %[[MASK:[^:]*]]: tensor<1x7xi1>, %[[LSE:[^:]*]]: tensor<1x2x7xf32>, %[[ENTROPY:[^:]*]]: tensor<1x2x7xf32>
// CHECK-DAG:     %[[REAL:.*]] = linalg.generic {{.*}} ins(%[[ENTROPY]], %[[MASK]] :
// CHECK-DAG:     linalg.generic {{.*}} ins(%[[LSE]], %[[MASK]] :
// CHECK-DAG:     linalg.generic {{.*}} ins(%[[REAL]] : tensor<1x2x7xf32>) outs(%{{.*}} : tensor<1x2xf32>)
func.func @posterior_with_rows(
    %mask: tensor<1x7xi1>, %row_lse: tensor<1x2x7xf32>,
    %row_entropy: tensor<1x2x7xf32>, %q: tensor<1x2x7x8xf32>,
    %u: tensor<1x7x16xf32>, %e: tensor<1x7x5xf32>, %vp: tensor<1x2x7x16xf32>,
    %p: tensor<1x7x5xf32>, %head: tensor<1xi32>, %l1: tensor<1x1x7xf32>,
    %l2: tensor<1x1x7xf32>) -> (tensor<1x7x5xf32>, tensor<1x1x7xf32>) {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x2x7x8xf32>, tensor<1x2x7x8xf32>,
          tensor<1x7x16xf32>, tensor<1x7x5xf32>)
      means(%vp : tensor<1x2x7x16xf32>)
      query_mask(%mask : tensor<1x7xi1>) key_mask(%mask : tensor<1x7xi1>)
      rows(%row_lse, %row_entropy : tensor<1x2x7xf32>, tensor<1x2x7xf32>)
      outs(%p, %head, %l1, %l2 : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return %r#0, %r#2 : tensor<1x7x5xf32>, tensor<1x1x7xf32>
}

// The literal meaning forms v' = wo v; only the conversion to softmax_mix
// avoids it.

// CHECK-LABEL: func @attention_posterior_forms_the_means
// CHECK-SAME:    %[[V:[^:]*]]: tensor<1x4x7x3xf32>, %[[WO:[^:]*]]: tensor<4x6x3xf32>
// CHECK:         %[[MEANS:.*]] = linalg.generic {{.*}} ins(%[[V]], %[[WO]] : tensor<1x4x7x3xf32>, tensor<4x6x3xf32>) outs(%{{.*}} : tensor<1x4x7x6xf32>)
// CHECK:         linalg.generic {{.*}} ins(%[[MEANS]], %[[MEANS]] :
func.func @attention_posterior_forms_the_means(
    %v: tensor<1x4x7x3xf32>, %wo: tensor<4x6x3xf32>, %q: tensor<1x4x7x8xf32>,
    %u: tensor<1x7x6xf32>, %e: tensor<1x7x5xf32>, %p: tensor<1x7x5xf32>,
    %head: tensor<1xi32>, %l: tensor<1x1x7xf32>) -> tensor<1x7x5xf32> {
  %r:4 = moe.attention_posterior
      ins(%q, %q, %u, %e : tensor<1x4x7x8xf32>, tensor<1x4x7x8xf32>,
          tensor<1x7x6xf32>, tensor<1x7x5xf32>)
      values(%v, %wo : tensor<1x4x7x3xf32>, tensor<4x6x3xf32>)
      outs(%p, %head, %l, %l : tensor<1x7x5xf32>, tensor<1xi32>,
           tensor<1x1x7xf32>, tensor<1x1x7xf32>)
      -> tensor<1x7x5xf32>, tensor<1xi32>, tensor<1x1x7xf32>, tensor<1x1x7xf32>
  return %r#0 : tensor<1x7x5xf32>
}
