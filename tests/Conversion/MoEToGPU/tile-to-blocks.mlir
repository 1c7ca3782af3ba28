// RUN: %moe-opt %s --split-input-file --pass-pipeline='builtin.module(func.func(moe-tile-to-blocks))' | FileCheck %s

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
// CHECK-NOT:         moe.tile_rows
// CHECK:         mapping = [#gpu.block<z>, #gpu.block<y>, #gpu.block<x>]
func.func @takes_many_queries(
    %q: tensor<2x3x?x32xf32>, %k: tensor<2x3x?x32xf32>, %l0: tensor<2x3x?xf32>)
    -> tensor<2x3x?xf32> {
  %l = moe.softmax_mix ins(%q, %k : tensor<2x3x?x32xf32>, tensor<2x3x?x32xf32>)
      outs(%l0 : tensor<2x3x?xf32>) -> tensor<2x3x?xf32>
  return %l : tensor<2x3x?xf32>
}
