// RUN: %moe-opt %s --moe-expand-copies | FileCheck %s
// RUN: %moe-opt %s --moe-expand-copies --moe-expand-copies | FileCheck %s

// CHECK-LABEL: func @copies_strided_buffers_by_loops
// CHECK-NOT:     memref.copy
// CHECK:         linalg.copy
func.func @copies_strided_buffers_by_loops(
    %a: memref<?x4xf32, strided<[8, 2], offset: ?>>, %b: memref<?x4xf32>) {
  memref.copy %a, %b : memref<?x4xf32, strided<[8, 2], offset: ?>> to memref<?x4xf32>
  return
}

// CHECK-LABEL: func @keeps_contiguous_copies
// CHECK-NOT:     linalg.copy
// CHECK:         memref.copy
func.func @keeps_contiguous_copies(%a: memref<?x4xf32>, %b: memref<?x4xf32>) {
  memref.copy %a, %b : memref<?x4xf32> to memref<?x4xf32>
  return
}
