// RUN: %moe-opt %s | %moe-opt | FileCheck %s
// RUN: %moe-opt %s --mlir-print-op-generic | %moe-opt | FileCheck %s
// RUN: %moe-opt %s --moe-tile-and-fuse="tile-size=32" --canonicalize --cse | FileCheck %s --check-prefix=TILED

// Every clause of a sweep; tiles move the origin, and hold the keys whole.

// CHECK-LABEL: func @dq
// CHECK:         moe.softmax_mix_backward_dq ins(%{{[^)]*}}) values(%{{[^)]*}}) key_bias(%{{[^)]*}}) bias(%{{[^)]*}})
// CHECK-SAME:      query_mask(%{{[^)]*}}) key_mask(%{{[^)]*}}) levels(%{{[^)]*}}) origin(%{{[^)]*}}) outs(%{{[^)]*}})
// CHECK-SAME:      {scale = 2.500000e-01 : f64, visibility = #moe.visibility<causal, window = 7, exclude_self>, with_dbias = true, with_sums = true}

// TILED-LABEL: func @dq
// TILED-SAME:    %[[ORIGIN:[a-z0-9]*]]: index
// TILED:         scf.forall (%{{.*}}, %{{.*}}, %[[ROW:[a-z0-9]*]]) = (0, 0, 0) to (2, 3, 128) step (1, 1, 32)
// TILED:           %[[MOVED:.*]] = affine.apply #{{[a-z0-9]*}}()[%[[ORIGIN]], %[[ROW]]]
// TILED:           moe.softmax_mix_backward_dq ins(%{{.*}}, %{{.*}} : tensor<1x1x32x8xf32>, tensor<1x1x96x8xf32>, tensor<1x1x32xf32>, tensor<1x1x32xf32>)
// TILED-SAME:        bias(%{{.*}} : tensor<1x1x32x96xf32>)
// TILED-SAME:        origin(%[[MOVED]] : index)
func.func @dq(%q: tensor<2x3x128x8xf32>, %k: tensor<2x3x96x8xf32>,
    %l: tensor<2x3x128xf32>, %v: tensor<2x96x4xf32>, %dm: tensor<2x3x128x4xf32>,
    %kb: tensor<2x3x96xf32>, %bias: tensor<2x3x128x96xf32>,
    %qm: tensor<2x128xi1>, %km: tensor<2x96xi1>, %ql: tensor<2x128xf32>,
    %kl: tensor<2x96xf32>, %origin: index)
    -> (tensor<2x3x128x8xf32>, tensor<2x3x128xf32>, tensor<2x3x128x96xf32>) {
  %r:3 = moe.softmax_mix_backward_dq
      ins(%q, %k, %l, %l : tensor<2x3x128x8xf32>, tensor<2x3x96x8xf32>,
          tensor<2x3x128xf32>, tensor<2x3x128xf32>)
      values(%v, %dm : tensor<2x96x4xf32>, tensor<2x3x128x4xf32>)
      key_bias(%kb : tensor<2x3x96xf32>) bias(%bias : tensor<2x3x128x96xf32>)
      query_mask(%qm : tensor<2x128xi1>) key_mask(%km : tensor<2x96xi1>)
      levels(%ql, %kl : tensor<2x128xf32>, tensor<2x96xf32>)
      origin(%origin : index)
      outs(%q, %l, %bias : tensor<2x3x128x8xf32>, tensor<2x3x128xf32>,
           tensor<2x3x128x96xf32>)
      {scale = 0.25 : f64,
       visibility = #moe.visibility<causal, window = 7, exclude_self>,
       with_sums = true, with_dbias = true}
      -> tensor<2x3x128x8xf32>, tensor<2x3x128xf32>, tensor<2x3x128x96xf32>
  return %r#0, %r#1, %r#2 : tensor<2x3x128x8xf32>, tensor<2x3x128xf32>, tensor<2x3x128x96xf32>
}

// A bias that all heads share sums its gradient over them: heads stay whole.

// TILED-LABEL: func @a_shared_bias_keeps_its_heads_whole
// TILED:         scf.forall (%{{[^,]*}}, %{{[^,]*}}) = (0, 0) to (2, 64) step (1, 32)
// TILED:           moe.softmax_mix_backward_dq ins(%{{.*}} : tensor<1x3x32x8xf32>
func.func @a_shared_bias_keeps_its_heads_whole(%q: tensor<2x3x64x8xf32>,
    %l: tensor<2x3x64xf32>, %bias: tensor<2x1x64x64xf32>)
    -> (tensor<2x3x64x8xf32>, tensor<2x1x64x64xf32>) {
  %r:2 = moe.softmax_mix_backward_dq
      ins(%q, %q, %l, %l : tensor<2x3x64x8xf32>, tensor<2x3x64x8xf32>,
          tensor<2x3x64xf32>, tensor<2x3x64xf32>)
      bias(%bias : tensor<2x1x64x64xf32>)
      outs(%q, %bias : tensor<2x3x64x8xf32>, tensor<2x1x64x64xf32>) {with_dbias = true}
      -> tensor<2x3x64x8xf32>, tensor<2x1x64x64xf32>
  return %r#0, %r#1 : tensor<2x3x64x8xf32>, tensor<2x1x64x64xf32>
}

// The other sweep is cut over keys, whose origin is among the queries.

// TILED-LABEL: func @dkv
// TILED:         scf.forall (%{{.*}}, %{{.*}}, %[[KEY:[a-z0-9]*]]) = (0, 0, 0) to (2, 3, 96) step (1, 1, 32)
// TILED:           %[[MOVED:.*]] = affine.apply #{{[a-z0-9]*}}()[%[[KEY]]]
// TILED:           moe.softmax_mix_backward_dkv ins(%{{.*}} : tensor<1x1x128x8xf32>, tensor<1x1x32x8xf32>,
// TILED-SAME:        origin(%[[MOVED]] : index)
func.func @dkv(%q: tensor<2x3x128x8xf32>, %k: tensor<2x3x96x8xf32>,
    %l: tensor<2x3x128xf32>) -> tensor<2x3x96x8xf32> {
  %r = moe.softmax_mix_backward_dkv
      ins(%q, %k, %l, %l : tensor<2x3x128x8xf32>, tensor<2x3x96x8xf32>,
          tensor<2x3x128xf32>, tensor<2x3x128xf32>)
      outs(%k : tensor<2x3x96x8xf32>) -> tensor<2x3x96x8xf32>
  return %r : tensor<2x3x96x8xf32>
}

// Tokens that mix with themselves stay whole: rows share products.

// CHECK-LABEL: func @self
// CHECK:         moe.softmax_mix_backward_self ins(%{{[^)]*}}) mask(%{{[^)]*}}) level(%{{[^)]*}})
// CHECK-SAME:      outs(%{{[^)]*}}) {scale = 2.500000e-01 : f64, visibility = #moe.visibility<causal>}
// TILED-LABEL: func @self
// TILED-NOT:     scf.forall
// TILED:         moe.softmax_mix_backward_self ins(%{{.*}} : tensor<2x1x96x8xf32>
func.func @self(%u: tensor<2x1x96x8xf32>, %l: tensor<2x1x96xf32>, %v: tensor<2x96x4xf32>,
    %dm: tensor<2x1x96x4xf32>, %mask: tensor<2x96xi1>, %level: tensor<2x96xf32>)
    -> (tensor<2x1x96x8xf32>, tensor<2x1x96x4xf32>) {
  %r:2 = moe.softmax_mix_backward_self
      ins(%u, %l, %l, %v, %dm : tensor<2x1x96x8xf32>, tensor<2x1x96xf32>,
          tensor<2x1x96xf32>, tensor<2x96x4xf32>, tensor<2x1x96x4xf32>)
      mask(%mask : tensor<2x96xi1>) level(%level : tensor<2x96xf32>)
      outs(%u, %dm : tensor<2x1x96x8xf32>, tensor<2x1x96x4xf32>)
      {scale = 0.25 : f64, visibility = #moe.visibility<causal>}
      -> tensor<2x1x96x8xf32>, tensor<2x1x96x4xf32>
  return %r#0, %r#1 : tensor<2x1x96x8xf32>, tensor<2x1x96x4xf32>
}

// CHECK-LABEL: func @similarity
// CHECK:         moe.similarity_inform_backward ins(%{{[^)]*}}) dlse(%{{[^)]*}}) keys(%{{[^)]*}}) ws(%{{[^)]*}})
// CHECK-SAME:      mask(%{{[^)]*}}) query_mask(%{{[^)]*}}) tau(%{{[^)]*}}) origin(%{{[^)]*}}) outs(%{{[^)]*}})
func.func @similarity(%u: tensor<2x5x8xf32>, %e: tensor<2x9x4xf32>,
    %p: tensor<2x5x4xf32>, %l: tensor<2x5xf32>, %uk: tensor<2x9x6xf32>,
    %ws: tensor<8x6xf32>, %mask: tensor<2x9xi1>, %qm: tensor<2x5xi1>,
    %tau: f32, %origin: index, %t0: tensor<f32>) -> tensor<f32> {
  %r:5 = moe.similarity_inform_backward
      ins(%u, %e, %p, %l, %p : tensor<2x5x8xf32>, tensor<2x9x4xf32>,
          tensor<2x5x4xf32>, tensor<2x5xf32>, tensor<2x5x4xf32>)
      dlse(%l : tensor<2x5xf32>) keys(%uk : tensor<2x9x6xf32>)
      ws(%ws : tensor<8x6xf32>) mask(%mask : tensor<2x9xi1>)
      query_mask(%qm : tensor<2x5xi1>) tau(%tau : f32) origin(%origin : index)
      outs(%u, %e, %uk, %ws, %t0 : tensor<2x5x8xf32>, tensor<2x9x4xf32>,
           tensor<2x9x6xf32>, tensor<8x6xf32>, tensor<f32>)
      -> tensor<2x5x8xf32>, tensor<2x9x4xf32>, tensor<2x9x6xf32>,
         tensor<8x6xf32>, tensor<f32>
  return %r#4 : tensor<f32>
}
