// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_90 --moe-distribute-to-grid --mlir-print-local-scope | FileCheck %s
// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_90 --moe-distribute-to-grid --convert-moe-to-gpu --canonicalize --mlir-print-local-scope | FileCheck %s --check-prefix=LAUNCH

// Clusters count their parts of the assignments, then every block adds up what
// they have counted and places its own part: no comparison of pairs. Lanes with
// the same expert find each other by a ballot a bit, 7 bits for 64 experts and
// none; the tables of four warps are added up in order.

// CHECK-LABEL: func.func @dispatch
// CHECK:         %[[CLUSTERS:.*]] = affine.apply affine_map<()[s0] -> ((s0 ceildiv 64 + 5) floordiv 8)>
// CHECK:         %[[TOTALS:.*]] = memref.alloc(%[[CLUSTERS]]) : memref<?x64xi32>
// CHECK:         %[[BEFORE:.*]] = memref.alloc(%{{.*}}) : memref<?x64xi32>
// CHECK:         scf.forall (%{{.*}}, %{{.*}}) in (%[[CLUSTERS]], 8) {
// CHECK-COUNT-4:   llvm.atomicrmw add {{.*}} monotonic
// CHECK:           nvvm.cluster.wait {aligned}
// CHECK-COUNT-8:   nvvm.mapa
// CHECK:           memref.store %{{.*}}, %[[TOTALS]]
// CHECK:           nvvm.cluster.wait {aligned}
// CHECK:         moe.cluster_blocks = 8
// CHECK:         scf.forall
// CHECK:           memref.load %[[TOTALS]]
// CHECK:           memref.load %[[BEFORE]]
// CHECK:           memref.store %{{.*}}, %arg2
// CHECK:           memref.store %{{.*}}, %arg3
// CHECK-COUNT-7:   nvvm.vote.sync
// CHECK:           memref.store %{{.*}}, %arg1
// CHECK-NOT:     {{ moe[.]}}

// Up to 128 tokens, 1024 assignments, there is no launch but the last one.
// LAUNCH-LABEL: func.func @dispatch
// LAUNCH-SAME:    grid = affine_map<()[s0, s1, s2] -> (((s0 ceildiv 64 + 5) floordiv 8) * 8, 1, 1)>
// LAUNCH-SAME:    grid = affine_map<()[s0, s1, s2] -> (((s0 ceildiv 64 + 5) floordiv 8) * 8 + 1, 1, 1)>
// LAUNCH-SAME:    moe.workspace = affine_map<()[s0, s1] -> (((s0 ceildiv 64 + 5) floordiv 8) * 2304)>
func.func @dispatch(%ids: memref<?x8xi64>, %slots: memref<?x8xi64>,
                    %offsets: memref<65xi32>, %counts: memref<64xi32>) {
  moe.dispatch ins(%ids : memref<?x8xi64>)
      outs(%slots, %offsets, %counts : memref<?x8xi64>, memref<65xi32>, memref<64xi32>)
  return
}

// -----

// What is known to be few is one block's from the start.

// CHECK-LABEL: func.func @few
// CHECK-NOT:     memref.alloc(
// CHECK:         scf.forall (%{{.*}}) in (1) {
// CHECK-NOT:     scf.forall
// LAUNCH-LABEL: func.func @few
// LAUNCH-NOT:     moe.workspace
func.func @few(%ids: memref<32x8xi32>, %slots: memref<32x8xi32>,
               %offsets: memref<257xi32>, %counts: memref<256xi32>) {
  moe.dispatch ins(%ids : memref<32x8xi32>)
      outs(%slots, %offsets, %counts : memref<32x8xi32>, memref<257xi32>, memref<256xi32>)
  return
}

// -----

// A cleared row and a written one are apart: loops after one another, of which
// the first has no blocks where one block does both.

// CHECK-LABEL: func.func @token_rows
// CHECK:         scf.forall
// CHECK:           memref.store %{{.*}}, %arg1
// CHECK:         scf.forall
// CHECK:           scf.if
// CHECK:             gpu.barrier
// CHECK-COUNT-4:   memref.store %{{.*}}, %arg1
// CHECK-NOT:     {{ moe[.]}}
// LAUNCH-LABEL: func.func @token_rows
// LAUNCH-SAME:    grid = affine_map<()[s0, s1] -> (((s0 * 8 + s1) floordiv 4096) * 4, 1, 1)>
// LAUNCH-SAME:    grid = affine_map<()[s0, s1] -> (((s0 * 8 + s1) floordiv 4096) * 4 + 1, 1, 1)>
func.func @token_rows(%slots: memref<?x8xi64>, %rows: memref<?xi64>) {
  moe.token_rows ins(%slots : memref<?x8xi64>) outs(%rows : memref<?xi64>)
  return
}

// -----

// A thread has eight features, one access of a row, and asks for the rows of
// eight choices before it adds them up. One token of 2048 features is two
// blocks.

// CHECK-LABEL: func.func @combine
// CHECK:         scf.forall (%{{.*}}, %{{.*}}) in (2, %{{.*}}) {
// CHECK-COUNT-8:   vector.load %arg0{{.*}} {alignment = 16 : i64} : memref<?x2048xbf16>, vector<8xbf16>
// CHECK-COUNT-64:  llvm.call_intrinsic "llvm.fma.f32"
// CHECK:           vector.store %{{.*}}, %arg3
// CHECK-NOT:     {{ moe[.]}}
// LAUNCH-LABEL: func.func @combine
// LAUNCH-SAME:    grid = affine_map<()[s0, s1, s2, s3] -> (s1, 2, 1)>
func.func @combine(%out: memref<?x2048xbf16>, %gates: memref<?x8xf32>,
                   %slots: memref<?x8xi64>, %y: memref<?x2048xbf16>) {
  moe.combine ins(%out, %gates, %slots : memref<?x2048xbf16>, memref<?x8xf32>, memref<?x8xi64>)
      outs(%y : memref<?x2048xbf16>)
  return
}

// -----

// Features that are no whole accesses are read one by one, and tokens of few of
// them share a block: 128 threads are 16 tokens of 7 features.

// CHECK-LABEL: func.func @narrow_combine
// CHECK:         scf.forall (%{{.*}}, %{{.*}}) in (1, %{{.*}}) {
// CHECK-NOT:       vector.load
// LAUNCH-LABEL: func.func @narrow_combine
// LAUNCH-SAME:    grid = affine_map<()[s0, s1, s2, s3] -> (s1 ceildiv 16, 1, 1)>
func.func @narrow_combine(%out: memref<?x7xbf16>, %gates: memref<?x2xf32>,
                          %slots: memref<?x2xi64>, %y: memref<?x7xbf16>) {
  moe.combine ins(%out, %gates, %slots : memref<?x7xbf16>, memref<?x2xf32>, memref<?x2xi64>)
      outs(%y : memref<?x7xbf16>)
  return
}
