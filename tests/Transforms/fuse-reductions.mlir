// RUN: %moe-opt %s --moe-tile-and-fuse --moe-fuse-reductions --canonicalize --cse --split-input-file | FileCheck %s
// RUN: %moe-opt %s --moe-tile-and-fuse --moe-fuse-reductions --moe-fuse-reductions --canonicalize --cse --split-input-file | FileCheck %s

// Parts of the tokens count into tables of their own, each tile of a part into
// the same one. At most 64 parts of whole tiles, so that the tables do not grow
// with the tokens.

// CHECK-DAG:   #[[ROWS:.*]] = affine_map<()[s0] -> ((s0 ceildiv 4096) * 64, 64)>
// CHECK-LABEL: func @counts_in_the_loop_that_selects
// CHECK-SAME:    %[[Z:[^:]*]]: tensor<?x16xf32>, %[[A:[^:]*]]: tensor<16x16xf32>
// CHECK:         %[[PART_ROWS:.*]] = affine.max #[[ROWS]]()[%[[N:.*]]]
// CHECK:         %[[EMPTY:.*]] = linalg.fill {{.*}} -> tensor<?x16x16xi32>
// CHECK:         %[[LOOP:.*]]:3 = scf.forall (%[[FIRST:.*]]) = (0) to (%[[N]]) step (%[[PART_ROWS]]) shared_outs(%{{.*}}, %{{.*}}, %[[TABLES:.*]] = %[[EMPTY]])
// CHECK:           %[[PART:.*]] = arith.divui %[[FIRST]], %[[PART_ROWS]]
// CHECK:           %[[TILES:.*]]:3 = scf.for %[[ROW:.*]] = %[[FIRST]] to %{{.*}} step %c64 iter_args(%{{.*}}, %{{.*}}, %[[BEFORE:.*]] = %[[TABLES]])
// CHECK:             %[[CHOICE:.*]]:2 = moe.topk_renorm
// CHECK:             %[[TABLE:.*]] = tensor.extract_slice %[[BEFORE]][%[[PART]], 0, 0] [1, 16, 16]
// CHECK:             %[[COUNTED:.*]] = moe.co_selections ins(%[[CHOICE]]#1 {{.*}} outs(%[[TABLE]]
// CHECK:             tensor.insert_slice %[[COUNTED]] into %[[BEFORE]][%[[PART]], 0, 0]
// CHECK:           scf.forall.in_parallel
// CHECK:         linalg.generic {{.*}} ins(%[[LOOP]]#2 : tensor<?x16x16xi32>)
// CHECK-NOT:     moe.adjacency_update
func.func @counts_in_the_loop_that_selects(
    %z: tensor<?x16xf32>, %a: tensor<16x16xf32>, %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>, tensor<16x16xf32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  %new = moe.adjacency_update ins(%a, %i : tensor<16x16xf32>, tensor<?x2xi32>)
      outs(%a : tensor<16x16xf32>) -> tensor<16x16xf32>
  return %g, %i, %new : tensor<?x2xf32>, tensor<?x2xi32>, tensor<16x16xf32>
}

// -----

// A static number of tokens: 5 parts of a tile. The mask is cut like the
// tokens, and choices that nothing else reads are not stored.

// CHECK-LABEL: func @cuts_the_mask_and_stores_no_choices
// CHECK-SAME:    %[[MASK:[^:]*]]: tensor<320xi1>
// CHECK:         %[[LOOP:.*]] = scf.forall (%[[FIRST:.*]]) = (0) to (320) step (64) {{.*}} -> (tensor<5x16x16xi32>)
// CHECK:           %[[CHOICE:.*]]:2 = moe.topk_renorm
// CHECK:           %[[REAL:.*]] = tensor.extract_slice %[[MASK]]
// CHECK:           moe.co_selections ins(%[[CHOICE]]#1 {{.*}} mask(%[[REAL]]
// CHECK-NOT:     scf.forall (
func.func @cuts_the_mask_and_stores_no_choices(
    %z: tensor<320x16xf32>, %mask: tensor<320xi1>, %a: tensor<16x16xf32>) -> tensor<16x16xf32> {
  %g0 = tensor.empty() : tensor<320x2xf32>
  %i0 = tensor.empty() : tensor<320x2xi32>
  %g, %i = moe.topk_renorm ins(%z : tensor<320x16xf32>)
      outs(%g0, %i0 : tensor<320x2xf32>, tensor<320x2xi32>)
      -> tensor<320x2xf32>, tensor<320x2xi32>
  %new = moe.adjacency_update ins(%a, %i : tensor<16x16xf32>, tensor<320x2xi32>)
      mask(%mask : tensor<320xi1>) outs(%a : tensor<16x16xf32>) -> tensor<16x16xf32>
  return %new : tensor<16x16xf32>
}

// -----

// A sum of floats in another order has other bits: it is left alone.

// CHECK-LABEL: func @leaves_sums_whose_order_matters
// CHECK:         scf.forall
// CHECK-NOT:       scf.for{{ }}
// CHECK:         linalg.generic
func.func @leaves_sums_whose_order_matters(
    %z: tensor<256x16xf32>, %g0: tensor<256x2xf32>, %i0: tensor<256x2xi32>, %s0: tensor<2xf32>)
    -> tensor<2xf32> {
  %g, %i = moe.topk_renorm ins(%z : tensor<256x16xf32>)
      outs(%g0, %i0 : tensor<256x2xf32>, tensor<256x2xi32>)
      -> tensor<256x2xf32>, tensor<256x2xi32>
  %s = linalg.generic {
      indexing_maps = [affine_map<(n, k) -> (n, k)>, affine_map<(n, k) -> (k)>],
      iterator_types = ["reduction", "parallel"]}
      ins(%g : tensor<256x2xf32>) outs(%s0 : tensor<2xf32>) {
  ^bb0(%x: f32, %acc: f32):
    %y = arith.addf %x, %acc : f32
    linalg.yield %y : f32
  } -> tensor<2xf32>
  return %s : tensor<2xf32>
}
