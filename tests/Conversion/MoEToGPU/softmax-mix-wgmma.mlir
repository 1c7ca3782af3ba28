// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_90a --moe-select-kernel-config --convert-moe-to-gpu --remarks-filter-missed='convert-moe-to-gpu' --canonicalize --cse 2>&1 | FileCheck %s

// The kernel of warpgroups has blocks of its own size, whatever the pass is told.
// A group of products is one piece of assembly, and its wait another one through
// which the sums pass.

// CHECK-LABEL: gpu.func @on_warpgroups_kernel
// CHECK-SAME:    known_block_size = array<i32: 384, 1, 1>
// CHECK:         scf.if
// CHECK:           scf.for
// CHECK:         else
// CHECK:           %[[STARTED:.*]] = llvm.inline_asm has_side_effects asm_dialect = att "{{.*}}wgmma.fence{{.*}}wgmma.mma_async{{.*}}wgmma.commit_group
// CHECK:           %[[SUM:.*]] = llvm.extractvalue %[[STARTED]][0]
// CHECK:           llvm.inline_asm has_side_effects asm_dialect = att "wgmma.wait_group.sync.aligned 0;", "=f,{{.*}},0,1,{{.*}}~{memory}" %[[SUM]],
func.func @on_warpgroups(
    %q: memref<1x1x128x64xbf16>, %k: memref<1x1x?x64xbf16>, %lse: memref<1x1x128xf32>) {
  scf.forall (%i) in (1) {
    moe.softmax_mix ins(%q, %k : memref<1x1x128x64xbf16>, memref<1x1x?x64xbf16>)
        outs(%lse : memref<1x1x128xf32>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Queries that do not fit into shared memory travel with the keys, on mma.sync.

// CHECK:       remark: [Missed] Wgmma | Category:convert-moe-to-gpu
// CHECK-SAME:  Reason="its kernel expects queries and keys of one 16-bit type, a multiple of 8 features
// CHECK-SAME:  moe.softmax_mix runs without wgmma
// CHECK-LABEL: gpu.func @without_a_form_kernel
// CHECK-SAME:    known_block_size = array<i32: 128, 1, 1>
// CHECK-NOT:     wgmma
// CHECK:         nvvm.mma.sync
func.func @without_a_form(
    %q: memref<1x1x64x2048xbf16>, %k: memref<1x1x?x2048xbf16>, %lse: memref<1x1x64xf32>) {
  scf.forall (%i) in (1) {
    moe.softmax_mix ins(%q, %k : memref<1x1x64x2048xbf16>, memref<1x1x?x2048xbf16>)
        outs(%lse : memref<1x1x64xf32>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Ops of one block that want different numbers of threads get what the pass is
// told.

// CHECK:       remark: [Missed] KernelConfig
// CHECK-SAME:  Reason="its loop is shared with kernels for blocks of 128 threads"
// CHECK-SAME:  moe.softmax_mix runs with schedule mma in place of wgmma
// CHECK-LABEL: gpu.func @beside_another_op_kernel
// CHECK-SAME:    known_block_size = array<i32: 128, 1, 1>
// CHECK-NOT:     wgmma
// CHECK:         nvvm.mma.sync
func.func @beside_another_op(
    %q: memref<1x1x64x64xbf16>, %lse: memref<1x1x64xf32>, %z: memref<64x8xf32>,
    %w: memref<64x2xf32>, %e: memref<64x2xi32>) {
  scf.forall (%i) in (1) {
    moe.softmax_mix ins(%q, %q : memref<1x1x64x64xbf16>, memref<1x1x64x64xbf16>)
        outs(%lse : memref<1x1x64xf32>)
    moe.topk_renorm ins(%z : memref<64x8xf32>)
        outs(%w, %e : memref<64x2xf32>, memref<64x2xi32>)
  } {mapping = [#gpu.block<x>]}
  return
}
