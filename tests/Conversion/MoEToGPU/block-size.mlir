// RUN: %moe-opt %s --moe-to-nvvm="chip=sm_90 block-size=32" | FileCheck %s -DSIZE=32
// RUN: %moe-opt %s --moe-to-nvvm="chip=sm_90a block-size=256" | FileCheck %s -DSIZE=256

// A mixture has blocks of its own size, alone and in one block with ops that
// take any.

// CHECK-LABEL: func.func @select(
// CHECK-SAME:    moe.kernels = [{block_size = [[SIZE]] : i64
func.func @select(%z: tensor<?x16xf32>) -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x16xf32>
  %o0 = tensor.empty(%n) : tensor<?x2xf32>
  %o1 = tensor.empty(%n) : tensor<?x2xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%o0, %o1 : tensor<?x2xf32>, tensor<?x2xi32>) -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0, %r#1 : tensor<?x2xf32>, tensor<?x2xi32>
}

// CHECK-LABEL: func.func @mix(
// CHECK-SAME:    moe.kernels = [{block_size = 128 : i64
func.func @mix(%q: tensor<1x1x?x32xf32>, %k: tensor<1x1x?x32xf32>, %v: tensor<1x?x16xf32>)
    -> (tensor<1x1x?x16xf32>, tensor<1x1x?xf32>) {
  %c2 = arith.constant 2 : index
  %n = tensor.dim %q, %c2 : tensor<1x1x?x32xf32>
  %o0 = tensor.empty(%n) : tensor<1x1x?x16xf32>
  %o1 = tensor.empty(%n) : tensor<1x1x?xf32>
  %r:2 = moe.softmax_mix ins(%q, %k : tensor<1x1x?x32xf32>, tensor<1x1x?x32xf32>)
      values(%v : tensor<1x?x16xf32>)
      outs(%o0, %o1 : tensor<1x1x?x16xf32>, tensor<1x1x?xf32>)
      -> tensor<1x1x?x16xf32>, tensor<1x1x?xf32>
  return %r#0, %r#1 : tensor<1x1x?x16xf32>, tensor<1x1x?xf32>
}

// CHECK-LABEL: func.func @mix_and_select(
// CHECK-SAME:    moe.kernels = [{block_size = 128 : i64
func.func @mix_and_select(%u: tensor<1x?x32xf32>, %p: tensor<1x?x16xf32>)
    -> (tensor<1x?x2xf32>, tensor<1x?x2xi32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %u, %c1 : tensor<1x?x32xf32>
  %o0 = tensor.empty(%n) : tensor<1x?x16xf32>
  %o1 = tensor.empty(%n) : tensor<1x?xf32>
  %o2 = tensor.empty(%n) : tensor<1x?x2xf32>
  %o3 = tensor.empty(%n) : tensor<1x?x2xi32>
  %m:2 = moe.similarity_inform ins(%u, %p : tensor<1x?x32xf32>, tensor<1x?x16xf32>)
      outs(%o0, %o1 : tensor<1x?x16xf32>, tensor<1x?xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<1x?x16xf32>, tensor<1x?xf32>
  %r:2 = moe.topk_renorm ins(%m#0 : tensor<1x?x16xf32>)
      outs(%o2, %o3 : tensor<1x?x2xf32>, tensor<1x?x2xi32>)
      {kind = #moe.score_kind<probs>} -> tensor<1x?x2xf32>, tensor<1x?x2xi32>
  return %r#0, %r#1 : tensor<1x?x2xf32>, tensor<1x?x2xi32>
}
