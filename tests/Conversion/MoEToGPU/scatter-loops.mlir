// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_90 --moe-distribute-to-grid | FileCheck %s

// New rows of a cache: a block copies each, unless a later one has its place.

// CHECK-LABEL: func.func @rows
// CHECK:         %[[N:.*]] = memref.dim %{{.*}}, %c0
// CHECK:         scf.forall (%[[I:.*]]) in (%[[N]]) {
// CHECK:           %[[PLACE:.*]] = memref.load %{{.*}}[%[[I]]]
// CHECK:           %[[INTO:.*]] = memref.subview %arg2[0, %{{.*}}, 0] [2, 1, 64] [1, 1, 1]
// CHECK:           %[[SAME:.*]] = scf.for %[[J:.*]] = %{{.*}} to %[[N]] step %c32
// CHECK:             %[[LATER:.*]] = memref.load %{{.*}}[%[[J]]]
// CHECK:             arith.cmpi eq
// CHECK:           %[[LANES:.*]] = nvvm.vote.sync ballot %{{.*}}, %[[SAME]]
// CHECK:           scf.if
// CHECK:             scf.for
// CHECK:               memref.store %{{.*}}, %[[INTO]]
// CHECK:         } {mapping = [#gpu.block<x>]}
// CHECK-NOT:     memref.copy
func.func @rows(%rows: memref<2x?x64xbf16>, %places: memref<?xi64>, %cache: memref<2x128x64xbf16>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %n = memref.dim %places, %c0 : memref<?xi64>
  scf.for %i = %c0 to %n step %c1 {
    %p = memref.load %places[%i] : memref<?xi64>
    %place = arith.index_cast %p : i64 to index
    %row = memref.subview %rows[0, %i, 0] [2, 1, 64] [1, 1, 1]
      : memref<2x?x64xbf16> to memref<2x1x64xbf16, strided<[?, 64, 1], offset: ?>>
    %into = memref.subview %cache[0, %place, 0] [2, 1, 64] [1, 1, 1]
      : memref<2x128x64xbf16> to memref<2x1x64xbf16, strided<[8192, 64, 1], offset: ?>>
    memref.copy %row, %into
      : memref<2x1x64xbf16, strided<[?, 64, 1], offset: ?>>
      to memref<2x1x64xbf16, strided<[8192, 64, 1], offset: ?>>
  }
  return
}

// -----

// Elements: a thread stores each. The row is a part of the place, so that only
// later columns of the same row are looked at.

// CHECK-LABEL: func.func @elements
// CHECK:         scf.forall (%{{.*}}) in (128) {
// CHECK:           scf.for %[[NUMBER:.*]] = %{{.*}} to %{{.*}} step %c16384
// CHECK:             %[[COLUMN:.*]] = arith.remui %[[NUMBER]], %c4
// CHECK:             %[[ROW:.*]] = arith.divui %[[NUMBER]], %c4
// CHECK:             %[[PLACE:.*]] = memref.load %arg1[%[[ROW]], %[[COLUMN]]]
// CHECK:             scf.for %[[LATER:.*]] = %{{.*}} to %c4 step %c1
// CHECK:               memref.load %arg1[%[[ROW]], %[[LATER]]]
// CHECK:             scf.if
// CHECK:               memref.store %{{.*}}, %arg2[%[[ROW]], %{{.*}}]
func.func @elements(%x: memref<?x4xf32>, %places: memref<?x4xi64>, %y: memref<?x16xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c4 = arith.constant 4 : index
  %n = memref.dim %x, %c0 : memref<?x4xf32>
  scf.for %i = %c0 to %n step %c1 {
    scf.for %j = %c0 to %c4 step %c1 {
      %p = memref.load %places[%i, %j] : memref<?x4xi64>
      %place = arith.index_cast %p : i64 to index
      %value = memref.load %x[%i, %j] : memref<?x4xf32>
      memref.store %value, %y[%i, %place] : memref<?x16xf32>
    }
  }
  return
}

// -----

// What reads the places that others write stays in its order.

// CHECK-LABEL: func.func @sums
// CHECK:         scf.for
// CHECK-NOT:     scf.forall
func.func @sums(%x: memref<?xf32>, %places: memref<?xi64>, %y: memref<16xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %n = memref.dim %x, %c0 : memref<?xf32>
  scf.for %i = %c0 to %n step %c1 {
    %p = memref.load %places[%i] : memref<?xi64>
    %place = arith.index_cast %p : i64 to index
    %value = memref.load %x[%i] : memref<?xf32>
    %old = memref.load %y[%place] : memref<16xf32>
    %sum = arith.addf %old, %value : f32
    memref.store %sum, %y[%place] : memref<16xf32>
  }
  return
}

// -----

// Slices that may overlap in a part are not all written by the last of them.

// CHECK-LABEL: func.func @overlapping
// CHECK:         scf.for
// CHECK:           memref.load
func.func @overlapping(%rows: memref<?x4xf32>, %places: memref<?xi64>, %y: memref<64xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %n = memref.dim %places, %c0 : memref<?xi64>
  scf.for %i = %c0 to %n step %c1 {
    %p = memref.load %places[%i] : memref<?xi64>
    %place = arith.index_cast %p : i64 to index
    %row = memref.subview %rows[%i, 0] [1, 4] [1, 1]
      : memref<?x4xf32> to memref<4xf32, strided<[1], offset: ?>>
    %into = memref.subview %y[%place] [4] [1]
      : memref<64xf32> to memref<4xf32, strided<[1], offset: ?>>
    memref.copy %row, %into
      : memref<4xf32, strided<[1], offset: ?>> to memref<4xf32, strided<[1], offset: ?>>
  }
  return
}

// -----

// Iterations that another loop counts have no number.

// CHECK-LABEL: func.func @triangle
// CHECK:         scf.for
// CHECK:           scf.for
// CHECK-NOT:     scf.forall
func.func @triangle(%x: memref<8xf32>, %places: memref<8x8xi64>, %y: memref<64xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c8 = arith.constant 8 : index
  scf.for %i = %c0 to %c8 step %c1 {
    scf.for %j = %c0 to %i step %c1 {
      %p = memref.load %places[%i, %j] : memref<8x8xi64>
      %place = arith.index_cast %p : i64 to index
      %value = memref.load %x[%j] : memref<8xf32>
      memref.store %value, %y[%place] : memref<64xf32>
    }
  }
  return
}
