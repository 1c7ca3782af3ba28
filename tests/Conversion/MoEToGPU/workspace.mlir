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

// The sizes of the workspace must be known before anything runs.

func.func @size_from_memory(%a: memref<1xindex>, %b: memref<4xf32>) {
  %c0 = arith.constant 0 : index
  %n = memref.load %a[%c0] : memref<1xindex>
  // expected-error @below {{expected a buffer between kernels to be contiguous and to have sizes that follow from those of the function's buffers}}
  %t = memref.alloc(%n) : memref<?xf32>
  memref.dealloc %t : memref<?xf32>
  return
}
