// RUN: %moe-opt %s --pass-pipeline='builtin.module(moe-declare-thread-count,func.func(moe-tile-and-fuse,moe-fuse-reductions),canonicalize,cse)' | FileCheck %s

// A part a thread: each has a table to clear and to combine.

// CHECK-DAG:   #[[TILES:.*]] = affine_map<()[s0] -> (s0 ceildiv 64)>
// CHECK-DAG:   #[[ROWS:.*]] = affine_map<()[s0] -> (64, s0 * 64)>
// CHECK-LABEL: func.func @counts
// CHECK-DAG:     %[[MOST:.*]] = arith.constant 64 : index
// CHECK:         %[[COUNT:.*]] = call @moe_get_num_threads() : () -> i32
// CHECK:         %[[THREADS:.*]] = arith.index_cast %[[COUNT]]
// CHECK:         %[[ALL:.*]] = affine.apply #[[TILES]]()[%[[N:.*]]]
// CHECK:         %[[PARTS:.*]] = arith.minsi %[[THREADS]], %[[MOST]]
// CHECK:         %[[OWN:.*]] = arith.ceildivsi %[[ALL]], %[[PARTS]]
// CHECK:         %[[PART_ROWS:.*]] = affine.max #[[ROWS]]()[%[[OWN]]]
// CHECK:         scf.forall {{.*}} = (0) to (%[[N]]) step (%[[PART_ROWS]])
// CHECK:           moe.co_selections
func.func @counts(%z: tensor<?x16xf32>, %a: tensor<16x16xf32>,
    %g0: tensor<?x2xf32>, %i0: tensor<?x2xi32>) -> tensor<16x16xf32> {
  %g, %i = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  %new = moe.adjacency_update ins(%a, %i : tensor<16x16xf32>, tensor<?x2xi32>)
      outs(%a : tensor<16x16xf32>) -> tensor<16x16xf32>
  return %new : tensor<16x16xf32>
}
