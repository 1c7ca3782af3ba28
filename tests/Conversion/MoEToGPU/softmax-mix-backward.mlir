// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target --moe-tile-to-blocks | FileCheck %s --check-prefix=TILES
// RUN: %moe-opt %s --split-input-file --moe-to-nvvm | FileCheck %s

// A warp takes a query and goes over the keys, 32 at a time: weights travel
// between lanes, and no pair is stored, neither in the workspace nor in
// workgroup memory.

// TILES-LABEL: func @by_queries
// TILES:         scf.forall
// TILES:           moe.softmax_mix_backward_dq
// CHECK-LABEL: @by_queries(
// CHECK-NOT:     moe.workspace
// CHECK:       gpu.binary @by_queries_gpu
func.func @by_queries(
    %q: tensor<1x2x?x8xf32>, %k: tensor<1x2x?x8xf32>, %lse: tensor<1x2x?xf32>,
    %delta: tensor<1x2x?xf32>, %v: tensor<1x?x4xf32>, %dmixed: tensor<1x2x?x4xf32>,
    %n: index) -> tensor<1x2x?x8xf32> {
  %dq = tensor.empty(%n) : tensor<1x2x?x8xf32>
  %r = moe.softmax_mix_backward_dq
      ins(%q, %k, %lse, %delta : tensor<1x2x?x8xf32>, tensor<1x2x?x8xf32>,
          tensor<1x2x?xf32>, tensor<1x2x?xf32>)
      values(%v, %dmixed : tensor<1x?x4xf32>, tensor<1x2x?x4xf32>)
      outs(%dq : tensor<1x2x?x8xf32>) {visibility = #moe.visibility<causal>} -> tensor<1x2x?x8xf32>
  return %r : tensor<1x2x?x8xf32>
}

// -----

// TILES-LABEL: func @by_keys
// TILES:         scf.forall
// TILES:           moe.softmax_mix_backward_dkv
// CHECK-LABEL: @by_keys(
// CHECK-NOT:     moe.workspace
// CHECK:       gpu.binary @by_keys_gpu
func.func @by_keys(
    %q: tensor<1x2x?x8xf32>, %k: tensor<1x2x?x8xf32>, %lse: tensor<1x2x?xf32>,
    %delta: tensor<1x2x?xf32>, %v: tensor<1x?x4xf32>, %dmixed: tensor<1x2x?x4xf32>,
    %n: index) -> (tensor<1x2x?x8xf32>, tensor<1x2x?x4xf32>) {
  %dk = tensor.empty(%n) : tensor<1x2x?x8xf32>
  %dv = tensor.empty(%n) : tensor<1x2x?x4xf32>
  %r:2 = moe.softmax_mix_backward_dkv
      ins(%q, %k, %lse, %delta : tensor<1x2x?x8xf32>, tensor<1x2x?x8xf32>,
          tensor<1x2x?xf32>, tensor<1x2x?xf32>)
      values(%v, %dmixed : tensor<1x?x4xf32>, tensor<1x2x?x4xf32>)
      outs(%dk, %dv : tensor<1x2x?x8xf32>, tensor<1x2x?x4xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<1x2x?x8xf32>, tensor<1x2x?x4xf32>
  return %r#0, %r#1 : tensor<1x2x?x8xf32>, tensor<1x2x?x4xf32>
}

// -----

// The gradient of a bias is a pair's own: the sweep writes it, and there is no
// other buffer of pairs.

// TILES-LABEL: func @by_bias
// TILES:         scf.forall
// TILES:           moe.softmax_mix_backward_dq
// CHECK-LABEL: @by_bias(
// CHECK-NOT:     moe.workspace
// CHECK:       gpu.binary @by_bias_gpu
func.func @by_bias(
    %q: tensor<1x2x?x8xf32>, %lse: tensor<1x2x?xf32>, %bias: tensor<1x2x?x?xf32>,
    %n: index) -> (tensor<1x2x?x8xf32>, tensor<1x2x?x?xf32>) {
  %dq = tensor.empty(%n) : tensor<1x2x?x8xf32>
  %dbias = tensor.empty(%n, %n) : tensor<1x2x?x?xf32>
  %r:2 = moe.softmax_mix_backward_dq
      ins(%q, %q, %lse, %lse : tensor<1x2x?x8xf32>, tensor<1x2x?x8xf32>,
          tensor<1x2x?xf32>, tensor<1x2x?xf32>)
      bias(%bias : tensor<1x2x?x?xf32>)
      outs(%dq, %dbias : tensor<1x2x?x8xf32>, tensor<1x2x?x?xf32>)
      {with_dbias = true} -> tensor<1x2x?x8xf32>, tensor<1x2x?x?xf32>
  return %r#0, %r#1 : tensor<1x2x?x8xf32>, tensor<1x2x?x?xf32>
}
