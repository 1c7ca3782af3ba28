// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_90a --moe-select-kernel-config --moe-distribute-to-grid --canonicalize --mlir-print-local-scope | FileCheck %s
// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_90a --moe-select-kernel-config --moe-distribute-to-grid --canonicalize --convert-moe-to-gpu | FileCheck %s --check-prefix=KERNEL
// RUN: not %moe-opt %s --moe-attach-nvvm-target=chip=sm_90 --moe-select-kernel-config 2>&1 | FileCheck %s --check-prefix=REFUSED

// Blocks of three warpgroups, up to 528 of them, each with four slots of 48 KB.

// CHECK-LABEL: func.func @many_rows
// CHECK:         scf.forall (%{{.*}}) in (%{{.*}}) {
// CHECK:           memref.alloc() : memref<197792xi8>
// CHECK:         mapping = [#gpu.block<x>], moe.block_threads = 384 : i32

// The third warpgroup copies, 8 units of rows of x and 16 of the weight a thread.
// The others begin the sums with one chunk, and add four in an iteration.

// KERNEL-LABEL:    gpu.func @many_rows_kernel
// KERNEL:            setmaxnreg.dec.sync.aligned.u32 88
// KERNEL-COUNT-24:   nvvm.cp.async.shared.global
// KERNEL-NOT:        nvvm.cp.async.shared.global
// KERNEL:            setmaxnreg.inc.sync.aligned.u32 208
// KERNEL:            m64n256k16.f32.bf16.bf16
// KERNEL:            wgmma.wait_group.sync.aligned 0;
// KERNEL:            scf.for
// KERNEL-COUNT-3:    wgmma.wait_group.sync.aligned 1;
// KERNEL:            wgmma.wait_group.sync.aligned 0;

// REFUSED: error: 'moe.grouped_linear' op has no such kernel on sm_90: {{.*}}whose kernel expects sm_90a, and rows and weights of one 16-bit type
func.func @many_rows(%x: memref<?x576xbf16>, %w: memref<8x512x576xbf16>, %offsets: memref<9xi32>,
                     %rows: memref<?xi32>, %y: memref<?x256xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets : memref<?x576xbf16>, memref<8x512x576xbf16>, memref<9xi32>)
      rows(%rows : memref<?xi32>) outs(%y : memref<?x256xbf16>)
      {activation = #moe.activation<silu>, gate = #moe.gate<concatenated>,
       moe.kernel_config = #moe.kernel_config<schedule = wgmma>}
  return
}
