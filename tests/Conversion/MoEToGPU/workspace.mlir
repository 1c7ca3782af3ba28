// RUN: %moe-opt %s --split-input-file --verify-diagnostics --moe-distribute-to-grid --convert-moe-to-gpu --canonicalize --cse --mlir-print-local-scope | FileCheck %s

// What one kernel hands to the next lies in the workspace, the last argument.
// Parts start at multiples of 256 bytes.

// CHECK-LABEL: func.func @two_buffers_between_kernels
// CHECK-SAME:    %{{.*}}: memref<?x64xf32>, %{{.*}}: memref<?x64xf32>, %{{.*}}: memref<?xi8>)
// CHECK-SAME:    name = "two_buffers_between_kernels_kernel"}
// CHECK-SAME:    name = "two_buffers_between_kernels_kernel_1"}
// CHECK-SAME:    name = "two_buffers_between_kernels_kernel_2"}
// CHECK-SAME:    moe.workspace = affine_map<()[s0, s1] -> (s0 * 512)>
// CHECK-NOT:     memref.alloc
// CHECK:         gpu.func @two_buffers_between_kernels_kernel_1
// CHECK-SAME:      (%{{.*}}: memref<f32>, %{{.*}}: memref<f32>, %[[WORKSPACE:.*]]: memref<i8>,
// CHECK:           %[[BYTES:.*]] = memref.reinterpret_cast %[[WORKSPACE]]
// CHECK:           memref.view %[[BYTES]][%c0][%{{.*}}] : memref<?xi8> to memref<?x64xf32>
// CHECK:           %[[OFFSET:.*]] = affine.apply affine_map<()[s0] -> (s0 * 256)>
// CHECK:           memref.view %{{.*}}[%[[OFFSET]]][%{{.*}}] : memref<?xi8> to memref<?x64xf32>
func.func @two_buffers_between_kernels(%a: memref<?x64xf32>, %b: memref<?x64xf32>) {
  %c0 = arith.constant 0 : index
  %n = memref.dim %a, %c0 : memref<?x64xf32>
  %first = memref.alloc(%n) : memref<?x64xf32>
  %second = memref.alloc(%n) : memref<?x64xf32>
  memref.copy %a, %first : memref<?x64xf32> to memref<?x64xf32>
  memref.copy %first, %second : memref<?x64xf32> to memref<?x64xf32>
  memref.copy %second, %b : memref<?x64xf32> to memref<?x64xf32>
  memref.dealloc %first : memref<?x64xf32>
  memref.dealloc %second : memref<?x64xf32>
  return
}

// -----

// The size of joined dims is the product of theirs, also where no kernel but
// the workspace holds them.

// CHECK-LABEL: func.func @joined_dims
// CHECK-SAME:    grid = affine_map<()[s0, s1, {{.*}}] -> ((s0 * s1) ceildiv 16, 1, 1)>
// CHECK-SAME:    moe.workspace =
func.func @joined_dims(%a: memref<?x?x4xf32>, %b: memref<?x4xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %n = memref.dim %a, %c0 : memref<?x?x4xf32>
  %m = memref.dim %a, %c1 : memref<?x?x4xf32>
  %t = memref.alloc(%n, %m) : memref<?x?x4xf32>
  memref.copy %a, %t : memref<?x?x4xf32> to memref<?x?x4xf32>
  %joined = memref.collapse_shape %t [[0, 1], [2]] : memref<?x?x4xf32> into memref<?x4xf32>
  %rows = memref.dim %joined, %c0 : memref<?x4xf32>
  scf.forall (%i) = (0) to (%rows) step (16) {
    %from = memref.subview %joined[%i, 0] [1, 4] [1, 1] : memref<?x4xf32> to memref<1x4xf32, strided<[4, 1], offset: ?>>
    %to = memref.subview %b[%i, 0] [1, 4] [1, 1] : memref<?x4xf32> to memref<1x4xf32, strided<[4, 1], offset: ?>>
    memref.copy %from, %to : memref<1x4xf32, strided<[4, 1], offset: ?>> to memref<1x4xf32, strided<[4, 1], offset: ?>>
  } {mapping = [#gpu.block<x>]}
  memref.dealloc %t : memref<?x?x4xf32>
  return
}

// -----

// The least of two sizes is no expression of them. The workspace has room for
// one of the two, the grid blocks for it, and those behind the end do nothing.

// CHECK-LABEL: func.func @some_rows
// CHECK-SAME:    grid = affine_map<()[s0, s1, s2] -> (s0 ceildiv 16, 1, 1)>
// CHECK-SAME:    grid = affine_map<()[s0, s1, s2] -> (7, 1, 1)>
// CHECK-SAME:    moe.workspace = affine_map<()[s0, s1] -> ((s0 ceildiv 16) * 256)>
// CHECK:         gpu.func @some_rows_kernel_1
// CHECK:           %[[END:.*]] = arith.minsi %{{.*}}, %c100
// CHECK:           %[[ROW:.*]] = affine.apply affine_map<()[s0] -> (s0 * 16)>()[%block_id_x]
// CHECK:           %[[INSIDE:.*]] = arith.cmpi slt, %[[ROW]], %[[END]]
// CHECK:           scf.if %[[INSIDE]]
func.func @some_rows(%a: memref<?x4xf32>, %b: memref<?x4xf32>) {
  %c0 = arith.constant 0 : index
  %c100 = arith.constant 100 : index
  %n = memref.dim %a, %c0 : memref<?x4xf32>
  %rest = arith.subi %n, %c100 : index
  %behind = arith.maxsi %rest, %c0 : index
  %t = memref.alloc(%behind) : memref<?x4xf32>
  scf.forall (%i) = (0) to (%behind) step (16) {
    %from = memref.subview %a[%i, 0] [1, 4] [1, 1] : memref<?x4xf32> to memref<1x4xf32, strided<[4, 1], offset: ?>>
    %to = memref.subview %t[%i, 0] [1, 4] [1, 1] : memref<?x4xf32> to memref<1x4xf32, strided<[4, 1], offset: ?>>
    memref.copy %from, %to : memref<1x4xf32, strided<[4, 1], offset: ?>> to memref<1x4xf32, strided<[4, 1], offset: ?>>
  } {mapping = [#gpu.block<x>]}
  %some = arith.minsi %n, %c100 : index
  scf.forall (%i) = (0) to (%some) step (16) {
    %from = memref.subview %t[%i, 0] [1, 4] [1, 1] : memref<?x4xf32> to memref<1x4xf32, strided<[4, 1], offset: ?>>
    %to = memref.subview %b[%i, 0] [1, 4] [1, 1] : memref<?x4xf32> to memref<1x4xf32, strided<[4, 1], offset: ?>>
    memref.copy %from, %to : memref<1x4xf32, strided<[4, 1], offset: ?>> to memref<1x4xf32, strided<[4, 1], offset: ?>>
  } {mapping = [#gpu.block<x>]}
  memref.dealloc %t : memref<?x4xf32>
  return
}

// -----

// The sizes of the workspace must be known before anything runs.

func.func @size_from_memory(%a: memref<1xindex>, %b: memref<4xf32>) {
  %c0 = arith.constant 0 : index
  %n = memref.load %a[%c0] : memref<1xindex>
  // expected-error @below {{expected a buffer between kernels to be contiguous and to have sizes that follow from those of the function's buffers}}
  %t = memref.alloc(%n) : memref<?xf32>
  memref.dealloc %t : memref<?xf32>
  return
}
