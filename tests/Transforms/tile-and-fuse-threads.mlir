// RUN: %moe-opt %s --pass-pipeline='builtin.module(moe-declare-thread-count,moe-select-kernel-config,func.func(moe-tile-and-fuse{tile-size=96}),canonicalize)' | FileCheck %s --check-prefixes=CHECK,ASKED
// RUN: %moe-opt %s --pass-pipeline='builtin.module(moe-select-kernel-config,func.func(moe-tile-and-fuse{tile-size=96}),canonicalize)' | FileCheck %s --check-prefixes=CHECK,FIXED
// RUN: %moe-opt %s --pass-pipeline='builtin.module(moe-declare-thread-count,func.func(moe-tile-and-fuse{tile-size=96}),canonicalize)' | FileCheck %s --check-prefixes=CHECK,SMALL

// Every tile of a mixing prepares all keys for its queries: tiles are large as
// long as each thread has four of them, or as there is but one thread.

// CHECK-LABEL: func.func @mixes
// ASKED:         %[[COUNT:.*]] = call @moe_get_num_threads() : () -> i32
// ASKED:         %[[THREADS:.*]] = arith.index_cast %[[COUNT]]
// ASKED:         %[[TILES:.*]] = arith.muli
// ASKED:         %[[ALONE:.*]] = arith.cmpi eq, %[[THREADS]]
// ASKED:         %[[ENOUGH:.*]] = arith.muli %[[THREADS]], %{{.*}}
// ASKED:         %[[MANY:.*]] = arith.cmpi sge, %[[TILES]], %[[ENOUGH]]
// ASKED:         %[[EITHER:.*]] = arith.ori %[[ALONE]], %[[MANY]]
// ASKED:         %[[ROWS:.*]] = arith.select %[[EITHER]], %c192, %c96
// ASKED:         scf.forall {{.*}} step (1, 1, %[[ROWS]])
// FIXED:         scf.forall {{.*}} step (1, 1, 192)
// SMALL:         scf.forall {{.*}} step (1, 1, 96)
func.func @mixes(%q: tensor<2x3x?x8xf32>, %k: tensor<2x3x?x8xf32>,
    %v: tensor<2x?x4xf32>, %m0: tensor<2x3x?x4xf32>, %l0: tensor<2x3x?xf32>)
    -> (tensor<2x3x?x4xf32>, tensor<2x3x?xf32>) {
  %r:2 = moe.softmax_mix ins(%q, %k : tensor<2x3x?x8xf32>, tensor<2x3x?x8xf32>)
      values(%v : tensor<2x?x4xf32>)
      outs(%m0, %l0 : tensor<2x3x?x4xf32>, tensor<2x3x?xf32>)
      -> tensor<2x3x?x4xf32>, tensor<2x3x?xf32>
  return %r#0, %r#1 : tensor<2x3x?x4xf32>, tensor<2x3x?xf32>
}

// So they are where what takes the mixes lays heads side by side: its innermost
// loop is then the one over heads.

// CHECK-LABEL: func.func @lays_heads_side_by_side
// ASKED:         %[[ROWS:.*]] = arith.select %{{.*}}, %c192, %c96
// ASKED:         scf.forall {{.*}} step (%[[ROWS]], 1)
// FIXED:         scf.forall {{.*}} step (192, 1)
// SMALL:         scf.forall (%{{[^,]*}}) in
// CHECK:           moe.softmax_mix
// CHECK:           linalg.generic
func.func @lays_heads_side_by_side(%q: tensor<1x3x?x8xf32>,
    %k: tensor<1x3x?x8xf32>, %v: tensor<1x3x?x8xf32>, %m0: tensor<1x3x?x8xf32>,
    %l0: tensor<1x3x?xf32>, %y0: tensor<?x3x8xf32>) -> tensor<?x3x8xf32> {
  %r:2 = moe.softmax_mix ins(%q, %k : tensor<1x3x?x8xf32>, tensor<1x3x?x8xf32>)
      values(%v : tensor<1x3x?x8xf32>)
      outs(%m0, %l0 : tensor<1x3x?x8xf32>, tensor<1x3x?xf32>)
      -> tensor<1x3x?x8xf32>, tensor<1x3x?xf32>
  %y = linalg.generic
      {indexing_maps = [affine_map<(i, h, e) -> (0, h, i, e)>, affine_map<(i, h, e) -> (i, h, e)>],
       iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%r#0 : tensor<1x3x?x8xf32>) outs(%y0 : tensor<?x3x8xf32>) {
  ^bb0(%in: f32, %out: f32):
    linalg.yield %in : f32
  } -> tensor<?x3x8xf32>
  return %y : tensor<?x3x8xf32>
}

// A selection prepares nothing.

// CHECK-LABEL: func.func @selects
// CHECK-NOT:     moe_get_num_threads
// CHECK:         scf.forall {{.*}} step (96)
func.func @selects(%z: tensor<?x64xf32>, %g0: tensor<?x8xf32>,
    %i0: tensor<?x8xi32>) -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x64xf32>)
      outs(%g0, %i0 : tensor<?x8xf32>, tensor<?x8xi32>)
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %g, %i : tensor<?x8xf32>, tensor<?x8xi32>
}

// ASKED:         func.func private @moe_get_num_threads() -> i32
