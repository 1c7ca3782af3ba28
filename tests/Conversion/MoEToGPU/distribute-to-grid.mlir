// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_90 --moe-distribute-to-grid | FileCheck %s

// An elementwise op is shared by the threads of all blocks.

// CHECK-LABEL: func.func @elementwise
// CHECK:         scf.forall (%[[BLOCK:.*]]) in (4) {
// CHECK:           %[[FIRST:.*]] = arith.muli %[[BLOCK]], %c128
// CHECK:           %[[THREAD:.*]] = arith.addi %[[FIRST]], %{{.*}}
// CHECK:           scf.for %{{.*}} = %[[THREAD]] to %{{.*}} step %c512
// CHECK:             memref.load
// CHECK:             arith.negf
// CHECK:             memref.store
// CHECK:         } {mapping = [#gpu.block<x>]}
func.func @elementwise(%x: memref<16x32xf32>, %y: memref<16x32xf32>) {
  linalg.generic
      {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>],
       iterator_types = ["parallel", "parallel"]}
      ins(%x : memref<16x32xf32>) outs(%y : memref<16x32xf32>) {
  ^bb0(%in: f32, %out: f32):
    %n = arith.negf %in : f32
    linalg.yield %n : f32
  }
  return
}

// -----

// A sum over tokens into few results: 64 parts, then their sum in order. No
// atomics.

// CHECK-LABEL: func.func @long_reduction
// CHECK:         %[[PARTS:.*]] = memref.alloc() : memref<64x4xf32>
// CHECK:         scf.forall (%[[PART:.*]]) in (64) {
// CHECK:           scf.for
// CHECK:             scf.for
// CHECK-COUNT-5:     gpu.shuffle xor
// CHECK:             memref.store %{{.*}}, %[[PARTS]][%[[PART]],
// CHECK:         scf.forall (%{{.*}}) in (1) {
// CHECK:             scf.for %{{.*}} = %c0{{.*}} to %c64
// CHECK:               memref.load %[[PARTS]]
// CHECK:               arith.addf
// CHECK-NOT:     atomic
func.func @long_reduction(%x: memref<?x4xf32>, %y: memref<4xf32>) {
  linalg.generic
      {indexing_maps = [affine_map<(n, d) -> (n, d)>, affine_map<(n, d) -> (d)>],
       iterator_types = ["reduction", "parallel"]}
      ins(%x : memref<?x4xf32>) outs(%y : memref<4xf32>) {
  ^bb0(%in: f32, %acc: f32):
    %s = arith.addf %acc, %in : f32
    linalg.yield %s : f32
  }
  return
}

// -----

// What no associative op combines is folded in order by one thread a point.

// CHECK-LABEL: func.func @in_order
// CHECK:         scf.forall
// CHECK:           scf.for
// CHECK:             scf.for %{{.*}} = %c0
// CHECK:               arith.subf
// CHECK-NOT:       gpu.shuffle
func.func @in_order(%x: memref<?x4xf32>, %y: memref<4xf32>) {
  linalg.generic
      {indexing_maps = [affine_map<(n, d) -> (n, d)>, affine_map<(n, d) -> (d)>],
       iterator_types = ["reduction", "parallel"]}
      ins(%x : memref<?x4xf32>) outs(%y : memref<4xf32>) {
  ^bb0(%in: f32, %acc: f32):
    %s = arith.subf %in, %acc : f32
    linalg.yield %s : f32
  }
  return
}

// -----

// A block sets a bit for each choice of its tokens and counts the bits that pairs
// of experts share. Where the blocks of a cluster suffice, they add up each other's
// counts and blend. More clusters leave their counts to a second loop, whose number
// of blocks is 0 without them. The number of choices need not be known.

// CHECK-DAG:     #[[PARTS_MAP:.*]] = affine_map<()[s0] -> (s0 floordiv 504 + 1)>
// CHECK-DAG:     #[[MORE_MAP:.*]] = affine_map<()[s0] -> (s0 floordiv 504)>
// CHECK-LABEL: func.func @adjacency
// CHECK:         %[[PARTS:.*]] = affine.apply #[[PARTS_MAP]]
// CHECK:         %[[MORE:.*]] = affine.apply #[[MORE_MAP]]
// CHECK:         %[[COUNTS:.*]] = memref.alloc(%[[PARTS]]) : memref<?x137xi32>
// CHECK:         scf.forall (%[[PART:.*]], %[[RANK:.*]]) in (%{{.*}}, 4) {
// CHECK:           memref.alloc() : memref<137xi32>
// CHECK:           memref.alloc() : memref<64xi32>
// CHECK:           gpu.barrier
// CHECK:           llvm.atomicrmw _or {{.*}} monotonic
// CHECK:           nvvm.vote.sync ballot
// CHECK:           gpu.barrier
// CHECK:           vector.load {{.*}} : memref<64xi32>, vector<4xi32>
// CHECK:           llvm.ctpop
// CHECK:           nvvm.cluster.wait {aligned}
// CHECK:           scf.if
// CHECK:             nvvm.mapa
// CHECK:             arith.divf
// CHECK:           scf.if
// CHECK:             nvvm.mapa
// CHECK:             memref.store %{{.*}}, %[[COUNTS]][%[[PART]],
// CHECK:           nvvm.cluster.wait {aligned}
// CHECK:         moe.cluster_blocks = 4
// CHECK:         scf.forall ({{.*}}) in (%[[MORE]]) {
// CHECK:           arith.divf
// CHECK-NOT:     {{ moe[.]}}
func.func @adjacency(%a: memref<16x16xf32>, %indices: memref<?x?xi32>,
                     %new: memref<16x16xf32>) {
  moe.adjacency_update ins(%a, %indices : memref<16x16xf32>, memref<?x?xi32>)
      outs(%new : memref<16x16xf32>)
  return
}

// -----

// A number of tokens that one cluster counts needs no second loop.

// CHECK-LABEL: func.func @small_adjacency
// CHECK-NOT:     memref.alloc
// CHECK:         scf.forall (%{{.*}}, %{{.*}}) in (1, 4) {
// CHECK-NOT:     scf.forall
func.func @small_adjacency(%a: memref<16x16xf32>, %indices: memref<100x2xi32>,
                           %new: memref<16x16xf32>) {
  moe.adjacency_update ins(%a, %indices : memref<16x16xf32>, memref<100x2xi32>)
      outs(%new : memref<16x16xf32>)
  return
}

// -----

// A large graph is counted in place, after it is cleared, by atomics on integers.

// CHECK-LABEL: func.func @large_adjacency
// CHECK:         memref.alloc() : memref<32897xi32>
// CHECK-COUNT-3: scf.forall
func.func @large_adjacency(%a: memref<256x256xf32>, %indices: memref<?x8xi64>,
                           %new: memref<256x256xf32>) {
  moe.adjacency_update ins(%a, %indices : memref<256x256xf32>, memref<?x8xi64>)
      outs(%new : memref<256x256xf32>)
  return
}

// -----

// The first loop does both passes if one part of the tokens is enough; the
// others are there for more. 130 clusters are three ranges of a table, 300
// columns five slabs of 64.

// CHECK-LABEL: func.func @dispersion
// CHECK:         scf.forall (%{{.*}}, %{{.*}}, %{{.*}}) in (15, %{{.*}}, 8) {
// CHECK:           memref.alloc() : memref<33280xf32>
// CHECK:           nvvm.vote.sync
// CHECK:           nvvm.cluster.wait
// CHECK:           llvm.call_intrinsic "llvm.fabs.f32"
// CHECK:         scf.forall (%{{.*}}) in (%{{.*}})
// CHECK:         scf.forall (%{{.*}}, %{{.*}}, %{{.*}}) in (15, %{{.*}}, 8) {
// CHECK:           llvm.call_intrinsic "llvm.fabs.f32"
// CHECK:         scf.forall (%{{.*}}) in (%{{.*}})
// CHECK-NOT:     scf.forall
func.func @dispersion(%h: memref<?x300xbf16>, %assign: memref<?xi32>,
                      %s: memref<130x300xf32>, %mean: memref<130x300xf32>,
                      %count: memref<130xi32>) {
  moe.mad_dispersion ins(%h, %assign : memref<?x300xbf16>, memref<?xi32>)
      outs(%s, %mean, %count
           : memref<130x300xf32>, memref<130x300xf32>, memref<130xi32>)
  return
}

// -----

// An op without rows is the work of one block.

// CHECK-LABEL: func.func @one_row
// CHECK:         scf.forall (%{{.*}}) in (1) {
// CHECK-NEXT:      moe.topk_renorm
func.func @one_row(%z: memref<16xf32>, %gates: memref<2xf32>,
                   %indices: memref<2xi32>) {
  moe.topk_renorm ins(%z : memref<16xf32>)
      outs(%gates, %indices : memref<2xf32>, memref<2xi32>)
  return
}

// -----

// A store outside of loops is one of a single thread.

// CHECK-LABEL: func.func @one_element
// CHECK:         scf.forall (%[[BLOCK:.*]]) in (1)
// CHECK:           %[[THREAD:.*]] = gpu.thread_id x
// CHECK:           %[[FIRST:.*]] = arith.cmpi eq
// CHECK:           scf.if %[[FIRST]] {
// CHECK-NEXT:        memref.store %{{.*}}, %{{.*}}[%{{.*}}] : memref<4xf32>
func.func @one_element(%value: f32, %place: index, %out: memref<4xf32>) {
  memref.store %value, %out[%place] : memref<4xf32>
  return
}

// -----

// The sizes of a reshape are no work of a kernel.

// CHECK-LABEL: func.func @sizes
// CHECK-NOT:     scf.forall
// CHECK:         return
func.func @sizes(%size: index, %shape: memref<2xindex>) {
  %c0 = arith.constant 0 : index
  memref.store %size, %shape[%c0] : memref<2xindex>
  return
}
