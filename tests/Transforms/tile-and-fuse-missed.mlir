// RUN: %moe-opt %s --moe-tile-and-fuse --remarks-filter-missed='moe-.*' --split-input-file -o %t 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=IR < %t

// Logits that someone else reads too are computed once, for all.

// CHECK: remark: [Missed] TileAndFuse | Category:moe-tile-and-fuse
// CHECK-SAME: Reason="its result has several users", Remark="not fused into moe.topk_renorm"

// IR-LABEL: func @keeps_logits_that_have_two_users
// IR:         scf.forall
// IR:           moe.router_logits
// IR:         scf.forall
// IR-NOT:       moe.router_logits
// IR:           moe.topk_renorm
func.func @keeps_logits_that_have_two_users(
    %h: tensor<256x32xf32>, %w: tensor<64x32xf32>, %z0: tensor<256x64xf32>,
    %g0: tensor<256x8xf32>, %i0: tensor<256x8xi32>)
    -> (tensor<256x64xf32>, tensor<256x8xf32>, tensor<256x8xi32>) {
  %z = moe.router_logits ins(%h, %w : tensor<256x32xf32>, tensor<64x32xf32>)
      outs(%z0 : tensor<256x64xf32>) -> tensor<256x64xf32>
  %g, %i = moe.topk_renorm ins(%z : tensor<256x64xf32>)
      outs(%g0, %i0 : tensor<256x8xf32>, tensor<256x8xi32>)
      -> tensor<256x8xf32>, tensor<256x8xi32>
  return %z, %g, %i : tensor<256x64xf32>, tensor<256x8xf32>, tensor<256x8xi32>
}

// -----

// Every tile of queries needs every key: the keys are computed once.

// CHECK: Reason="several tiles need the same rows of it", Remark="not fused into linalg.matmul"

// IR-LABEL: func @keeps_producers_that_every_tile_needs
// IR:         scf.forall
// IR:           linalg.exp
// IR:         scf.forall
// IR-NOT:       linalg.exp
// IR:           linalg.matmul
func.func @keeps_producers_that_every_tile_needs(
    %a: tensor<256x32xf32>, %b: tensor<32x16xf32>, %e0: tensor<32x16xf32>,
    %c: tensor<256x16xf32>) -> tensor<256x16xf32> {
  %e = linalg.exp ins(%b : tensor<32x16xf32>) outs(%e0 : tensor<32x16xf32>)
      -> tensor<32x16xf32>
  %r = linalg.matmul ins(%a, %e : tensor<256x32xf32>, tensor<32x16xf32>)
      outs(%c : tensor<256x16xf32>) -> tensor<256x16xf32>
  return %r : tensor<256x16xf32>
}

// -----

// The sum over the rows of a sequence has one row a sequence; the producer's
// rows still run in parallel.

// CHECK: Reason="it has more rows to run in parallel", Remark="not fused into linalg.generic"

// IR-LABEL: func @keeps_producers_with_more_parallel_rows
// IR:         scf.forall (%{{.*}}, %{{.*}}) =
// IR:           moe.softmax_mix
// IR:         scf.forall (%{{.*}}) =
// IR-NOT:       moe.softmax_mix
// IR:           linalg.generic
func.func @keeps_producers_with_more_parallel_rows(
    %q: tensor<2x4x256x16xf32>, %l0: tensor<2x4x256xf32>, %s0: tensor<2x4xf32>)
    -> tensor<2x4xf32> {
  %l = moe.softmax_mix ins(%q, %q : tensor<2x4x256x16xf32>, tensor<2x4x256x16xf32>)
      outs(%l0 : tensor<2x4x256xf32>) -> tensor<2x4x256xf32>
  %s = linalg.generic {
      indexing_maps = [affine_map<(b, h, i) -> (b, h, i)>, affine_map<(b, h, i) -> (b, h)>],
      iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%l : tensor<2x4x256xf32>) outs(%s0 : tensor<2x4xf32>) {
  ^bb0(%x: f32, %acc: f32):
    %y = arith.addf %x, %acc : f32
    linalg.yield %y : f32
  } -> tensor<2x4xf32>
  return %s : tensor<2x4xf32>
}
