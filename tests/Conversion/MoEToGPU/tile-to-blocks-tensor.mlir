// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_80 --moe-tile-to-blocks | FileCheck %s

// Tensor cores multiply 64 rows at once, and a selection that shares the loop
// takes as many.

// CHECK-LABEL: func.func @router_decides
// CHECK:         scf.forall {{.*}} step (64)
// CHECK:           moe.router_logits
// CHECK:           moe.topk_renorm
// CHECK:         mapping = [#gpu.block<x>]
func.func @router_decides(
    %h: tensor<?x32xbf16>, %w: tensor<64x32xbf16>, %z0: tensor<?x64xf32>,
    %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>) -> tensor<?x2xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<?x32xbf16>, tensor<64x32xbf16>)
      outs(%z0 : tensor<?x64xf32>) -> tensor<?x64xf32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0 : tensor<?x2xf32>
}

// -----

// The more experts, the fewer rows: the logits lie in workgroup memory.

// CHECK-LABEL: func.func @many_experts
// CHECK:         scf.forall {{.*}} step (32)
func.func @many_experts(
    %h: tensor<?x32xbf16>, %w: tensor<256x32xbf16>, %z0: tensor<?x256xf32>,
    %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>) -> tensor<?x2xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<?x32xbf16>, tensor<256x32xbf16>)
      outs(%z0 : tensor<?x256xf32>) -> tensor<?x256xf32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x256xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0 : tensor<?x2xf32>
}

// -----

// Rows of batches are rows: the logits are no rows along the experts.

// CHECK-LABEL: func.func @batches
// CHECK:         scf.forall {{.*}} step (1, 64)
// CHECK:           moe.router_logits
// CHECK:           moe.topk_renorm
// CHECK:         mapping = [#gpu.block<y>, #gpu.block<x>]
// CHECK-NOT:     scf.forall
func.func @batches(
    %h: tensor<3x?x32xbf16>, %w: tensor<16x32xbf16>, %z0: tensor<3x?x16xf32>,
    %g0: tensor<3x?x2xf32>, %i0: tensor<3x?x2xi32>) -> tensor<3x?x2xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<3x?x32xbf16>, tensor<16x32xbf16>)
      outs(%z0 : tensor<3x?x16xf32>) -> tensor<3x?x16xf32>
  %r:2 = moe.topk_renorm ins(%z : tensor<3x?x16xf32>)
      outs(%g0, %i0 : tensor<3x?x2xf32>, tensor<3x?x2xi32>)
      -> tensor<3x?x2xf32>, tensor<3x?x2xi32>
  return %r#0 : tensor<3x?x2xf32>
}
