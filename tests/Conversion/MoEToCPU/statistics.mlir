// RUN: %moe-opt %s --convert-moe-to-cpu --split-input-file | FileCheck %s

// Slabs of columns run in parallel, each with its own table of f64 sums.

// CHECK-LABEL: func @measures_dispersion_in_two_passes
// CHECK:         scf.forall
// CHECK:           memref.alloca() {alignment = 64 : i64} : memref<4x256xf64>
// CHECK:           arith.extf %{{.*}} : vector<16xf32> to vector<16xf64>
// CHECK:           math.absf
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
