// RUN: %moe-opt %s --moe-store-updates --split-input-file | FileCheck %s

// CHECK-LABEL: func @leaves_what_is_updated_in_place
// CHECK-SAME:    (%[[A:.*]]: memref<4xf32>) {
func.func @leaves_what_is_updated_in_place(%a: memref<4xf32>)
    -> (memref<?xf32> {moe.updates = 0 : i64}) {
  // CHECK-NOT: memref.copy
  %cast = memref.cast %a : memref<4xf32> to memref<?xf32>
  return %cast : memref<?xf32>
}

// CHECK-LABEL: func @copies_what_is_computed_elsewhere
// CHECK-SAME:    (%[[A:.*]]: memref<4xf32>) -> memref<2xf32> {
func.func @copies_what_is_computed_elsewhere(%a: memref<4xf32>)
    -> (memref<2xf32>, memref<4xf32> {moe.updates = 0 : i64}) {
  %other = memref.alloc() : memref<2xf32>
  // CHECK: %[[NEW:.*]] = memref.alloc() : memref<4xf32>
  %new = memref.alloc() : memref<4xf32>
  // CHECK: memref.copy %[[NEW]], %[[A]]
  return %other, %new : memref<2xf32>, memref<4xf32>
}

// CHECK-LABEL: func @exchanges_two_arguments
// CHECK-SAME:    (%[[A:.*]]: memref<?xf32>, %[[B:.*]]: memref<?xf32>) {
func.func @exchanges_two_arguments(%a: memref<?xf32>, %b: memref<?xf32>)
    -> (memref<?xf32> {moe.updates = 0 : i64}, memref<?xf32> {moe.updates = 1 : i64}) {
  // CHECK: %[[OLD_B:.*]] = memref.alloc
  // CHECK: memref.copy %[[B]], %[[OLD_B]]
  // CHECK: %[[OLD_A:.*]] = memref.alloc
  // CHECK: memref.copy %[[A]], %[[OLD_A]]
  // CHECK: memref.copy %[[OLD_B]], %[[A]]
  // CHECK: memref.copy %[[OLD_A]], %[[B]]
  return %b, %a : memref<?xf32>, memref<?xf32>
}
