// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target --moe-tile-to-blocks | FileCheck %s

// 64 experts take 256 bytes a row: 16 rows fit.

// CHECK-LABEL: func.func @takes_the_most_rows
// CHECK:         scf.forall {{.*}} step (16)
// CHECK:           moe.router_logits
// CHECK:           moe.topk_renorm
// CHECK:         mapping = [#gpu.block<x>]
func.func @takes_the_most_rows(
    %h: tensor<?x32xf32>, %w: tensor<64x32xf32>, %z0: tensor<?x64xf32>,
    %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>) -> tensor<?x2xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<?x32xf32>, tensor<64x32xf32>)
      outs(%z0 : tensor<?x64xf32>) -> tensor<?x64xf32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0 : tensor<?x2xf32>
}

// -----

// 2048 experts take 8 KiB a row: 4 rows fit in 48 KiB.

// CHECK-LABEL: func.func @takes_fewer_rows_of_many_experts
// CHECK:         scf.forall {{.*}} step (4)
func.func @takes_fewer_rows_of_many_experts(
    %h: tensor<?x32xf32>, %w: tensor<2048x32xf32>, %z0: tensor<?x2048xf32>,
    %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>) -> tensor<?x2xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<?x32xf32>, tensor<2048x32xf32>)
      outs(%z0 : tensor<?x2048xf32>) -> tensor<?x2048xf32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x2048xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0 : tensor<?x2xf32>
}

// -----

// Every tile of queries reads all keys, so its kernel gets as many queries as
// its registers hold.

// CHECK-LABEL: func.func @takes_many_queries
// CHECK:         scf.forall {{.*}} step (1, 1, 64)
// CHECK:           moe.softmax_mix
// CHECK:         mapping = [#gpu.block<z>, #gpu.block<y>, #gpu.block<x>]
func.func @takes_many_queries(
    %q: tensor<2x3x?x32xf32>, %k: tensor<2x3x?x32xf32>, %l0: tensor<2x3x?xf32>)
    -> tensor<2x3x?xf32> {
  %l = moe.softmax_mix ins(%q, %k : tensor<2x3x?x32xf32>, tensor<2x3x?x32xf32>)
      outs(%l0 : tensor<2x3x?xf32>) -> tensor<2x3x?xf32>
  return %l : tensor<2x3x?xf32>
}

// -----

// A selection that no other op feeds fills the block: 4 lanes a row for 64
// experts, one for 16.

// CHECK-LABEL: func.func @fills_the_block
// CHECK:         scf.forall {{.*}} step (128)
// CHECK:           moe.topk_renorm {{.*}}x16xbf16>
// CHECK:         scf.forall {{.*}} step (32)
// CHECK:           moe.topk_renorm {{.*}}x64xbf16>
func.func @fills_the_block(
    %x: tensor<?x16xbf16>, %y: tensor<?x64xbf16>, %g0: tensor<?x2xf32>,
    %i0: tensor<?x2xi32>, %g1: tensor<?x8xf32>, %i1: tensor<?x8xi32>)
    -> (tensor<?x2xf32>, tensor<?x8xf32>) {
  %a:2 = moe.topk_renorm ins(%x : tensor<?x16xbf16>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  %b:2 = moe.topk_renorm ins(%y : tensor<?x64xbf16>)
      outs(%g1, %i1 : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %a#0, %b#0 : tensor<?x2xf32>, tensor<?x8xf32>
}

// -----

// What only the tile uses is computed in it, even where two of its ops read it:
// softmax, smoothing and selection are one loop. The threshold of the graph is
// applied inside too.

// CHECK-LABEL: func.func @fuses_a_chain
// CHECK-COUNT-1: scf.forall
// CHECK:           math.exp
// CHECK:           moe.topk_renorm
// CHECK-NOT:     scf.forall (
func.func @fuses_a_chain(
    %z: tensor<?x16xf32>, %a: tensor<16x16xf32>, %p0: tensor<?x16xf32>,
    %s0: tensor<?x16xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %p = linalg.softmax dimension(1) ins(%z : tensor<?x16xf32>)
      outs(%p0 : tensor<?x16xf32>) -> tensor<?x16xf32>
  %s = moe.adjacency_gate ins(%p, %a : tensor<?x16xf32>, tensor<16x16xf32>)
      outs(%s0 : tensor<?x16xf32>) -> tensor<?x16xf32>
  %r:2 = moe.topk_renorm ins(%s : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0, %r#1 : tensor<?x2xf32>, tensor<?x2xi32>
}
