// RUN: %moe-opt %s --moe-promote-tile-buffers --split-input-file | FileCheck %s

// CHECK-LABEL: func @bounds_the_rows_of_a_tile
// CHECK:         scf.forall
// CHECK:           %[[STACK:.*]] = memref.alloca() {{.*}} : memref<64x16xf32>
// CHECK:           %[[ROWS:.*]] = affine.min
// CHECK:           %[[VIEW:.*]] = memref.subview %[[STACK]][0, 0] [%[[ROWS]], 16] [1, 1]
// CHECK:           %[[TILE:.*]] = memref.cast %[[VIEW]]
// CHECK:           memref.store %{{.*}}, %[[TILE]]
// CHECK-NOT:       memref.alloc(
func.func @bounds_the_rows_of_a_tile(%n: index, %v: f32) {
  %c0 = arith.constant 0 : index
  scf.forall (%i) = (0) to (%n) step (64) {
    %rows = affine.min affine_map<(i)[n] -> (n - i, 64)>(%i)[%n]
    %tile = memref.alloc(%rows) : memref<?x16xf32>
    memref.store %v, %tile[%c0, %c0] : memref<?x16xf32>
  }
  return
}

// -----

// CHECK-LABEL: func @keeps_unbounded_and_large_buffers
// CHECK-COUNT-3: memref.alloc(
// CHECK-NOT:     memref.alloca
func.func @keeps_unbounded_and_large_buffers(%n: index, %v: f32) {
  %c0 = arith.constant 0 : index
  %outside = memref.alloc() : memref<4xf32>
  memref.store %v, %outside[%c0] : memref<4xf32>
  scf.forall (%i) in (8) {
    %unbounded = memref.alloc(%n) : memref<?xf32>
    memref.store %v, %unbounded[%c0] : memref<?xf32>
    %large = memref.alloc() : memref<65537xf32>
    memref.store %v, %large[%c0] : memref<65537xf32>
  }
  return
}
