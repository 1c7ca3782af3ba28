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
