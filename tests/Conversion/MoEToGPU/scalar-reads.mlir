// RUN: %moe-opt %s --split-input-file --verify-diagnostics --moe-attach-nvvm-target=chip=sm_90 --convert-moe-to-gpu | FileCheck %s

// A place that a kernel has computed is read in the kernel that uses it.

// CHECK-LABEL: gpu.func @one_row_kernel
// CHECK:         memref.store
// CHECK-LABEL: gpu.func @one_row_kernel_1
// CHECK:         %[[PLACE:.*]] = memref.load %{{.*}}[%c0
// CHECK:         arith.index_cast %[[PLACE]]
// CHECK:         memref.subview
func.func @one_row(%row: memref<1x64xf32>, %start: memref<1xi64>, %cache: memref<128x64xf32>) {
  %c0 = arith.constant 0 : index
  %places = memref.alloc() : memref<1xi64>
  scf.forall (%b) in (1) {
    memref.copy %start, %places : memref<1xi64> to memref<1xi64>
  } {mapping = [#gpu.block<x>]}
  %p = memref.load %places[%c0] : memref<1xi64>
  %place = arith.index_cast %p : i64 to index
  %into = memref.subview %cache[%place, 0] [1, 64] [1, 1]
    : memref<128x64xf32> to memref<1x64xf32, strided<[64, 1], offset: ?>>
  scf.forall (%b) in (1) {
    memref.copy %row, %into : memref<1x64xf32> to memref<1x64xf32, strided<[64, 1], offset: ?>>
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// It would be another one where the buffer has been written since.

func.func @written_since(%row: memref<1x64xf32>, %start: memref<1xi64>, %cache: memref<128x64xf32>) {
  %c0 = arith.constant 0 : index
  // expected-error @below {{expected what a kernel uses to follow from the function's arguments without reading what a kernel writes}}
  %p = memref.load %start[%c0] : memref<1xi64>
  %place = arith.index_cast %p : i64 to index
  %into = memref.subview %cache[%place, 0] [1, 64] [1, 1]
    : memref<128x64xf32> to memref<1x64xf32, strided<[64, 1], offset: ?>>
  %c1 = arith.constant 1 : i64
  scf.forall (%b) in (1) {
    linalg.fill ins(%c1 : i64) outs(%start : memref<1xi64>)
  } {mapping = [#gpu.block<x>]}
  scf.forall (%b) in (1) {
    memref.copy %row, %into : memref<1x64xf32> to memref<1x64xf32, strided<[64, 1], offset: ?>>
  } {mapping = [#gpu.block<x>]}
  return
}
