// RUN: %moe-opt %s --moe-tile-and-fuse --remarks-filter-missed='moe-.*' --split-input-file -o %t 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=IR < %t

// What someone else reads too is computed once, for all.

// CHECK: remark: [Missed] TileAndFuse | Category:moe-tile-and-fuse
// CHECK-SAME: Reason="its result has several users", Remark="{{.*}} not fused into linalg.matmul"

// IR-LABEL: func @keeps_results_that_have_two_users
// IR:         scf.forall
// IR:           linalg.exp
// IR:         scf.forall
// IR-NOT:       linalg.exp
// IR:           linalg.matmul
func.func @keeps_results_that_have_two_users(
    %a: tensor<256x32xf32>, %b: tensor<32x16xf32>, %e0: tensor<256x32xf32>,
    %c: tensor<256x16xf32>) -> (tensor<256x32xf32>, tensor<256x16xf32>) {
  %e = linalg.exp ins(%a : tensor<256x32xf32>) outs(%e0 : tensor<256x32xf32>)
      -> tensor<256x32xf32>
  %r = linalg.matmul ins(%e, %b : tensor<256x32xf32>, tensor<32x16xf32>)
      outs(%c : tensor<256x16xf32>) -> tensor<256x16xf32>
  return %e, %r : tensor<256x32xf32>, tensor<256x16xf32>
}

// -----

// Every tile of queries needs every key: the keys are computed once.

// CHECK: Reason="several tiles need the same rows of it", Remark="{{.*}} not fused into linalg.matmul"

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

// A loss over tokens would need a sum of its own in each tile, and slots of
// experts need all tokens: both stay behind the loop of the selection. So do
// co-selections, of which moe-fuse-reductions has to say why not.

// CHECK: Reason="it sums over the rows that the loop cuts, and each tile would need sums of its own", Remark="{{.*}} not fused with moe.topk_renorm"
// CHECK: Reason="it needs all rows at once", Remark="{{.*}} not fused with moe.topk_renorm"

// IR-LABEL: func @keeps_ops_that_need_all_rows
// IR:         scf.forall
// IR:           moe.topk_renorm
// IR:         scf.forall.in_parallel
// IR:         moe.balance_loss
// IR:         moe.adjacency_update
// IR:         moe.dispatch
func.func @keeps_ops_that_need_all_rows(
    %z: tensor<256x8xf32>, %a: tensor<8x8xf32>, %g0: tensor<256x2xf32>,
    %i0: tensor<256x2xi32>, %s0: tensor<256x2xi32>, %o0: tensor<9xi32>, %c0: tensor<8xi32>,
    %l0: tensor<f32>) -> (tensor<f32>, tensor<8x8xf32>, tensor<256x2xi32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<256x8xf32>)
      outs(%g0, %i0 : tensor<256x2xf32>, tensor<256x2xi32>)
      -> tensor<256x2xf32>, tensor<256x2xi32>
  %loss:2 = moe.balance_loss ins(%z, %i : tensor<256x8xf32>, tensor<256x2xi32>)
      outs(%l0, %c0 : tensor<f32>, tensor<8xi32>) -> tensor<f32>, tensor<8xi32>
  %new = moe.adjacency_update ins(%a, %i : tensor<8x8xf32>, tensor<256x2xi32>)
      outs(%a : tensor<8x8xf32>) -> tensor<8x8xf32>
  %d:3 = moe.dispatch ins(%i : tensor<256x2xi32>)
      outs(%s0, %o0, %c0 : tensor<256x2xi32>, tensor<9xi32>, tensor<8xi32>)
      -> tensor<256x2xi32>, tensor<9xi32>, tensor<8xi32>
  return %loss#0, %new, %d#0 : tensor<f32>, tensor<8x8xf32>, tensor<256x2xi32>
}

// -----

// The experts between the selection and the sum of their outputs need all
// tokens: the sum cannot share the loop of the selection.

// IR-LABEL: func @keeps_what_is_computed_from_the_results_of_a_loop
// IR:         scf.forall
// IR:           moe.topk_renorm
// IR:         scf.forall.in_parallel
// IR:         moe.dispatch
// IR:         scf.forall
// IR:           moe.combine
func.func @keeps_what_is_computed_from_the_results_of_a_loop(
    %z: tensor<256x8xf32>, %out: tensor<512x32xf32>, %g0: tensor<256x2xf32>,
    %i0: tensor<256x2xi32>, %s0: tensor<256x2xi32>, %o0: tensor<9xi32>, %c0: tensor<8xi32>,
    %y0: tensor<256x32xf32>) -> tensor<256x32xf32> {
  %g, %i = moe.topk_renorm ins(%z : tensor<256x8xf32>)
      outs(%g0, %i0 : tensor<256x2xf32>, tensor<256x2xi32>)
      -> tensor<256x2xf32>, tensor<256x2xi32>
  %d:3 = moe.dispatch ins(%i : tensor<256x2xi32>)
      outs(%s0, %o0, %c0 : tensor<256x2xi32>, tensor<9xi32>, tensor<8xi32>)
      -> tensor<256x2xi32>, tensor<9xi32>, tensor<8xi32>
  %y = moe.combine ins(%out, %g, %d#0 : tensor<512x32xf32>, tensor<256x2xf32>, tensor<256x2xi32>)
      outs(%y0 : tensor<256x32xf32>) -> tensor<256x32xf32>
  return %y : tensor<256x32xf32>
}

// -----

// The sum over the rows of a sequence has one row a sequence; the producer's
// rows still run in parallel.

// CHECK: Reason="it has more rows to run in parallel", Remark="{{.*}} not fused into linalg.generic"

// IR-LABEL: func @keeps_producers_with_more_parallel_rows
// IR:         scf.forall (%{{[^,]*}}, %{{[^,]*}}, %{{[^,]*}}) =
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

// -----

// A reshape computes nothing: what is said is of the op behind it.

// CHECK-NOT: expand_shape
// CHECK: Reason="a reshape lies between them", Remark="linalg.exp not fused into linalg.batch_matmul"
// CHECK-NOT: expand_shape

// IR-LABEL: func @looks_behind_reshapes
// IR:         linalg.exp
// IR:         tensor.expand_shape
// IR:         tensor.expand_shape
// IR:         linalg.batch_matmul
func.func @looks_behind_reshapes(
    %a: tensor<256x32xf32>, %b: tensor<64x16xf32>, %e0: tensor<256x32xf32>,
    %c: tensor<2x128x16xf32>) -> tensor<2x128x16xf32> {
  %e = linalg.exp ins(%a : tensor<256x32xf32>) outs(%e0 : tensor<256x32xf32>)
      -> tensor<256x32xf32>
  %x = tensor.expand_shape %e [[0, 1], [2]] output_shape [2, 128, 32]
      : tensor<256x32xf32> into tensor<2x128x32xf32>
  %y = tensor.expand_shape %b [[0, 1], [2]] output_shape [2, 32, 16]
      : tensor<64x16xf32> into tensor<2x32x16xf32>
  %r = linalg.batch_matmul ins(%x, %y : tensor<2x128x32xf32>, tensor<2x32x16xf32>)
      outs(%c : tensor<2x128x16xf32>) -> tensor<2x128x16xf32>
  return %r : tensor<2x128x16xf32>
}
