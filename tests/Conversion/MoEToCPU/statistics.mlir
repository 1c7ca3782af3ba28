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

// -----

// Many tokens are counted as bits, 64 experts' of 4096 tokens at a time; few,
// also at the end of many, one by one.

// CHECK-LABEL: func.func @counts_many_as_bits
// CHECK:         memref.alloca() {{.*}} : memref<65x64xi64>
// CHECK:         scf.for {{.*}} step %c4096
// CHECK:           %[[FEWEST:.*]] = arith.constant 720 : index
// CHECK:           %[[MANY:.*]] = arith.cmpi sge, %{{.*}}, %[[FEWEST]]
// CHECK:           scf.if %[[MANY]]
// CHECK:             math.ctpop {{.*}} : vector<8xi64>
// CHECK:           } else {
func.func @counts_many_as_bits(%indices: memref<?x8xi32>, %counts: memref<64x64xi32>) {
  moe.co_selections ins(%indices : memref<?x8xi32>) outs(%counts : memref<64x64xi32>)
  return
}

// CHECK-LABEL: func.func @counts_few_one_by_one
// CHECK-NOT:     math.ctpop
// CHECK:         return
func.func @counts_few_one_by_one(%indices: memref<96x8xi32>, %counts: memref<64x64xi32>) {
  moe.co_selections ins(%indices : memref<96x8xi32>) outs(%counts : memref<64x64xi32>)
  return
}
