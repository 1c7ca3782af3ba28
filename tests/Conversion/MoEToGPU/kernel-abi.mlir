// RUN: %moe-opt %s --split-input-file --convert-moe-to-gpu --canonicalize --cse --mlir-print-local-scope | FileCheck %s

// The kernel's parameters follow from the function's arguments alone: one
// pointer a buffer, scalars by value, then every dynamic size.

// CHECK-LABEL: func.func @select
// CHECK-SAME:    moe.kernels = [{block_size = 128 : i64, grid = affine_map<()[s0, s1, s2, s3] -> (s0 ceildiv 8, 1, 1)>, module = "select_gpu", name = "select_kernel"}]
// CHECK:         %[[BLOCKS:.*]] = affine.apply affine_map<()[s0] -> (s0 ceildiv 8)>
// CHECK:         gpu.launch_func @select_gpu::@select_kernel
// CHECK-SAME:      blocks in (%[[BLOCKS]], %{{.*}}, %{{.*}}) threads in (%c128, %{{.*}}, %{{.*}})
// CHECK-LABEL: gpu.module @select_gpu
// CHECK:         gpu.func @select_kernel
// CHECK-SAME:      (%{{.*}}: memref<bf16>, %{{.*}}: memref<i8>, %{{.*}}: f32, %{{.*}}: memref<f32>, %{{.*}}: memref<i32>,
// CHECK-SAME:      %[[N:.*]]: i64, %{{.*}}: i64, %{{.*}}: i64, %{{.*}}: i64) kernel
// CHECK-SAME:      known_block_size = array<i32: 128, 1, 1>
// CHECK-SAME:      nvvm.minctasm = 1
// CHECK:         %[[ROWS:.*]] = arith.index_cast %[[N]]
// CHECK:         memref.reinterpret_cast %{{.*}} to offset: [0], sizes: [%[[ROWS]], 16], strides: [16, 1]
// CHECK:         %[[BLOCK:.*]] = gpu.block_id x
// CHECK:         affine.apply affine_map<()[s0] -> (s0 * 8)>()[%[[BLOCK]]]
func.func @select(%z: memref<?x16xbf16>, %mask: memref<?xi1>, %unused: f32,
                  %gates: memref<?x2xf32>, %indices: memref<?x2xi32>) {
  %c0 = arith.constant 0 : index
  %n = memref.dim %z, %c0 : memref<?x16xbf16>
  scf.forall (%i) = (0) to (%n) step (8) {
    %rows = affine.min affine_map<(d0)[s0] -> (-d0 + s0, 8)>(%i)[%n]
    %z_tile = memref.subview %z[%i, 0] [%rows, 16] [1, 1]
        : memref<?x16xbf16> to memref<?x16xbf16, strided<[16, 1], offset: ?>>
    %mask_tile = memref.subview %mask[%i] [%rows] [1]
        : memref<?xi1> to memref<?xi1, strided<[1], offset: ?>>
    %gates_tile = memref.subview %gates[%i, 0] [%rows, 2] [1, 1]
        : memref<?x2xf32> to memref<?x2xf32, strided<[2, 1], offset: ?>>
    %indices_tile = memref.subview %indices[%i, 0] [%rows, 2] [1, 1]
        : memref<?x2xi32> to memref<?x2xi32, strided<[2, 1], offset: ?>>
    moe.topk_renorm
        ins(%z_tile : memref<?x16xbf16, strided<[16, 1], offset: ?>>)
        mask(%mask_tile : memref<?xi1, strided<[1], offset: ?>>)
        outs(%gates_tile, %indices_tile
             : memref<?x2xf32, strided<[2, 1], offset: ?>>,
               memref<?x2xi32, strided<[2, 1], offset: ?>>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Two dims of blocks and a static problem: the grid is constant.

// CHECK-LABEL: func.func @copies_a_batch
// CHECK-SAME:    grid = affine_map<() -> (2, 3, 1)>
// CHECK:         gpu.func @copies_a_batch_kernel
// CHECK-DAG:       gpu.block_id x
// CHECK-DAG:       gpu.block_id y
// CHECK:           %[[THREAD:.*]] = gpu.thread_id x
// CHECK:           scf.for %{{.*}} = %[[THREAD]] to
func.func @copies_a_batch(%a: memref<3x32x4xf32>, %b: memref<3x32x4xf32>) {
  scf.forall (%i, %j) = (0, 0) to (3, 32) step (1, 16) {
    %from = memref.subview %a[%i, %j, 0] [1, 16, 4] [1, 1, 1]
        : memref<3x32x4xf32> to memref<1x16x4xf32, strided<[128, 4, 1], offset: ?>>
    %to = memref.subview %b[%i, %j, 0] [1, 16, 4] [1, 1, 1]
        : memref<3x32x4xf32> to memref<1x16x4xf32, strided<[128, 4, 1], offset: ?>>
    memref.copy %from, %to : memref<1x16x4xf32, strided<[128, 4, 1], offset: ?>>
        to memref<1x16x4xf32, strided<[128, 4, 1], offset: ?>>
  } {mapping = [#gpu.block<y>, #gpu.block<x>]}
  return
}

// -----

// Only x holds more than 65535 blocks: dims that may have more share it, where
// those before them are constant.

// CHECK-LABEL: func.func @copies_tokens
// CHECK-SAME:    grid = affine_map<()[s0, s1, s2, s3] -> (s1 * 3, 1, s0)>
// CHECK:         gpu.func @copies_tokens_kernel
// CHECK-DAG:       %[[X:.*]] = gpu.block_id x
// CHECK-DAG:       %[[Z:.*]] = gpu.block_id z
// CHECK-DAG:       %[[TOKEN:.*]] = arith.divui %[[X]], %c3
// CHECK-DAG:       %[[PART:.*]] = arith.remui %[[X]], %c3
// CHECK-DAG:       %[[COLUMN:.*]] = affine.apply affine_map<()[s0] -> (s0 * 4)>()[%[[PART]]]
// CHECK-NOT:       gpu.block_id
// CHECK:           memref.subview %{{.*}}[%[[Z]], %[[TOKEN]], %[[COLUMN]]]
func.func @copies_tokens(%a: memref<?x?x12xf32>, %b: memref<?x?x12xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %n = memref.dim %a, %c0 : memref<?x?x12xf32>
  %t = memref.dim %a, %c1 : memref<?x?x12xf32>
  scf.forall (%i, %j, %k) = (0, 0, 0) to (%n, %t, 12) step (1, 1, 4) {
    %from = memref.subview %a[%i, %j, %k] [1, 1, 4] [1, 1, 1]
        : memref<?x?x12xf32> to memref<1x1x4xf32, strided<[?, 12, 1], offset: ?>>
    %to = memref.subview %b[%i, %j, %k] [1, 1, 4] [1, 1, 1]
        : memref<?x?x12xf32> to memref<1x1x4xf32, strided<[?, 12, 1], offset: ?>>
    memref.copy %from, %to : memref<1x1x4xf32, strided<[?, 12, 1], offset: ?>>
        to memref<1x1x4xf32, strided<[?, 12, 1], offset: ?>>
  } {mapping = [#gpu.block<z>, #gpu.block<y>, #gpu.block<x>]}
  return
}

// -----

// A function without a body has no kernels.

// CHECK-LABEL: func.func private @declared
func.func private @declared(memref<4xf32>) -> i32
