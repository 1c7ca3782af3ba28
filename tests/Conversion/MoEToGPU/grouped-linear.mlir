// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_80 --moe-select-kernel-config --moe-distribute-to-grid --canonicalize --mlir-print-local-scope | FileCheck %s
// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_80 --moe-select-kernel-config --moe-distribute-to-grid --canonicalize --convert-moe-to-gpu | FileCheck %s --check-prefix=KERNEL

// A block for each 8 features of y and group of rows: with 100 rows of 8
// experts there may be 10 runs that are no whole groups, and 3 groups of 32.

// CHECK-LABEL: func.func @layer
// CHECK:         scf.forall (%{{.*}}, %{{.*}}) in (4, 13) {
// CHECK:           memref.alloc() : memref<8x4x4x32xf32>
// CHECK:         mapping = [#gpu.block<y>, #gpu.block<x>], moe.block_threads = 256 : i32

// Chunks of 64 features two at a time, and the rest one at a time: four products
// of each.

// KERNEL-LABEL:    gpu.func @layer_kernel
// KERNEL:            memref.view %{{.*}} : memref<16384xi8, #gpu.address_space<workgroup>> to memref<8x4x4x32xf32
// KERNEL-COUNT-32:   nvvm.mma.sync
// KERNEL:            scf.for
// KERNEL-COUNT-16:   nvvm.mma.sync
// KERNEL-NOT:        nvvm.mma.sync
// KERNEL:            gpu.barrier
func.func @layer(%x: memref<50x192xbf16>, %w: memref<8x64x192xbf16>, %offsets: memref<9xi32>,
                 %rows: memref<100xi32>, %y: memref<100x32xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets : memref<50x192xbf16>, memref<8x64x192xbf16>, memref<9xi32>)
      rows(%rows : memref<100xi32>) outs(%y : memref<100x32xbf16>)
      {activation = #moe.activation<silu>, gate = #moe.gate<concatenated>}
  return
}
