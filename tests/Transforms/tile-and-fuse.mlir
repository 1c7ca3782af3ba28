// RUN: %moe-opt %s --moe-tile-and-fuse --canonicalize --cse --canonicalize --split-input-file | FileCheck %s
// RUN: %moe-opt %s --moe-tile-and-fuse --canonicalize --cse --canonicalize --moe-tile-and-fuse --canonicalize --cse --canonicalize --split-input-file | FileCheck %s

// Rows are tiled, and the logits are computed inside the tile that selects from
// them. The experts and the k places stay whole.

// CHECK-LABEL: func @fuses_the_logits_into_the_selection
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x352xf32>, %[[W:[^:]*]]: tensor<64x352xf32>
// CHECK-NOT:     moe.
// CHECK:         scf.forall (%[[ROW:.*]]) = (0) to (%{{.*}}) step (64)
// CHECK:           %[[TOKENS:.*]] = tensor.extract_slice %[[H]][%[[ROW]], 0]
// CHECK:           %[[Z:.*]] = moe.router_logits ins(%[[TOKENS]], %[[W]]
// CHECK:           moe.topk_renorm ins(%[[Z]]
// CHECK:           scf.forall.in_parallel
// CHECK-NOT:     moe.
func.func @fuses_the_logits_into_the_selection(
    %h: tensor<?x352xf32>, %w: tensor<64x352xf32>, %n: index)
    -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %z0 = tensor.empty(%n) : tensor<?x64xf32>
  %g0 = tensor.empty(%n) : tensor<?x8xf32>
  %i0 = tensor.empty(%n) : tensor<?x8xi32>
  %z = moe.router_logits ins(%h, %w : tensor<?x352xf32>, tensor<64x352xf32>)
      outs(%z0 : tensor<?x64xf32>) -> tensor<?x64xf32>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%g0, %i0 : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}

// -----

// One row of the outer dims a tile, 64 of the innermost row dim. A self-similar
// op spells its keys and the position of its queries out before it is cut.

// CHECK-LABEL: func @tiles_queries_and_moves_their_origin
// CHECK-SAME:    %[[U:[^:]*]]: tensor<2x?x352xf32>
// CHECK:         scf.forall (%[[B:.*]], %[[ROW:.*]]) = (0, 0) to (2, %{{.*}}) step (1, 64)
// CHECK-DAG:       %[[QUERIES:.*]] = tensor.extract_slice %[[U]][%[[B]], %[[ROW]], 0]
// CHECK-DAG:       %[[KEYS:.*]] = tensor.extract_slice %[[U]][%[[B]], 0, 0]
// CHECK:           moe.similarity_inform ins(%[[QUERIES]],
// CHECK-SAME:        keys(%[[KEYS]] :
// CHECK-SAME:        origin(%[[ROW]] :
func.func @tiles_queries_and_moves_their_origin(
    %u: tensor<2x?x352xf32>, %e: tensor<2x?x16xf32>, %p: tensor<2x?x16xf32>,
    %lse: tensor<2x?xf32>) -> (tensor<2x?x16xf32>, tensor<2x?xf32>) {
  %r:2 = moe.similarity_inform
      ins(%u, %e : tensor<2x?x352xf32>, tensor<2x?x16xf32>)
      outs(%p, %lse : tensor<2x?x16xf32>, tensor<2x?xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<2x?x16xf32>, tensor<2x?xf32>
  return %r#0, %r#1 : tensor<2x?x16xf32>, tensor<2x?xf32>
}

// -----

// Assignments are absolute and counts do not span d: nothing is cut.

// CHECK-LABEL: func @leaves_ops_without_row_dims
// CHECK-NOT:     scf.forall
// CHECK:         moe.mad_dispersion
// CHECK-NOT:     scf.forall
func.func @leaves_ops_without_row_dims(
    %h: tensor<?x32xf32>, %assign: tensor<?xi32>, %s: tensor<4x32xf32>,
    %mean: tensor<4x32xf32>, %count: tensor<4xi32>) -> tensor<4x32xf32> {
  %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x32xf32>, tensor<?xi32>)
      outs(%s, %mean, %count : tensor<4x32xf32>, tensor<4x32xf32>, tensor<4xi32>)
      -> tensor<4x32xf32>, tensor<4x32xf32>, tensor<4xi32>
  return %r#0 : tensor<4x32xf32>
}

// -----

// The pass knows no op by name: ops of linalg are tiled by the same rule.

// CHECK-LABEL: func @tiles_upstream_ops_too
// CHECK:         scf.forall (%{{.*}}) = (0) to (128) step (64)
// CHECK:           linalg.matmul
func.func @tiles_upstream_ops_too(
    %a: tensor<128x32xf32>, %b: tensor<32x16xf32>, %c: tensor<128x16xf32>)
    -> tensor<128x16xf32> {
  %r = linalg.matmul ins(%a, %b : tensor<128x32xf32>, tensor<32x16xf32>)
      outs(%c : tensor<128x16xf32>) -> tensor<128x16xf32>
  return %r : tensor<128x16xf32>
}

// -----

// The metric of ACMoE, the product and the selection share one loop: the scaled
// tokens are a tile, the prologue of the product.

// CHECK-LABEL: func @fuses_the_metric_into_the_selection
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x352xf32>, %[[M:[^:]*]]: tensor<64x352xf32>
// CHECK-NOT:     moe.
// CHECK:         scf.forall (%[[ROW:.*]]) = (0) to (%{{.*}}) step (64)
// CHECK-DAG:       %[[TOKENS:.*]] = tensor.extract_slice %[[H]][%[[ROW]], 0]
// CHECK-DAG:       %[[BEFORE:.*]] = tensor.extract_slice %{{.*}}[%[[ROW]], 0] [%{{.*}}, 1]
// CHECK:           %[[Z:.*]] = moe.ac_logits ins(%[[TOKENS]], %[[M]], %[[BEFORE]],
// CHECK:           moe.topk_renorm ins(%[[Z]]
// CHECK:           scf.forall.in_parallel
// CHECK-NOT:     moe.
func.func @fuses_the_metric_into_the_selection(
    %h: tensor<?x352xf32>, %m: tensor<64x352xf32>, %before: tensor<?x1xi32>,
    %emb: tensor<64x352xf32>, %n: index) -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %z0 = tensor.empty(%n) : tensor<?x64xf32>
  %g0 = tensor.empty(%n) : tensor<?x8xf32>
  %i0 = tensor.empty(%n) : tensor<?x8xi32>
  %z = moe.ac_logits
      ins(%h, %m, %before, %emb : tensor<?x352xf32>, tensor<64x352xf32>,
          tensor<?x1xi32>, tensor<64x352xf32>)
      outs(%z0 : tensor<?x64xf32>) -> tensor<?x64xf32>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%g0, %i0 : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}

// -----

// Cosine routers fuse as plain ones do.

// CHECK-LABEL: func @fuses_cosine_logits_into_the_selection
// CHECK-NOT:     moe.
// CHECK:         scf.forall
// CHECK:           %[[Z:.*]] = moe.cosine_logits
// CHECK:           moe.topk_renorm ins(%[[Z]]
// CHECK-NOT:     moe.
func.func @fuses_cosine_logits_into_the_selection(
    %h: tensor<?x352xf32>, %emb: tensor<64x352xf32>, %n: index)
    -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %z0 = tensor.empty(%n) : tensor<?x64xf32>
  %g0 = tensor.empty(%n) : tensor<?x8xf32>
  %i0 = tensor.empty(%n) : tensor<?x8xi32>
  %z = moe.cosine_logits ins(%h, %emb : tensor<?x352xf32>, tensor<64x352xf32>)
      outs(%z0 : tensor<?x64xf32>) -> tensor<?x64xf32>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%g0, %i0 : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}

// -----

// Log-sum-exps without values are cut along their queries, as mixes of values
// are: there may be one sequence and one head.

// CHECK-LABEL: func @tiles_the_queries_of_log_sum_exps
// CHECK:         scf.forall (%[[ROW:.*]]) = (0) to (%{{.*}}) step (64)
// CHECK:           moe.softmax_mix
// CHECK-SAME:        origin(%[[ROW]] :
func.func @tiles_the_queries_of_log_sum_exps(
    %q: tensor<1x1x?x16xf32>, %mask: tensor<1x?xi1>, %l: tensor<1x1x?xf32>,
    %s: tensor<1x1x?xf32>) -> (tensor<1x1x?xf32>, tensor<1x1x?xf32>) {
  %r:2 = moe.softmax_mix ins(%q, %q : tensor<1x1x?x16xf32>, tensor<1x1x?x16xf32>)
      query_mask(%mask : tensor<1x?xi1>) key_mask(%mask : tensor<1x?xi1>)
      outs(%l, %s : tensor<1x1x?xf32>, tensor<1x1x?xf32>)
      {visibility = #moe.visibility<causal>, with_entropy = true}
      -> tensor<1x1x?xf32>, tensor<1x1x?xf32>
  return %r#0, %r#1 : tensor<1x1x?xf32>, tensor<1x1x?xf32>
}

// -----

// A batch of products keeps its columns.

// CHECK-LABEL: func @keeps_the_columns_of_batched_products
// CHECK:         scf.forall (%{{.*}}, %{{.*}}) = (0, 0) to (4, 128) step (1, 64)
// CHECK:           linalg.batch_matmul
func.func @keeps_the_columns_of_batched_products(
    %a: tensor<4x128x32xf32>, %b: tensor<4x32x16xf32>, %c: tensor<4x128x16xf32>)
    -> tensor<4x128x16xf32> {
  %r = linalg.batch_matmul ins(%a, %b : tensor<4x128x32xf32>, tensor<4x32x16xf32>)
      outs(%c : tensor<4x128x16xf32>) -> tensor<4x128x16xf32>
  return %r : tensor<4x128x16xf32>
}

// Without rows there are no tiles; a tile of size 0 would mean "whole".

// CHECK-LABEL: func @leaves_ops_without_rows
// CHECK-NOT:     scf.forall
// CHECK:         linalg.generic
// CHECK:         moe.make_finite
func.func @leaves_ops_without_rows(%z: tensor<0x8xf32>, %y: tensor<0x8xf32>)
    -> tensor<0x8xf32> {
  %twice = linalg.generic
      {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>],
       iterator_types = ["parallel", "parallel"]}
      ins(%z : tensor<0x8xf32>) outs(%y : tensor<0x8xf32>) {
  ^bb0(%in: f32, %out: f32):
    %sum = arith.addf %in, %in : f32
    linalg.yield %sum : f32
  } -> tensor<0x8xf32>
  %f = moe.make_finite ins(%twice : tensor<0x8xf32>) outs(%y : tensor<0x8xf32>)
      -> tensor<0x8xf32>
  return %f : tensor<0x8xf32>
}

// CHECK-LABEL: func @leaves_sums_over_nothing
// CHECK-NOT:     scf.forall
// CHECK:         linalg.reduce
func.func @leaves_sums_over_nothing(%x: tensor<8x0xf32>, %y: tensor<8xf32>, %z: tensor<8x4xf32>)
    -> tensor<8x4xf32> {
  %sum = linalg.reduce { arith.addf } ins(%x : tensor<8x0xf32>) outs(%y : tensor<8xf32>)
      dimensions = [1]
  %wide = linalg.broadcast ins(%sum : tensor<8xf32>) outs(%z : tensor<8x4xf32>)
      dimensions = [1]
  return %wide : tensor<8x4xf32>
}

// -----

// A tile has several rows of the loop along which the rows of a batched product
// share a matrix, also where a consumer transposes them and has it as its outer
// loop. Of the innermost loop each row would come with a matrix of its own.

// CHECK-LABEL: func @cuts_rows_that_share_a_matrix
// CHECK:         scf.forall (%[[ROW:.*]], %[[GROUP:.*]]) = (0, 0) to (%{{.*}}, 8) step (64, 1)
// CHECK-DAG:       tensor.extract_slice %{{.*}}[%[[ROW]], %[[GROUP]], 0] {{.*}} : tensor<?x8x256xf32> to tensor<?x1x256xf32>
// CHECK-DAG:       tensor.extract_slice %{{.*}}[%[[GROUP]], 0, 0] {{.*}} : tensor<8x32x256xf32> to tensor<1x32x256xf32>
func.func @cuts_rows_that_share_a_matrix(%x: tensor<?x8x256xf32>,
    %w: tensor<8x32x256xf32>, %y0: tensor<8x?x32xf32>, %t0: tensor<?x8x32xf32>)
    -> tensor<?x8x32xf32> {
  %y = linalg.generic
      {indexing_maps = [affine_map<(g, n, m, k) -> (n, g, k)>, affine_map<(g, n, m, k) -> (g, m, k)>, affine_map<(g, n, m, k) -> (g, n, m)>],
       iterator_types = ["parallel", "parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<?x8x256xf32>, tensor<8x32x256xf32>)
      outs(%y0 : tensor<8x?x32xf32>) {
  ^bb0(%a: f32, %b: f32, %sum: f32):
    %product = arith.mulf %a, %b : f32
    %next = arith.addf %sum, %product : f32
    linalg.yield %next : f32
  } -> tensor<8x?x32xf32>
  %t = linalg.generic
      {indexing_maps = [affine_map<(n, g, m) -> (g, n, m)>, affine_map<(n, g, m) -> (n, g, m)>],
       iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%y : tensor<8x?x32xf32>) outs(%t0 : tensor<?x8x32xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<?x8x32xf32>
  return %t : tensor<?x8x32xf32>
}

// -----

// Heads that share keys read them where they lie: no head has a copy.

// CHECK-DAG:   #[[SHARED:.*]] = affine_map<()[s0] -> (s0 floordiv 4)>
// CHECK-LABEL: func @slices_what_is_broadcast
// CHECK-SAME:    %[[Q:[^:]*]]: tensor<1x8x?x64xf32>, %[[K:[^:]*]]: tensor<1x2x1x?x64xf32>
// CHECK-NOT:     linalg.generic
// CHECK:         scf.forall (%[[HEAD:[^,]*]], %{{[^,]*}}) =
// CHECK:           %[[OWN:.*]] = affine.apply #[[SHARED]]()[%[[HEAD]]]
// CHECK:           tensor.extract_slice %[[K]][0, %[[OWN]], 0, 0, 0] [1, 1, 1, %{{.*}}, 64]
// CHECK-SAME:        to tensor<1x1x?x64xf32>
// CHECK:           moe.softmax_mix
#shared = affine_map<(b, g, h, n, d) -> (b, g, 0, n, d)>
#each = affine_map<(b, g, h, n, d) -> (b, g, h, n, d)>
func.func @slices_what_is_broadcast(%q: tensor<1x8x?x64xf32>, %k: tensor<1x2x1x?x64xf32>,
    %mix: tensor<1x8x?x64xf32>, %lse: tensor<1x8x?xf32>, %entropy: tensor<1x8x?xf32>) -> tensor<1x8x?x64xf32> {
  %c3 = arith.constant 3 : index
  %n = tensor.dim %k, %c3 : tensor<1x2x1x?x64xf32>
  %e = tensor.empty(%n) : tensor<1x2x4x?x64xf32>
  %b = linalg.generic {indexing_maps = [#shared, #each],
      iterator_types = ["parallel", "parallel", "parallel", "parallel", "parallel"]}
      ins(%k : tensor<1x2x1x?x64xf32>) outs(%e : tensor<1x2x4x?x64xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<1x2x4x?x64xf32>
  %keys = tensor.collapse_shape %b [[0], [1, 2], [3], [4]] : tensor<1x2x4x?x64xf32> into tensor<1x8x?x64xf32>
  %r:3 = moe.softmax_mix ins(%q, %keys : tensor<1x8x?x64xf32>, tensor<1x8x?x64xf32>)
      values(%keys : tensor<1x8x?x64xf32>)
      outs(%mix, %lse, %entropy : tensor<1x8x?x64xf32>, tensor<1x8x?xf32>, tensor<1x8x?xf32>)
      {scale = 1.0, visibility = #moe.visibility<>, precision = #moe.precision<ieee>, with_entropy = true}
      -> tensor<1x8x?x64xf32>, tensor<1x8x?xf32>, tensor<1x8x?xf32>
  return %r#0 : tensor<1x8x?x64xf32>
}

// -----

// What checks its input is no copy that could be left out.

// CHECK-LABEL: func @keeps_checks_of_what_is_broadcast
// CHECK:         cf.assert
// CHECK:         scf.forall
// CHECK:           arith.addi
#row = affine_map<(n, d) -> (d)>
#all = affine_map<(n, d) -> (n, d)>
func.func @keeps_checks_of_what_is_broadcast(%x: tensor<64xi64>, %y: tensor<?x64xi64>, %e: tensor<64xi64>,
    %out: tensor<?x64xi64>) -> tensor<?x64xi64> {
  %c8 = arith.constant 8 : i64
  %a = linalg.generic {indexing_maps = [affine_map<(d) -> (d)>, affine_map<(d) -> (d)>], iterator_types = ["parallel"]}
      ins(%x : tensor<64xi64>) outs(%e : tensor<64xi64>) {
  ^bb0(%in: i64, %o: i64):
    %ok = arith.cmpi slt, %in, %c8 : i64
    cf.assert %ok, "expected less than 8"
    linalg.yield %in : i64
  } -> tensor<64xi64>
  %b = linalg.generic {indexing_maps = [#row, #all, #all], iterator_types = ["parallel", "parallel"]}
      ins(%a, %y : tensor<64xi64>, tensor<?x64xi64>) outs(%out : tensor<?x64xi64>) {
  ^bb0(%i: i64, %j: i64, %o: i64):
    %0 = arith.addi %i, %j : i64
    linalg.yield %0 : i64
  } -> tensor<?x64xi64>
  return %b : tensor<?x64xi64>
}

// -----

// What is computed of a few streams of a row is computed where they are summed.

// CHECK-LABEL: func @computes_a_few_rows_where_they_are_summed
// CHECK:         scf.forall
// CHECK:           arith.mulf
// CHECK:           arith.addf
// CHECK:         scf.forall.in_parallel
// CHECK-NOT:     scf.forall
// CHECK:         return
#streams = affine_map<(n, s, d) -> (n, s, d)>
#weight = affine_map<(n, s, d) -> (n, s)>
#sum = affine_map<(n, s, d) -> (n, d)>
func.func @computes_a_few_rows_where_they_are_summed(%x: tensor<?x4x64xf32>, %w: tensor<?x4xf32>,
    %e: tensor<?x4x64xf32>, %zeros: tensor<?x64xf32>) -> tensor<?x64xf32> {
  %y = linalg.generic {indexing_maps = [#streams, #weight, #streams],
      iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%x, %w : tensor<?x4x64xf32>, tensor<?x4xf32>) outs(%e : tensor<?x4x64xf32>) {
  ^bb0(%in: f32, %s: f32, %out: f32):
    %0 = arith.mulf %in, %s : f32
    linalg.yield %0 : f32
  } -> tensor<?x4x64xf32>
  %s = linalg.generic {indexing_maps = [#streams, #sum], iterator_types = ["parallel", "reduction", "parallel"]}
      ins(%y : tensor<?x4x64xf32>) outs(%zeros : tensor<?x64xf32>) {
  ^bb0(%in: f32, %out: f32):
    %0 = arith.addf %out, %in : f32
    linalg.yield %0 : f32
  } -> tensor<?x64xf32>
  return %s : tensor<?x64xf32>
}
