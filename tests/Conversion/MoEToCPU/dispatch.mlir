// RUN: %moe-opt %s --convert-moe-to-cpu="vector-width=8" --canonicalize --cse | FileCheck %s

// One counter an expert; assignments are visited once to take a rank and once
// to add where the expert starts. No comparison of pairs, no float.

// CHECK-LABEL: func @dispatch_is_a_counting_sort
// CHECK-SAME:    %[[I:[^:]*]]: memref<?x2xi32>, %[[S:[^:]*]]: memref<?x2xi32>, %[[O:[^:]*]]: memref<9xi32>, %[[C:[^:]*]]: memref<8xi32>
// CHECK-NOT:     memref.alloc
// CHECK-NOT:     f32
// CHECK:         memref.store %{{.*}}, %[[C]]
// CHECK:         scf.for
// CHECK-NEXT:      scf.for
// CHECK:             memref.load %[[I]]
// CHECK:             memref.load %[[C]]
// CHECK:             memref.store %{{.*}}, %[[C]]
// CHECK:             memref.store %{{.*}}, %[[S]]
// CHECK:         scf.for
// CHECK:           memref.store %{{.*}}, %[[O]]
// CHECK:         scf.for
// CHECK-NEXT:      scf.for
// CHECK:             memref.load %[[O]]
// CHECK:             memref.store %{{.*}}, %[[S]]
// CHECK-NOT:     scf.for
func.func @dispatch_is_a_counting_sort(%i: memref<?x2xi32>, %s: memref<?x2xi32>,
                                       %o: memref<9xi32>, %c: memref<8xi32>) {
  moe.dispatch ins(%i : memref<?x2xi32>)
      outs(%s, %o, %c : memref<?x2xi32>, memref<9xi32>, memref<8xi32>)
  return
}

// A priority costs a radix sort of the tokens, whose memory is given back.

// CHECK-LABEL: func @dispatch_sorts_tokens_by_digits
// CHECK-COUNT-2: memref.alloc(
// CHECK:         memref.alloc(
// CHECK-COUNT-6: arith.shrui
// CHECK-NOT:     arith.shrui
// CHECK-COUNT-3: memref.dealloc
func.func @dispatch_sorts_tokens_by_digits(%i: memref<?x2xi32>, %p: memref<?xf32>,
                                           %s: memref<?x2xi32>, %o: memref<9xi32>,
                                           %c: memref<8xi32>) {
  moe.dispatch ins(%i : memref<?x2xi32>) priority(%p : memref<?xf32>)
      outs(%s, %o, %c : memref<?x2xi32>, memref<9xi32>, memref<8xi32>)
      {drop = #moe.drop<priority>}
  return
}

// Four vectors of a row at a time; a slot that is none reads nothing.

// CHECK-LABEL: func @combine_reads_rows_under_a_condition
// CHECK-SAME:    %[[X:[^:]*]]: memref<?x64xf32>
// CHECK:         %[[IS_ROW:.*]] = arith.cmpi ult
// CHECK:         scf.if %[[IS_ROW]]
// CHECK-COUNT-4:   vector.load %[[X]]
// CHECK:         } else {
// CHECK-COUNT-4: vector.store
func.func @combine_reads_rows_under_a_condition(%x: memref<?x64xf32>, %g: memref<?x2xf32>,
                                                %s: memref<?x2xi32>, %y: memref<?x64xf32>) {
  moe.combine ins(%x, %g, %s : memref<?x64xf32>, memref<?x2xf32>, memref<?x2xi32>)
      outs(%y : memref<?x64xf32>)
  return
}

// Offsets and counts of i64 are read and written as such.

// CHECK-LABEL: func @dispatch_to_i64
// CHECK-DAG:     memref.store %{{.*}} : memref<4xi64>
// CHECK-DAG:     memref.store %{{.*}} : memref<5xi64>
func.func @dispatch_to_i64(%i: memref<?x2xi64>, %s: memref<?x2xi64>,
                           %o: memref<5xi64>, %c: memref<4xi64>) {
  moe.dispatch ins(%i : memref<?x2xi64>)
      outs(%s, %o, %c : memref<?x2xi64>, memref<5xi64>, memref<4xi64>)
  return
}
