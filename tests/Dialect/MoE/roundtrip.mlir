// RUN: %moe-opt %s | %moe-opt | FileCheck %s
// RUN: %moe-opt %s --mlir-print-op-generic | %moe-opt | FileCheck %s

// The smallest form of an op prints no attribute and no optional operand.

// CHECK-LABEL: func @router_logits
// CHECK:         moe.router_logits ins(%{{[^ ]*}}, %{{[^ ]*}} : tensor<?x352xf32>, tensor<16x352xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}} : tensor<?x16xf32>) -> tensor<?x16xf32>
func.func @router_logits(%h: tensor<?x352xf32>, %weight: tensor<16x352xf32>,
                         %init: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %z = moe.router_logits
      ins(%h, %weight : tensor<?x352xf32>, tensor<16x352xf32>)
      outs(%init : tensor<?x16xf32>) -> tensor<?x16xf32>
  return %z : tensor<?x16xf32>
}

// CHECK-LABEL: func @router_logits_with_bias_and_leading_dims
// CHECK:         moe.router_logits ins(%{{[^ ]*}}, %{{[^ ]*}} : tensor<2x?x8xbf16>, tensor<4x8xf16>)
// CHECK-SAME:      bias(%{{[^ ]*}} : tensor<4xf32>) outs(%{{[^ ]*}} : tensor<2x?x4xf32>)
func.func @router_logits_with_bias_and_leading_dims(
    %h: tensor<2x?x8xbf16>, %weight: tensor<4x8xf16>, %bias: tensor<4xf32>,
    %init: tensor<2x?x4xf32>) -> tensor<2x?x4xf32> {
  %z = moe.router_logits
      ins(%h, %weight : tensor<2x?x8xbf16>, tensor<4x8xf16>)
      bias(%bias : tensor<4xf32>)
      outs(%init : tensor<2x?x4xf32>) -> tensor<2x?x4xf32>
  return %z : tensor<2x?x4xf32>
}

// CHECK-LABEL: func @router_logits_on_buffers
// CHECK:         moe.router_logits ins(%{{[^ ]*}}, %{{[^ ]*}} : memref<?x8xf32, strided<[?, 1], offset: ?>>, memref<4x8xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}} : memref<?x4xf32>){{$}}
func.func @router_logits_on_buffers(
    %h: memref<?x8xf32, strided<[?, 1], offset: ?>>, %weight: memref<4x8xf32>,
    %z: memref<?x4xf32>) {
  moe.router_logits
      ins(%h, %weight : memref<?x8xf32, strided<[?, 1], offset: ?>>, memref<4x8xf32>)
      outs(%z : memref<?x4xf32>)
  return
}

// CHECK-LABEL: func @cosine_logits
// CHECK:         moe.cosine_logits ins(%{{[^ ]*}}, %{{[^ ]*}} : tensor<?x352xf32>, tensor<16x352xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}} : tensor<?x16xf32>) -> tensor<?x16xf32>
func.func @cosine_logits(%h: tensor<?x352xf32>, %emb: tensor<16x352xf32>,
                         %init: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %z = moe.cosine_logits
      ins(%h, %emb : tensor<?x352xf32>, tensor<16x352xf32>)
      outs(%init : tensor<?x16xf32>) -> tensor<?x16xf32>
  return %z : tensor<?x16xf32>
}

// CHECK-LABEL: func @cosine_logits_with_everything
// CHECK:         moe.cosine_logits ins(%{{[^ ]*}}, %{{[^ ]*}} : tensor<2x?x352xbf16>, tensor<16x8xf16>)
// CHECK-SAME:      omega(%{{[^ ]*}} : tensor<8x352xf32>) tau(%{{[^ ]*}} : f32)
// CHECK-SAME:      outs(%{{[^ ]*}} : tensor<2x?x16xf32>)
// CHECK-SAME:      {eps = 1.000000e-03 : f64, norm_emb = false, norm_token = false, tau = 3.000000e-01 : f64}
func.func @cosine_logits_with_everything(
    %h: tensor<2x?x352xbf16>, %emb: tensor<16x8xf16>, %omega: tensor<8x352xf32>,
    %tau: f32, %init: tensor<2x?x16xf32>) -> tensor<2x?x16xf32> {
  %z = moe.cosine_logits
      ins(%h, %emb : tensor<2x?x352xbf16>, tensor<16x8xf16>)
      omega(%omega : tensor<8x352xf32>) tau(%tau : f32)
      outs(%init : tensor<2x?x16xf32>)
      {tau = 0.3 : f64, eps = 1.0e-3 : f64, norm_token = false, norm_emb = false}
      -> tensor<2x?x16xf32>
  return %z : tensor<2x?x16xf32>
}

// CHECK-LABEL: func @hyper_router
// CHECK:         moe.hyper_router ins(%{{.*}} : tensor<3xbf16>, tensor<5x3xf32>, tensor<5xf32>, tensor<36x5xf16>, tensor<36xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}}, %{{[^ ]*}} : tensor<4x8xf32>, tensor<4xf32>) -> tensor<4x8xf32>, tensor<4xf32>
func.func @hyper_router(
    %e: tensor<3xbf16>, %w1: tensor<5x3xf32>, %b1: tensor<5xf32>,
    %w2: tensor<36x5xf16>, %b2: tensor<36xf32>, %weight: tensor<4x8xf32>,
    %bias: tensor<4xf32>) -> (tensor<4x8xf32>, tensor<4xf32>) {
  %w, %b = moe.hyper_router
      ins(%e, %w1, %b1, %w2, %b2 : tensor<3xbf16>, tensor<5x3xf32>,
          tensor<5xf32>, tensor<36x5xf16>, tensor<36xf32>)
      outs(%weight, %bias : tensor<4x8xf32>, tensor<4xf32>)
      -> tensor<4x8xf32>, tensor<4xf32>
  return %w, %b : tensor<4x8xf32>, tensor<4xf32>
}

// CHECK-LABEL: func @ac_logits
// CHECK:         moe.ac_logits ins(%{{.*}} : tensor<?x8xf32>, tensor<4x8xf32>, tensor<?x1xi32>, tensor<4x8xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}} : tensor<?x4xf32>) -> tensor<?x4xf32>
func.func @ac_logits(%h: tensor<?x8xf32>, %m: tensor<4x8xf32>,
                     %idx: tensor<?x1xi32>, %init: tensor<?x4xf32>)
    -> tensor<?x4xf32> {
  %z = moe.ac_logits
      ins(%h, %m, %idx, %m : tensor<?x8xf32>, tensor<4x8xf32>, tensor<?x1xi32>,
          tensor<4x8xf32>)
      outs(%init : tensor<?x4xf32>) -> tensor<?x4xf32>
  return %z : tensor<?x4xf32>
}

// CHECK-LABEL: func @ac_logits_with_everything
// CHECK:         moe.ac_logits ins(%{{.*}} : tensor<2x?x8xbf16>, tensor<4x8xf32>, tensor<2x?x3xi64>, tensor<4x8xf16>)
// CHECK-SAME:      gates(%{{[^ ]*}} : tensor<2x?x3xf32>) bias(%{{[^ ]*}} : tensor<4xbf16>)
// CHECK-SAME:      outs(%{{[^ ]*}} : tensor<2x?x4xf32>)
func.func @ac_logits_with_everything(
    %h: tensor<2x?x8xbf16>, %m: tensor<4x8xf32>, %idx: tensor<2x?x3xi64>,
    %emb: tensor<4x8xf16>, %gates: tensor<2x?x3xf32>, %bias: tensor<4xbf16>,
    %init: tensor<2x?x4xf32>) -> tensor<2x?x4xf32> {
  %z = moe.ac_logits
      ins(%h, %m, %idx, %emb : tensor<2x?x8xbf16>, tensor<4x8xf32>,
          tensor<2x?x3xi64>, tensor<4x8xf16>)
      gates(%gates : tensor<2x?x3xf32>) bias(%bias : tensor<4xbf16>)
      outs(%init : tensor<2x?x4xf32>) -> tensor<2x?x4xf32>
  return %z : tensor<2x?x4xf32>
}

// CHECK-LABEL: func @topk_renorm
// CHECK:         moe.topk_renorm ins(%{{[^ ]*}} : tensor<?x64xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}}, %{{[^ ]*}} : tensor<?x8xf32>, tensor<?x8xi32>) -> tensor<?x8xf32>, tensor<?x8xi32>
func.func @topk_renorm(%z: tensor<?x64xf32>, %gates: tensor<?x8xf32>,
                       %indices: tensor<?x8xi32>)
    -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%gates, %indices : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}

// CHECK-LABEL: func @topk_renorm_with_everything
// CHECK:         moe.topk_renorm ins(%{{[^ ]*}} : tensor<2x?x64xbf16>)
// CHECK-SAME:      bias(%{{[^ ]*}} : tensor<64xf32>)
// CHECK-SAME:      forced(%{{[^ ]*}} : tensor<2x?x8xi64>)
// CHECK-SAME:      mask(%{{[^ ]*}} : tensor<2x?xi1>)
// CHECK-SAME:      num_valid(%{{[^ ]*}} : i32)
// CHECK-SAME:      outs(%{{[^ ]*}}, %{{[^ ]*}} : tensor<2x?x8xf32>, tensor<2x?x8xi64>)
// CHECK-SAME:      eps = 1.000000e-03 : f64
// CHECK-SAME:      group_score = #moe.group_score<max>
// CHECK-SAME:      n_group = 8 : i64
// CHECK-SAME:      renorm = false
// CHECK-SAME:      route_scale = 2.500000e+00 : f64
// CHECK-SAME:      score = #moe.score_function<sigmoid>
// CHECK-SAME:      topk_group = 4 : i64
func.func @topk_renorm_with_everything(
    %z: tensor<2x?x64xbf16>, %bias: tensor<64xf32>, %forced: tensor<2x?x8xi64>,
    %mask: tensor<2x?xi1>, %num_valid: i32, %gates: tensor<2x?x8xf32>,
    %indices: tensor<2x?x8xi64>) -> (tensor<2x?x8xf32>, tensor<2x?x8xi64>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<2x?x64xbf16>)
      bias(%bias : tensor<64xf32>) forced(%forced : tensor<2x?x8xi64>)
      mask(%mask : tensor<2x?xi1>) num_valid(%num_valid : i32)
      outs(%gates, %indices : tensor<2x?x8xf32>, tensor<2x?x8xi64>)
      {score = #moe.score_function<sigmoid>, renorm = false,
       eps = 1.0e-3 : f64, route_scale = 2.5 : f64, n_group = 8 : i64,
       topk_group = 4 : i64, group_score = #moe.group_score<max>}
      -> tensor<2x?x8xf32>, tensor<2x?x8xi64>
  return %g, %i : tensor<2x?x8xf32>, tensor<2x?x8xi64>
}

// One token and no leading dim; k may equal the number of experts (E9).

// CHECK-LABEL: func @topk_renorm_e9
// CHECK:         moe.topk_renorm ins(%{{[^ ]*}} : tensor<4xf16>)
// CHECK-SAME:      kind = #moe.score_kind<probs>
func.func @topk_renorm_e9(%p: tensor<4xf16>, %gates: tensor<4xf32>,
                          %indices: tensor<4xi32>)
    -> (tensor<4xf32>, tensor<4xi32>) {
  %g, %i = moe.topk_renorm ins(%p : tensor<4xf16>)
      outs(%gates, %indices : tensor<4xf32>, tensor<4xi32>)
      {kind = #moe.score_kind<probs>} -> tensor<4xf32>, tensor<4xi32>
  return %g, %i : tensor<4xf32>, tensor<4xi32>
}

// CHECK-LABEL: func @topk_renorm_on_buffers
// CHECK:         moe.topk_renorm ins(%{{[^ ]*}} : memref<?x64xf32>) mask(%{{[^ ]*}} : memref<?xi1>)
// CHECK-SAME:      outs(%{{[^ ]*}}, %{{[^ ]*}} : memref<?x8xf32>, memref<?x8xi32>)
func.func @topk_renorm_on_buffers(%z: memref<?x64xf32>, %mask: memref<?xi1>,
                                  %gates: memref<?x8xf32>,
                                  %indices: memref<?x8xi32>) {
  moe.topk_renorm ins(%z : memref<?x64xf32>) mask(%mask : memref<?xi1>)
      outs(%gates, %indices : memref<?x8xf32>, memref<?x8xi32>)
  return
}

// CHECK-LABEL: func @similarity_inform
// CHECK:         moe.similarity_inform ins(%{{[^ ]*}}, %{{[^ ]*}} : tensor<2x?x352xf32>, tensor<2x?x16xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}}, %{{[^ ]*}} : tensor<2x?x16xf32>, tensor<2x?xf32>) -> tensor<2x?x16xf32>, tensor<2x?xf32>
func.func @similarity_inform(%u: tensor<2x?x352xf32>, %e: tensor<2x?x16xf32>,
                             %p: tensor<2x?x16xf32>, %lse: tensor<2x?xf32>)
    -> (tensor<2x?x16xf32>, tensor<2x?xf32>) {
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x?x352xf32>, tensor<2x?x16xf32>)
      outs(%p, %lse : tensor<2x?x16xf32>, tensor<2x?xf32>)
      -> tensor<2x?x16xf32>, tensor<2x?xf32>
  return %r#0, %r#1 : tensor<2x?x16xf32>, tensor<2x?xf32>
}

// CHECK-LABEL: func @similarity_inform_with_everything
// CHECK:         moe.similarity_inform ins(
// CHECK-SAME:      keys(%{{[^ ]*}} : tensor<2x9x6xf32>)
// CHECK-SAME:      ws(%{{[^ ]*}} : tensor<8x6xf32>)
// CHECK-SAME:      mask(%{{[^ ]*}} : tensor<2x9xi1>)
// CHECK-SAME:      query_mask(%{{[^ ]*}} : tensor<2x4xi1>)
// CHECK-SAME:      tau(%{{[^ ]*}} : f32)
// CHECK-SAME:      origin(%{{[^ ]*}} : index)
// CHECK-SAME:      precision = #moe.precision<tf32>
// CHECK-SAME:      visibility = #moe.visibility<causal, window = 3>
func.func @similarity_inform_with_everything(
    %u: tensor<2x4x8xf32>, %e: tensor<2x9x5xf32>, %uk: tensor<2x9x6xf32>,
    %ws: tensor<8x6xf32>, %mask: tensor<2x9xi1>, %query_mask: tensor<2x4xi1>,
    %tau: f32, %origin: index, %p: tensor<2x4x5xf32>, %lse: tensor<2x4xf32>)
    -> (tensor<2x4x5xf32>, tensor<2x4xf32>) {
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x4x8xf32>, tensor<2x9x5xf32>)
      keys(%uk : tensor<2x9x6xf32>) ws(%ws : tensor<8x6xf32>)
      mask(%mask : tensor<2x9xi1>) query_mask(%query_mask : tensor<2x4xi1>)
      tau(%tau : f32) origin(%origin : index)
      outs(%p, %lse : tensor<2x4x5xf32>, tensor<2x4xf32>)
      {precision = #moe.precision<tf32>, visibility = #moe.visibility<causal, window = 3>}
      -> tensor<2x4x5xf32>, tensor<2x4xf32>
  return %r#0, %r#1 : tensor<2x4x5xf32>, tensor<2x4xf32>
}

// CHECK-LABEL: func @similarity_inform_on_buffers
// CHECK:         moe.similarity_inform ins(%{{[^ ]*}}, %{{[^ ]*}} : memref<1x?x8xf32>, memref<1x?x4xf32>)
// CHECK-SAME:      restrict = #moe.restrict<entropy>, tau = 2.000000e+00 : f64
func.func @similarity_inform_on_buffers(
    %u: memref<1x?x8xf32>, %e: memref<1x?x4xf32>, %p: memref<1x?x4xf32>,
    %lse: memref<1x?xf32>) {
  moe.similarity_inform ins(%u, %e : memref<1x?x8xf32>, memref<1x?x4xf32>)
      outs(%p, %lse : memref<1x?x4xf32>, memref<1x?xf32>)
      {restrict = #moe.restrict<entropy>, tau = 2.0 : f64}
  return
}

// CHECK-LABEL: func @attention_posterior
// CHECK:         moe.attention_posterior ins(
// CHECK-SAME:      means(%{{[^ ]*}} : tensor<1x4x?x64xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}}, %{{[^ ]*}}, %{{[^ ]*}}, %{{[^ ]*}} : tensor<1x?x8xf32>, tensor<1xi32>, tensor<1x1x?xf32>, tensor<1x1x?xf32>) ->
func.func @attention_posterior(
    %q: tensor<1x4x?x16xf32>, %k: tensor<1x4x?x16xf32>, %u: tensor<1x?x64xf32>,
    %e: tensor<1x?x8xf32>, %vp: tensor<1x4x?x64xf32>, %p: tensor<1x?x8xf32>,
    %head: tensor<1xi32>, %l1: tensor<1x1x?xf32>, %l2: tensor<1x1x?xf32>)
    -> tensor<1x?x8xf32> {
  %r:4 = moe.attention_posterior
      ins(%q, %k, %u, %e : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>,
          tensor<1x?x64xf32>, tensor<1x?x8xf32>)
      means(%vp : tensor<1x4x?x64xf32>)
      outs(%p, %head, %l1, %l2 : tensor<1x?x8xf32>, tensor<1xi32>,
           tensor<1x1x?xf32>, tensor<1x1x?xf32>)
      -> tensor<1x?x8xf32>, tensor<1xi32>, tensor<1x1x?xf32>, tensor<1x1x?xf32>
  return %r#0 : tensor<1x?x8xf32>
}

// CHECK-LABEL: func @attention_posterior_with_everything
// CHECK:         moe.attention_posterior ins(
// CHECK-SAME:      values(%{{[^ ]*}}, %{{[^ ]*}} : tensor<2x4x9x5xf32>, tensor<4x6x5xf32>)
// CHECK-SAME:      bias(%{{[^ ]*}} : tensor<1x4x7x9xbf16>)
// CHECK-SAME:      head_prior(%{{[^ ]*}} : tensor<2x7x4xf32>)
// CHECK-SAME:      query_mask(%{{[^ ]*}} : tensor<2x7xi1>) key_mask(%{{[^ ]*}} : tensor<2x9xi1>)
// CHECK-SAME:      sigma(%{{[^ ]*}} : f32)
// CHECK-SAME:      head_mode = #moe.head_mode<all>
// CHECK-SAME:      scale = 5.000000e-01 : f64
// CHECK-SAME:      visibility = #moe.visibility<causal, window = 4, exclude_self>
func.func @attention_posterior_with_everything(
    %q: tensor<2x4x7x3xf32>, %k: tensor<2x4x9x3xf32>, %u: tensor<2x7x6xf32>,
    %e: tensor<2x9x8xf32>, %v: tensor<2x4x9x5xf32>, %wo: tensor<4x6x5xf32>,
    %bias: tensor<1x4x7x9xbf16>, %pi: tensor<2x7x4xf32>, %query_mask: tensor<2x7xi1>, %key_mask: tensor<2x9xi1>,
    %sigma: f32, %p: tensor<2x7x8xf32>, %head: tensor<2xi32>,
    %l1: tensor<2x4x7xf32>, %l2: tensor<2x4x7xf32>) -> tensor<2x7x8xf32> {
  %r:4 = moe.attention_posterior
      ins(%q, %k, %u, %e : tensor<2x4x7x3xf32>, tensor<2x4x9x3xf32>,
          tensor<2x7x6xf32>, tensor<2x9x8xf32>)
      values(%v, %wo : tensor<2x4x9x5xf32>, tensor<4x6x5xf32>)
      bias(%bias : tensor<1x4x7x9xbf16>) head_prior(%pi : tensor<2x7x4xf32>)
      query_mask(%query_mask : tensor<2x7xi1>) key_mask(%key_mask : tensor<2x9xi1>)
      sigma(%sigma : f32)
      outs(%p, %head, %l1, %l2 : tensor<2x7x8xf32>, tensor<2xi32>,
           tensor<2x4x7xf32>, tensor<2x4x7xf32>)
      {head_mode = #moe.head_mode<all>, scale = 0.5 : f64,
       visibility = #moe.visibility<causal, window = 4, exclude_self>}
      -> tensor<2x7x8xf32>, tensor<2xi32>, tensor<2x4x7xf32>, tensor<2x4x7xf32>
  return %r#0 : tensor<2x7x8xf32>
}

// CHECK-LABEL: func @attention_posterior_on_buffers
// CHECK:         moe.attention_posterior ins(
// CHECK-SAME:      head = 3 : i64, head_mode = #moe.head_mode<fixed>, head_scope = #moe.head_scope<batch>
func.func @attention_posterior_on_buffers(
    %q: memref<1x4x?x16xf32>, %k: memref<1x4x?x16xf32>, %u: memref<1x?x64xf32>,
    %e: memref<1x?x8xf32>, %vp: memref<1x4x?x64xf32>, %p: memref<1x?x8xf32>,
    %head: memref<1xi32>, %l1: memref<1x1x?xf32>, %l2: memref<1x1x?xf32>) {
  moe.attention_posterior
      ins(%q, %k, %u, %e : memref<1x4x?x16xf32>, memref<1x4x?x16xf32>,
          memref<1x?x64xf32>, memref<1x?x8xf32>)
      means(%vp : memref<1x4x?x64xf32>)
      outs(%p, %head, %l1, %l2 : memref<1x?x8xf32>, memref<1xi32>,
           memref<1x1x?xf32>, memref<1x1x?xf32>)
      {head_mode = #moe.head_mode<fixed>, head = 3 : i64,
       head_scope = #moe.head_scope<batch>}
  return
}

// CHECK-LABEL: func @attention_entropy
// CHECK:         moe.attention_entropy ins(%{{.*}} : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}}, %{{[^ ]*}} : tensor<1x4xf32>, tensor<1x4x?xf32>) -> tensor<1x4xf32>, tensor<1x4x?xf32>
func.func @attention_entropy(
    %q: tensor<1x4x?x16xf32>, %k: tensor<1x4x?x16xf32>, %mean: tensor<1x4xf32>,
    %rows: tensor<1x4x?xf32>) -> (tensor<1x4xf32>, tensor<1x4x?xf32>) {
  %m, %r = moe.attention_entropy
      ins(%q, %k : tensor<1x4x?x16xf32>, tensor<1x4x?x16xf32>)
      outs(%mean, %rows : tensor<1x4xf32>, tensor<1x4x?xf32>)
      -> tensor<1x4xf32>, tensor<1x4x?xf32>
  return %m, %r : tensor<1x4xf32>, tensor<1x4x?xf32>
}

// CHECK-LABEL: func @attention_entropy_with_everything
// CHECK:         moe.attention_entropy ins(%{{.*}} : tensor<2x4x3x?xbf16>, tensor<2x4x9x?xbf16>)
// CHECK-SAME:      bias(%{{[^ ]*}} : tensor<1x4x3x9xf16>) query_mask(%{{[^ ]*}} : tensor<2x3xi1>) key_mask(%{{[^ ]*}} : tensor<2x9xi1>)
// CHECK-SAME:      {precision = #moe.precision<tf32>, scale = 5.000000e-01 : f64, visibility = #moe.visibility<causal, window = 4, exclude_self>}
func.func @attention_entropy_with_everything(
    %q: tensor<2x4x3x?xbf16>, %k: tensor<2x4x9x?xbf16>,
    %bias: tensor<1x4x3x9xf16>, %query_mask: tensor<2x3xi1>,
    %key_mask: tensor<2x9xi1>, %mean: tensor<2x4xf32>,
    %rows: tensor<2x4x3xf32>) -> tensor<2x4xf32> {
  %m, %r = moe.attention_entropy
      ins(%q, %k : tensor<2x4x3x?xbf16>, tensor<2x4x9x?xbf16>)
      bias(%bias : tensor<1x4x3x9xf16>)
      query_mask(%query_mask : tensor<2x3xi1>) key_mask(%key_mask : tensor<2x9xi1>)
      outs(%mean, %rows : tensor<2x4xf32>, tensor<2x4x3xf32>)
      {scale = 0.5 : f64, precision = #moe.precision<tf32>,
       visibility = #moe.visibility<causal, window = 4, exclude_self>}
      -> tensor<2x4xf32>, tensor<2x4x3xf32>
  return %m : tensor<2x4xf32>
}

// CHECK-LABEL: func @softmax_mix
// CHECK:         moe.softmax_mix ins(%{{[^ ]*}}, %{{[^ ]*}} : tensor<1x2x?x64xf32>, tensor<1x2x?x64xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}} : tensor<1x2x?xf32>) -> tensor<1x2x?xf32>
func.func @softmax_mix(%q: tensor<1x2x?x64xf32>, %k: tensor<1x2x?x64xf32>,
                       %lse: tensor<1x2x?xf32>) -> tensor<1x2x?xf32> {
  %l = moe.softmax_mix ins(%q, %k : tensor<1x2x?x64xf32>, tensor<1x2x?x64xf32>)
      outs(%lse : tensor<1x2x?xf32>) -> tensor<1x2x?xf32>
  return %l : tensor<1x2x?xf32>
}

// CHECK-LABEL: func @softmax_mix_with_everything
// CHECK:         moe.softmax_mix ins(
// CHECK-SAME:      values(%{{[^ ]*}} : tensor<1x9x4xf32>)
// CHECK-SAME:      key_bias(%{{[^ ]*}} : tensor<1x2x9xf32>)
// CHECK-SAME:      bias(%{{[^ ]*}} : tensor<1x1x7x9xf16>)
// CHECK-SAME:      query_mask(%{{[^ ]*}} : tensor<1x7xi1>)
// CHECK-SAME:      key_mask(%{{[^ ]*}} : tensor<1x9xi1>)
// CHECK-SAME:      levels(%{{[^ ]*}}, %{{[^ ]*}} : tensor<1x7xf32>, tensor<1x9xf32>)
// CHECK-SAME:      origin(%{{[^ ]*}} : index)
// CHECK-SAME:      scale = 1.250000e-01 : f64
// CHECK-SAME:      visibility = #moe.visibility<causal, window = 2, exclude_self>, with_entropy = true
func.func @softmax_mix_with_everything(
    %q: tensor<1x2x7x3xbf16>, %k: tensor<1x2x9x3xf32>, %v: tensor<1x9x4xf32>,
    %key_bias: tensor<1x2x9xf32>, %bias: tensor<1x1x7x9xf16>,
    %query_mask: tensor<1x7xi1>, %key_mask: tensor<1x9xi1>,
    %query_level: tensor<1x7xf32>, %key_level: tensor<1x9xf32>, %origin: index,
    %mixed: tensor<1x2x7x4xf32>, %lse: tensor<1x2x7xf32>,
    %entropy: tensor<1x2x7xf32>) -> tensor<1x2x7x4xf32> {
  %r:3 = moe.softmax_mix ins(%q, %k : tensor<1x2x7x3xbf16>, tensor<1x2x9x3xf32>)
      values(%v : tensor<1x9x4xf32>) key_bias(%key_bias : tensor<1x2x9xf32>)
      bias(%bias : tensor<1x1x7x9xf16>) query_mask(%query_mask : tensor<1x7xi1>)
      key_mask(%key_mask : tensor<1x9xi1>)
      levels(%query_level, %key_level : tensor<1x7xf32>, tensor<1x9xf32>)
      origin(%origin : index)
      outs(%mixed, %lse, %entropy : tensor<1x2x7x4xf32>, tensor<1x2x7xf32>,
           tensor<1x2x7xf32>)
      {scale = 0.125 : f64,
       visibility = #moe.visibility<causal, window = 2, exclude_self>,
       with_entropy = true}
      -> tensor<1x2x7x4xf32>, tensor<1x2x7xf32>, tensor<1x2x7xf32>
  return %r#0 : tensor<1x2x7x4xf32>
}

// CHECK-LABEL: func @softmax_mix_self
// CHECK:         moe.softmax_mix_self ins(%{{[^)]*}}) mask(%{{[^)]*}}) level(%{{[^)]*}}) outs(%{{[^)]*}})
// CHECK-SAME:      {scale = 2.500000e-01 : f64, visibility = #moe.visibility<window = 2, exclude_self>}
func.func @softmax_mix_self(%u: tensor<2x1x7x8xbf16>, %v: tensor<2x7x4xf32>,
    %mask: tensor<2x7xi1>, %level: tensor<2x7xf32>, %mixed: tensor<2x1x7x4xf32>,
    %lse: tensor<2x1x7xf32>) -> tensor<2x1x7x4xf32> {
  %r:2 = moe.softmax_mix_self ins(%u, %v : tensor<2x1x7x8xbf16>, tensor<2x7x4xf32>)
      mask(%mask : tensor<2x7xi1>) level(%level : tensor<2x7xf32>)
      outs(%mixed, %lse : tensor<2x1x7x4xf32>, tensor<2x1x7xf32>)
      {scale = 0.25 : f64, visibility = #moe.visibility<window = 2, exclude_self>}
      -> tensor<2x1x7x4xf32>, tensor<2x1x7xf32>
  return %r#0 : tensor<2x1x7x4xf32>
}

// CHECK-LABEL: func @softmax_mix_on_buffers
// CHECK:         moe.softmax_mix ins(%{{[^ ]*}}, %{{[^ ]*}} : memref<?x2x?x?xf32>, memref<?x2x?x?xf32>)
// CHECK-SAME:      values(%{{[^ ]*}} : memref<?x?x16xf32>)
func.func @softmax_mix_on_buffers(
    %q: memref<?x2x?x?xf32>, %k: memref<?x2x?x?xf32>, %v: memref<?x?x16xf32>,
    %mixed: memref<?x2x?x16xf32>, %lse: memref<?x2x?xf32>) {
  moe.softmax_mix ins(%q, %k : memref<?x2x?x?xf32>, memref<?x2x?x?xf32>)
      values(%v : memref<?x?x16xf32>)
      outs(%mixed, %lse : memref<?x2x?x16xf32>, memref<?x2x?xf32>)
  return
}

// CHECK-LABEL: func @mad_dispersion
// CHECK:         moe.mad_dispersion ins(%{{[^ ]*}}, %{{[^ ]*}} : tensor<?x512xf16>, tensor<?xi64>)
// CHECK-SAME:      mask(%{{[^ ]*}} : tensor<?xi1>)
// CHECK-SAME:      measure = #moe.dispersion_measure<pairwise>
func.func @mad_dispersion(
    %h: tensor<?x512xf16>, %assign: tensor<?xi64>, %mask: tensor<?xi1>,
    %s: tensor<16x512xf32>, %mean: tensor<16x512xf32>, %count: tensor<16xi32>)
    -> tensor<16x512xf32> {
  %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x512xf16>, tensor<?xi64>)
      mask(%mask : tensor<?xi1>)
      outs(%s, %mean, %count : tensor<16x512xf32>, tensor<16x512xf32>,
           tensor<16xi32>) {measure = #moe.dispersion_measure<pairwise>}
      -> tensor<16x512xf32>, tensor<16x512xf32>, tensor<16xi32>
  return %r#0 : tensor<16x512xf32>
}

// CHECK-LABEL: func @mad_dispersion_on_buffers
// CHECK:         moe.mad_dispersion ins(%{{[^ ]*}}, %{{[^ ]*}} : memref<?x?xf32>, memref<?xi32>)
// CHECK-SAME:      measure = #moe.dispersion_measure<variance>
func.func @mad_dispersion_on_buffers(
    %h: memref<?x?xf32>, %assign: memref<?xi32>, %s: memref<?x?xf32>,
    %mean: memref<?x?xf32>, %count: memref<?xi32>) {
  moe.mad_dispersion ins(%h, %assign : memref<?x?xf32>, memref<?xi32>)
      outs(%s, %mean, %count : memref<?x?xf32>, memref<?x?xf32>, memref<?xi32>)
      {measure = #moe.dispersion_measure<variance>}
  return
}

// CHECK-LABEL: func @dispersion_weights
// CHECK:         moe.dispersion_weights ins(%{{.*}} : tensor<4x8xf32>, tensor<4xi32>)
// CHECK-SAME:      outs(%{{[^ ]*}} : tensor<4x8xf32>) -> tensor<4x8xf32>
// CHECK:         moe.dispersion_weights ins(%{{.*}} : tensor<4x8xf32>, tensor<4xi64>)
// CHECK-SAME:      {clamp = 5.000000e+00 : f64, eps = 3.500000e-01 : f64, include_empty = true, scale = #moe.dispersion_scale<global>}
func.func @dispersion_weights(%s: tensor<4x8xf32>, %count: tensor<4xi32>,
                              %wide: tensor<4xi64>, %init: tensor<4x8xf32>)
    -> (tensor<4x8xf32>, tensor<4x8xf32>) {
  %m = moe.dispersion_weights ins(%s, %count : tensor<4x8xf32>, tensor<4xi32>)
      outs(%init : tensor<4x8xf32>) -> tensor<4x8xf32>
  %n = moe.dispersion_weights ins(%s, %wide : tensor<4x8xf32>, tensor<4xi64>)
      outs(%init : tensor<4x8xf32>)
      {eps = 0.35 : f64, clamp = 5.0 : f64, include_empty = true,
       scale = #moe.dispersion_scale<global>} -> tensor<4x8xf32>
  return %m, %n : tensor<4x8xf32>, tensor<4x8xf32>
}

// CHECK-LABEL: func @adjacency_gate
// CHECK:         moe.adjacency_gate ins(%{{[^ ]*}}, %{{[^ ]*}} : tensor<3x?x16xf32>, tensor<16x16xf32>)
// CHECK-SAME:      cold_start = #moe.cold_start<base>, threshold = 5.000000e-02 : f64
func.func @adjacency_gate(%p: tensor<3x?x16xf32>, %a: tensor<16x16xf32>,
                          %init: tensor<3x?x16xf32>) -> tensor<3x?x16xf32> {
  %g = moe.adjacency_gate ins(%p, %a : tensor<3x?x16xf32>, tensor<16x16xf32>)
      outs(%init : tensor<3x?x16xf32>)
      {threshold = 0.05 : f64, cold_start = #moe.cold_start<base>}
      -> tensor<3x?x16xf32>
  return %g : tensor<3x?x16xf32>
}

// CHECK-LABEL: func @adjacency_gate_on_buffers
// CHECK:         moe.adjacency_gate ins(%{{[^ ]*}}, %{{[^ ]*}} : memref<?x?xf32>, memref<?x?xf32>) outs(%{{[^ ]*}} : memref<?x?xf32>){{$}}
func.func @adjacency_gate_on_buffers(%p: memref<?x?xf32>, %a: memref<?x?xf32>,
                                     %g: memref<?x?xf32>) {
  moe.adjacency_gate ins(%p, %a : memref<?x?xf32>, memref<?x?xf32>)
      outs(%g : memref<?x?xf32>)
  return
}

// CHECK-LABEL: func @adjacency_update
// CHECK:         moe.adjacency_update ins(%{{[^ ]*}}, %{{[^ ]*}} : tensor<16x16xf32>, tensor<?x2xi64>)
// CHECK-SAME:      mask(%{{[^ ]*}} : tensor<?xi1>)
// CHECK-SAME:      beta = 5.000000e-01 : f64, diagonal = false, norm = #moe.adjacency_norm<col>
func.func @adjacency_update(%a: tensor<16x16xf32>, %indices: tensor<?x2xi64>,
                            %mask: tensor<?xi1>, %init: tensor<16x16xf32>)
    -> tensor<16x16xf32> {
  %new = moe.adjacency_update
      ins(%a, %indices : tensor<16x16xf32>, tensor<?x2xi64>)
      mask(%mask : tensor<?xi1>) outs(%init : tensor<16x16xf32>)
      {beta = 0.5 : f64, norm = #moe.adjacency_norm<col>, diagonal = false}
      -> tensor<16x16xf32>
  return %new : tensor<16x16xf32>
}

// CHECK-LABEL: func @adjacency_update_on_buffers
// CHECK:         moe.adjacency_update ins(%{{[^ ]*}}, %{{[^ ]*}} : memref<16x16xf32>, memref<?x2xi32>)
// CHECK-SAME:      norm = #moe.adjacency_norm<eq7>
func.func @adjacency_update_on_buffers(
    %a: memref<16x16xf32>, %indices: memref<?x2xi32>, %new: memref<16x16xf32>) {
  moe.adjacency_update ins(%a, %indices : memref<16x16xf32>, memref<?x2xi32>)
      outs(%new : memref<16x16xf32>) {norm = #moe.adjacency_norm<eq7>}
  return
}

// CHECK-LABEL: func @co_selections
// CHECK:         moe.co_selections ins(%{{[^ ]*}} : tensor<?x2xi64>)
// CHECK-SAME:      mask(%{{[^ ]*}} : tensor<?xi1>)
// CHECK-SAME:      outs(%{{[^ ]*}} : tensor<16x16xi32>) -> tensor<16x16xi32>
func.func @co_selections(%indices: tensor<?x2xi64>, %mask: tensor<?xi1>,
                         %before: tensor<16x16xi32>) -> tensor<16x16xi32> {
  %counts = moe.co_selections ins(%indices : tensor<?x2xi64>)
      mask(%mask : tensor<?xi1>) outs(%before : tensor<16x16xi32>)
      -> tensor<16x16xi32>
  return %counts : tensor<16x16xi32>
}

// CHECK-LABEL: func @co_selections_on_buffers
// CHECK:         moe.co_selections ins(%{{[^ ]*}} : memref<?x2xi32>) outs(%{{[^ ]*}} : memref<?x?xi32>){{$}}
func.func @co_selections_on_buffers(%indices: memref<?x2xi32>, %counts: memref<?x?xi32>) {
  moe.co_selections ins(%indices : memref<?x2xi32>) outs(%counts : memref<?x?xi32>)
  return
}
