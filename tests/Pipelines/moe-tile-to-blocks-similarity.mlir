// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_90 --moe-convert-to-softmax-mix --moe-tile-to-blocks --remarks-filter-missed='moe-tile-and-fuse' 2>%t | FileCheck %s
// RUN: FileCheck %s --check-prefix=REMARK < %t

// A router that mixes the probabilities it computes: a block of the mix reads
// rows that other blocks would compute, so they are a kernel before it.

// CHECK-LABEL: func.func @computes_probabilities
// CHECK:         = scf.forall
// CHECK:           moe.router_logits
// CHECK-NOT:       moe.softmax_mix
// CHECK:         = scf.forall
// CHECK:           moe.softmax_mix
// CHECK:           moe.topk_renorm
// CHECK-NOT:     = scf.forall

// REMARK: remark: {{.*}}Reason="several tiles need the same rows of it", Remark="linalg.exp not fused into moe.topk_renorm"
func.func @computes_probabilities(
    %h: tensor<2x?x32xf32>, %w: tensor<8x32xf32>, %z0: tensor<2x?x8xf32>, %e0: tensor<2x?x8xf32>,
    %p0: tensor<2x?x8xf32>, %l0: tensor<2x?xf32>, %g0: tensor<2x?x2xf32>, %i0: tensor<2x?x2xi32>)
    -> (tensor<2x?x2xf32>, tensor<2x?x2xi32>) {
  %z = moe.router_logits ins(%h, %w : tensor<2x?x32xf32>, tensor<8x32xf32>)
      outs(%z0 : tensor<2x?x8xf32>) -> tensor<2x?x8xf32>
  %e = linalg.exp ins(%z : tensor<2x?x8xf32>) outs(%e0 : tensor<2x?x8xf32>) -> tensor<2x?x8xf32>
  %p:2 = moe.similarity_inform ins(%h, %e : tensor<2x?x32xf32>, tensor<2x?x8xf32>)
      outs(%p0, %l0 : tensor<2x?x8xf32>, tensor<2x?xf32>)
      {visibility = #moe.visibility<causal>} -> tensor<2x?x8xf32>, tensor<2x?xf32>
  %r:2 = moe.topk_renorm ins(%p#0 : tensor<2x?x8xf32>)
      outs(%g0, %i0 : tensor<2x?x2xf32>, tensor<2x?x2xi32>) {kind = #moe.score_kind<probs>}
      -> tensor<2x?x2xf32>, tensor<2x?x2xi32>
  return %r#0, %r#1 : tensor<2x?x2xf32>, tensor<2x?x2xi32>
}

// -----

// CHECK-LABEL: func.func @takes_probabilities
// CHECK:         = scf.forall
// CHECK:           moe.softmax_mix
// CHECK:           moe.topk_renorm
// CHECK-NOT:     = scf.forall
func.func @takes_probabilities(
    %h: tensor<2x?x32xf32>, %e: tensor<2x?x8xf32>, %p0: tensor<2x?x8xf32>, %l0: tensor<2x?xf32>,
    %g0: tensor<2x?x2xf32>, %i0: tensor<2x?x2xi32>) -> (tensor<2x?x2xf32>, tensor<2x?x2xi32>) {
  %p:2 = moe.similarity_inform ins(%h, %e : tensor<2x?x32xf32>, tensor<2x?x8xf32>)
      outs(%p0, %l0 : tensor<2x?x8xf32>, tensor<2x?xf32>)
      {visibility = #moe.visibility<causal>} -> tensor<2x?x8xf32>, tensor<2x?xf32>
  %r:2 = moe.topk_renorm ins(%p#0 : tensor<2x?x8xf32>)
      outs(%g0, %i0 : tensor<2x?x2xf32>, tensor<2x?x2xi32>) {kind = #moe.score_kind<probs>}
      -> tensor<2x?x2xf32>, tensor<2x?x2xi32>
  return %r#0, %r#1 : tensor<2x?x2xf32>, tensor<2x?x2xi32>
}
