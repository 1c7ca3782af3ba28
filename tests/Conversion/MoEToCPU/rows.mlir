// RUN: %moe-opt %s --convert-moe-to-cpu --split-input-file | FileCheck %s

#nd = affine_map<(n, d) -> (n, d)>
#n = affine_map<(n, d) -> (n)>

// Whole vectors carry the sum, the lanes that are left are masked, and the old
// value comes last.

// CHECK-LABEL: func @sums_squares_along_rows
// CHECK-SAME:    %[[X:[^:]*]]: memref<?x18xbf16>, %[[OUT:[^:]*]]: memref<?xf64>
// CHECK:         scf.for %[[ROW:.*]] =
// CHECK:           scf.for {{.*}} iter_args(%[[ACC:.*]] = %{{.*}}) -> (vector<16xf64>)
// CHECK:             vector.load %[[X]]{{.*}} vector<16xbf16>
// CHECK:             arith.extf %{{.*}} : vector<16xbf16> to vector<16xf32>
// CHECK:             %[[WIDE:.*]] = arith.extf %{{.*}} : vector<16xf32> to vector<16xf64>
// CHECK:             %[[SQUARE:.*]] = arith.mulf %[[WIDE]], %[[WIDE]] : vector<16xf64>
// CHECK:             arith.addf %[[ACC]], %[[SQUARE]] : vector<16xf64>
// CHECK:           vector.maskedload
// CHECK:           arith.select %{{.*}} : vector<16xi1>, vector<16xf64>
// CHECK:           vector.shuffle
// CHECK:           %[[OLD:.*]] = memref.load %[[OUT]][%[[ROW]]]
// CHECK:           arith.addf %[[OLD]], %{{.*}} : f64
// CHECK-NOT:     linalg.
func.func @sums_squares_along_rows(%x: memref<?x18xbf16>, %out: memref<?xf64>) {
  linalg.generic {indexing_maps = [#nd, #n],
                  iterator_types = ["parallel", "reduction"]}
      ins(%x : memref<?x18xbf16>) outs(%out : memref<?xf64>) {
  ^bb0(%in: bf16, %acc: f64):
    %f = arith.extf %in : bf16 to f32
    %w = arith.extf %f : f32 to f64
    %s = arith.mulf %w, %w : f64
    %r = arith.addf %acc, %s : f64
    linalg.yield %r : f64
  }
  return
}

// -----

#nd = affine_map<(n, d) -> (n, d)>
#n = affine_map<(n, d) -> (n)>

// CHECK-LABEL: func @takes_the_maximum_along_rows
// CHECK:         scf.for {{.*}} -> (vector<16xf32>)
// CHECK:           arith.maximumf %{{.*}} : vector<16xf32>
// CHECK:         vector.reduction <maximumf>
// CHECK-NOT:     linalg.
func.func @takes_the_maximum_along_rows(%x: memref<?x?xf32>, %out: memref<?xf32>) {
  linalg.generic {indexing_maps = [#nd, #n],
                  iterator_types = ["parallel", "reduction"]}
      ins(%x : memref<?x?xf32>) outs(%out : memref<?xf32>) {
  ^bb0(%in: f32, %acc: f32):
    %r = arith.maximumf %acc, %in : f32
    linalg.yield %r : f32
  }
  return
}

// -----

#nd = affine_map<(n, d) -> (n, d)>
#n = affine_map<(n, d) -> (n)>

// The row of the table is chosen once, before the loop over its elements; they
// are loaded side by side.

// CHECK-LABEL: func @reads_rows_of_a_table
// CHECK-SAME:    %[[X:[^:]*]]: memref<?x32xf32>, %[[IDX:[^:]*]]: memref<?xi32>, %[[TABLE:[^:]*]]: memref<4x32xf32>
// CHECK:         scf.for %[[N:.*]] =
// CHECK:           %[[CHOICE:.*]] = memref.load %[[IDX]][%[[N]]]
// CHECK:           %[[ROW:.*]] = arith.index_cast %[[CHOICE]]
// CHECK:           scf.for %[[D:.*]] =
// CHECK-DAG:         vector.load %[[X]][%[[N]], %[[D]]]
// CHECK-DAG:         vector.load %[[TABLE]][%[[ROW]], %[[D]]] : memref<4x32xf32>, vector<16xf32>
// CHECK:             arith.mulf %{{.*}} : vector<16xf32>
// CHECK:             vector.store
// CHECK-NOT:     linalg.
func.func @reads_rows_of_a_table(%x: memref<?x32xf32>, %idx: memref<?xi32>,
                                 %table: memref<4x32xf32>, %out: memref<?x32xf32>) {
  linalg.generic {indexing_maps = [#nd, #n, #nd],
                  iterator_types = ["parallel", "parallel"]}
      ins(%x, %idx : memref<?x32xf32>, memref<?xi32>) outs(%out : memref<?x32xf32>) {
  ^bb0(%in: f32, %choice: i32, %old: f32):
    %row = arith.index_cast %choice : i32 to index
    %d = linalg.index 1 : index
    %w = memref.load %table[%row, %d] : memref<4x32xf32>
    %r = arith.mulf %in, %w : f32
    linalg.yield %r : f32
  }
  return
}

// -----

#nd = affine_map<(n, d) -> (n, d)>
#n = affine_map<(n, d) -> (n)>

// What is elementwise, what is a gather, and what runs across rows stays.

// CHECK-LABEL: func @leaves_what_scalar_loops_do_as_well
// CHECK-COUNT-3: linalg.generic
func.func @leaves_what_scalar_loops_do_as_well(
    %x: memref<?x32xf32>, %idx: memref<?x32xi32>, %table: memref<4xf32>,
    %out: memref<?x32xf32>, %columns: memref<?x?xf32, strided<[1, 64]>>,
    %sums: memref<?xf32>) {
  linalg.generic {indexing_maps = [#nd, #nd],
                  iterator_types = ["parallel", "parallel"]}
      ins(%x : memref<?x32xf32>) outs(%out : memref<?x32xf32>) {
  ^bb0(%in: f32, %old: f32):
    %r = arith.mulf %in, %in : f32
    linalg.yield %r : f32
  }
  linalg.generic {indexing_maps = [#nd, #nd],
                  iterator_types = ["parallel", "parallel"]}
      ins(%idx : memref<?x32xi32>) outs(%out : memref<?x32xf32>) {
  ^bb0(%in: i32, %old: f32):
    %row = arith.index_cast %in : i32 to index
    %r = memref.load %table[%row] : memref<4xf32>
    linalg.yield %r : f32
  }
  linalg.generic {indexing_maps = [#nd, #n],
                  iterator_types = ["parallel", "reduction"]}
      ins(%columns : memref<?x?xf32, strided<[1, 64]>>) outs(%sums : memref<?xf32>) {
  ^bb0(%in: f32, %acc: f32):
    %r = arith.addf %acc, %in : f32
    linalg.yield %r : f32
  }
  return
}
