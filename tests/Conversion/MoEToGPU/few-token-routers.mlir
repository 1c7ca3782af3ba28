// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_80 --moe-select-kernel-config --moe-distribute-to-grid --canonicalize --mlir-print-local-scope | FileCheck %s
// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_80 --moe-select-kernel-config --moe-distribute-to-grid --canonicalize --convert-moe-to-gpu --mlir-print-local-scope | FileCheck %s --check-prefix=KERNEL
// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_80 --moe-select-kernel-config --moe-distribute-to-grid --remarks-filter-missed='moe-distribute-to-grid' -o %t 2>&1 | FileCheck %s --check-prefix=REMARK

// Up to 256 tokens are multiplied by blocks that have a part of the features
// and of the experts, and each token is selected for by a block of its own. One
// of the numbers of iterations is 0 for any number of tokens.

// CHECK-LABEL: func.func @router
// CHECK-DAG:     %[[N:.*]] = memref.dim %{{.*}}, %c0 :
// CHECK-DAG:     %[[MANY:.*]] = affine.apply affine_map<()[s0] -> ((s0 + 2147483391) floordiv 2147483648)>()[%[[N]]]
// CHECK-DAG:     %[[MANYTOKENS:.*]] = arith.muli %[[N]], %[[MANY]]
// CHECK-DAG:     %[[FEW:.*]] = affine.apply affine_map<()[s0] -> (-((s0 + 2147483391) floordiv 2147483648) + 1)>()[%[[N]]]
// CHECK-DAG:     %[[FEWTOKENS:.*]] = arith.muli %[[N]], %[[FEW]]
// CHECK:         %[[SUMS:.*]] = memref.alloc(%[[FEWTOKENS]]) : memref<?x112x256xf32>
// CHECK:         %[[BLOCKS:.*]] = affine.apply affine_map<()[s0] -> ((s0 ceildiv 32) * 112)>()[%[[FEWTOKENS]]]
// CHECK:         scf.forall {{.*}} in (%[[BLOCKS]]) {
// CHECK:           linalg.generic {{.*}} memref<256x1x64xbf16{{.*}} attrs = {moe.kernel_config = #moe.kernel_config<rows = 32, threads = 128, schedule = chunk_products>}
// CHECK:         scf.forall {{.*}} in (%[[FEWTOKENS]]) {
// CHECK:           memref.subview %[[SUMS]]
// CHECK:           linalg.generic {{.*}} attrs = {moe.kernel_config = #moe.kernel_config<rows = 1, schedule = chunk_sums>}
// CHECK:           moe.topk_renorm
// CHECK:         scf.forall {{.*}} = (0) to (%[[MANYTOKENS]]) step (32) {
// CHECK:           moe.router_logits
// CHECK:           moe.topk_renorm

// All chunks are on their way before the first one is waited for, and each
// leaves a sum of its own.

// KERNEL-LABEL: gpu.func @router_kernel
// KERNEL-NOT:     scf.for
// KERNEL-COUNT-18: nvvm.cp.async.shared.global
// KERNEL:         nvvm.cp.async.commit.group
// KERNEL:         nvvm.cp.async.wait.group 0
// KERNEL-COUNT-64: nvvm.mma.sync
// KERNEL-COUNT-32: llvm.store %{{.*}} : vector<2xf32>, !llvm.ptr<1>
// KERNEL-NOT:     scf.for
// KERNEL:         gpu.return

// They are added in their order, many loads at a time.

// KERNEL-LABEL: gpu.func @router_kernel_1
// KERNEL-COUNT-56: llvm.load %{{.*}} : !llvm.ptr<1> -> vector<2xf32>
// KERNEL-NOT:     llvm.load
// KERNEL:         gpu.barrier
// KERNEL:         gpu.shuffle
// KERNEL:         gpu.return

// KERNEL-LABEL: gpu.func @router_kernel_2
// KERNEL:         nvvm.mma.sync
func.func @router(%h: memref<?x7168xbf16>, %w: memref<256x7168xbf16>,
                  %bias: memref<256xf32>, %gates: memref<?x8xf32>,
                  %indices: memref<?x8xi32>) {
  %c0 = arith.constant 0 : index
  %n = memref.dim %h, %c0 : memref<?x7168xbf16>
  scf.forall (%i) = (0) to (%n) step (32) {
    %rows = affine.min affine_map<(d0)[s0] -> (-d0 + s0, 32)>(%i)[%n]
    %h_tile = memref.subview %h[%i, 0] [%rows, 7168] [1, 1]
        : memref<?x7168xbf16> to memref<?x7168xbf16, strided<[7168, 1], offset: ?>>
    %z = memref.alloc(%rows) : memref<?x256xf32>
    moe.router_logits
        ins(%h_tile, %w : memref<?x7168xbf16, strided<[7168, 1], offset: ?>>,
            memref<256x7168xbf16>)
        bias(%bias : memref<256xf32>) outs(%z : memref<?x256xf32>)
    %gates_tile = memref.subview %gates[%i, 0] [%rows, 8] [1, 1]
        : memref<?x8xf32> to memref<?x8xf32, strided<[8, 1], offset: ?>>
    %indices_tile = memref.subview %indices[%i, 0] [%rows, 8] [1, 1]
        : memref<?x8xi32> to memref<?x8xi32, strided<[8, 1], offset: ?>>
    moe.topk_renorm ins(%z : memref<?x256xf32>)
        outs(%gates_tile, %indices_tile
             : memref<?x8xf32, strided<[8, 1], offset: ?>>,
               memref<?x8xi32, strided<[8, 1], offset: ?>>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Loops with more to compute of a tile stay as they are, with a remark.

// REMARK-COUNT-2: remark: [Missed] FewTokens | {{.*}}"moe.router_logits is not cut into chunks for few tokens"

// CHECK-LABEL: func.func @two_routers
// CHECK-NOT:     chunk_products
func.func @two_routers(%h: memref<?x1024xbf16>, %w: memref<32x1024xbf16>,
                       %v: memref<32x1024xbf16>, %z: memref<?x32xf32>,
                       %y: memref<?x32xf32>) {
  %c0 = arith.constant 0 : index
  %n = memref.dim %h, %c0 : memref<?x1024xbf16>
  scf.forall (%i) = (0) to (%n) step (64) {
    %rows = affine.min affine_map<(d0)[s0] -> (-d0 + s0, 64)>(%i)[%n]
    %h_tile = memref.subview %h[%i, 0] [%rows, 1024] [1, 1]
        : memref<?x1024xbf16> to memref<?x1024xbf16, strided<[1024, 1], offset: ?>>
    %z_tile = memref.subview %z[%i, 0] [%rows, 32] [1, 1]
        : memref<?x32xf32> to memref<?x32xf32, strided<[32, 1], offset: ?>>
    moe.router_logits
        ins(%h_tile, %w : memref<?x1024xbf16, strided<[1024, 1], offset: ?>>,
            memref<32x1024xbf16>)
        outs(%z_tile : memref<?x32xf32, strided<[32, 1], offset: ?>>)
    %y_tile = memref.subview %y[%i, 0] [%rows, 32] [1, 1]
        : memref<?x32xf32> to memref<?x32xf32, strided<[32, 1], offset: ?>>
    moe.router_logits
        ins(%h_tile, %v : memref<?x1024xbf16, strided<[1024, 1], offset: ?>>,
            memref<32x1024xbf16>)
        outs(%y_tile : memref<?x32xf32, strided<[32, 1], offset: ?>>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// 15 chunks are too few to cut.

// CHECK-LABEL: func.func @narrow
// CHECK-NOT:     chunk_products
func.func @narrow(%h: memref<?x960xbf16>, %w: memref<32x960xbf16>, %z: memref<?x32xf32>) {
  %c0 = arith.constant 0 : index
  %n = memref.dim %h, %c0 : memref<?x960xbf16>
  scf.forall (%i) = (0) to (%n) step (64) {
    %rows = affine.min affine_map<(d0)[s0] -> (-d0 + s0, 64)>(%i)[%n]
    %h_tile = memref.subview %h[%i, 0] [%rows, 960] [1, 1]
        : memref<?x960xbf16> to memref<?x960xbf16, strided<[960, 1], offset: ?>>
    %z_tile = memref.subview %z[%i, 0] [%rows, 32] [1, 1]
        : memref<?x32xf32> to memref<?x32xf32, strided<[32, 1], offset: ?>>
    moe.router_logits
        ins(%h_tile, %w : memref<?x960xbf16, strided<[960, 1], offset: ?>>,
            memref<32x960xbf16>)
        outs(%z_tile : memref<?x32xf32, strided<[32, 1], offset: ?>>)
  } {mapping = [#gpu.block<x>]}
  return
}
