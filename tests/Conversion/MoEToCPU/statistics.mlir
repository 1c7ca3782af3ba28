// RUN: %moe-opt %s --convert-moe-to-cpu --split-input-file | FileCheck %s

// Tokens are sorted by cluster; then clusters and slabs of columns run in
// parallel, sums in registers: four rows in f32, then f64. 300 columns are two
// slabs of 128 and a rest of three vectors, the last of 12 columns. Each of the
// two passes over four rows fetches four of the eight vectors that come next.

// CHECK-LABEL: func @measures_dispersion_in_two_passes
// CHECK:         %[[ORDER:.*]] = memref.alloc(%{{.*}}) {alignment = 64 : i64} : memref<?xi32>
// CHECK:         scf.forall
// CHECK:           iter_args({{.*}}) -> (vector<16xf64>, vector<16xf64>, vector<16xf64>, vector<16xf64>, vector<16xf64>, vector<16xf64>, vector<16xf64>, vector<16xf64>)
// CHECK-COUNT-16:    memref.prefetch %{{.*}}, read, locality<2>, data : memref<?x300xf32>
// CHECK:             arith.extf %{{.*}} : vector<16xf32> to vector<16xf64>
// CHECK-COUNT-16:    memref.prefetch %{{.*}}, read, locality<2>, data : memref<?x300xf32>
// CHECK:             math.absf
// CHECK:           vector.create_mask %c12
// CHECK:           iter_args({{.*}}) -> (vector<16xf64>, vector<16xf64>, vector<16xf64>)
// CHECK:         memref.dealloc %[[ORDER]]
// CHECK-NOT:     moe.
func.func @measures_dispersion_in_two_passes(%h: memref<?x300xf32>, %a: memref<?xi32>,
    %s: memref<4x300xf32>, %m: memref<4x300xf32>, %c: memref<4xi32>) {
  moe.mad_dispersion ins(%h, %a : memref<?x300xf32>, memref<?xi32>)
      outs(%s, %m, %c : memref<4x300xf32>, memref<4x300xf32>, memref<4xi32>)
  return
}

// -----

// Counts are integers, so that no order of tokens changes a bit; they are added
// to what is there.

// CHECK-LABEL: func @counts_co_selections
// CHECK-SAME:    %{{[^:]*}}: memref<?x2xi32>, %[[COUNTS:[^:]*]]: memref<16x16xi32>
// CHECK:         %[[OLD:.*]] = memref.load %[[COUNTS]]
// CHECK:         %[[NEW:.*]] = arith.addi %[[OLD]]
// CHECK:         memref.store %[[NEW]], %[[COUNTS]]
// CHECK-NOT:     moe.
func.func @counts_co_selections(%i: memref<?x2xi32>, %c: memref<16x16xi32>) {
  moe.co_selections ins(%i : memref<?x2xi32>) outs(%c : memref<16x16xi32>)
  return
}
