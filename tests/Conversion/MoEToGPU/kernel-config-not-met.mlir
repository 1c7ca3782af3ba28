// RUN: not %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_80 --convert-moe-to-gpu --remarks-filter-missed='convert-moe-to-gpu' -o %t 2>&1 | FileCheck %s

// A kernel that was chosen, or asked for, is not replaced without a word. Only
// buffers show that rows do not start at multiples of 16 bytes.

// CHECK:      remark: [Missed] KernelConfig
// CHECK-SAME: Reason="its kernel expects queries and keys of one 16-bit type, and a multiple of 8 features whose rows start at multiples of 16 bytes"
// CHECK-SAME: moe.softmax_mix runs with schedule float in place of mma
func.func @mix_of_other_rows(
    %all: memref<1x1x64x73xbf16>, %k: memref<1x1x?x72xbf16>, %lse: memref<1x1x64xf32>) {
  %q = memref.subview %all[0, 0, 0, 0] [1, 1, 64, 72] [1, 1, 1, 1]
      : memref<1x1x64x73xbf16> to memref<1x1x64x72xbf16, strided<[4672, 4672, 73, 1]>>
  scf.forall (%i) in (1) {
    moe.softmax_mix ins(%q, %k : memref<1x1x64x72xbf16, strided<[4672, 4672, 73, 1]>>, memref<1x1x?x72xbf16>)
        outs(%lse : memref<1x1x64xf32>)
        {moe.kernel_config = #moe.kernel_config<schedule = mma>}
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Nor that they lie in workgroup memory, from which nothing is copied.

// CHECK:      remark: [Missed] KernelConfig
// CHECK-SAME: Reason="its kernel expects tokens and weights of one 16-bit type in the GPU's memory
// CHECK-SAME: moe.router_logits runs with schedule float in place of mma
func.func @logits_of_produced_rows(%a: memref<16x64xbf16>, %w: memref<8x64xbf16>, %z: memref<16x8xf32>) {
  scf.forall (%i) in (1) {
    %h = memref.alloc() : memref<16x64xbf16>
    memref.copy %a, %h : memref<16x64xbf16> to memref<16x64xbf16>
    moe.router_logits ins(%h, %w : memref<16x64xbf16>, memref<8x64xbf16>)
        outs(%z : memref<16x8xf32>)
        {moe.kernel_config = #moe.kernel_config<schedule = mma>}
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// CHECK:      remark: [Missed] KernelConfig
// CHECK-SAME: moe.softmax_mix_backward_dq runs with schedule float in place of mma
func.func @gradient_of_other_rows(
    %all: memref<1x1x64x73xbf16>, %k: memref<1x1x?x72xbf16>, %lse: memref<1x1x64xf32>,
    %delta: memref<1x1x64xf32>, %dq: memref<1x1x64x72xf32>) {
  %q = memref.subview %all[0, 0, 0, 0] [1, 1, 64, 72] [1, 1, 1, 1]
      : memref<1x1x64x73xbf16> to memref<1x1x64x72xbf16, strided<[4672, 4672, 73, 1]>>
  scf.forall (%i) in (1) {
    moe.softmax_mix_backward_dq
        ins(%q, %k, %lse, %delta : memref<1x1x64x72xbf16, strided<[4672, 4672, 73, 1]>>, memref<1x1x?x72xbf16>, memref<1x1x64xf32>, memref<1x1x64xf32>)
        outs(%dq : memref<1x1x64x72xf32>)
        {moe.kernel_config = #moe.kernel_config<schedule = mma>}
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// A schedule that GPUs do not have.

// CHECK:      remark: [Missed] KernelConfig
// CHECK-SAME: Reason="the op has no such kernel on GPUs"
// CHECK-SAME: moe.router_logits runs with schedule mma in place of queries
func.func @of_a_cpu(%h: memref<16x64xbf16>, %w: memref<8x64xbf16>, %z: memref<16x8xf32>) {
  scf.forall (%i) in (1) {
    moe.router_logits ins(%h, %w : memref<16x64xbf16>, memref<8x64xbf16>)
        outs(%z : memref<16x8xf32>)
        {moe.kernel_config = #moe.kernel_config<schedule = queries>}
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// CHECK:      remark: [Missed] KernelConfig
// CHECK-SAME: Reason="the op has no such kernel on GPUs"
// CHECK-SAME: moe.topk_renorm runs with schedule any in place of mma
func.func @selection_on_tensor_cores(%z: memref<4x16xf32>, %gates: memref<4x2xf32>, %indices: memref<4x2xi32>) {
  scf.forall (%i) in (1) {
    moe.topk_renorm ins(%z : memref<4x16xf32>)
        outs(%gates, %indices : memref<4x2xf32>, memref<4x2xi32>)
        {moe.kernel_config = #moe.kernel_config<schedule = mma>}
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Where the blocks are given, a kernel of other blocks is an error.

// CHECK: error: cannot run 'moe.softmax_mix_backward_dq' on the threads of a block: expected blocks of 128 threads, found 256
func.func @blocks_of_another_size(
    %q: memref<1x1x64x64xbf16>, %k: memref<1x1x?x64xbf16>, %lse: memref<1x1x64xf32>,
    %delta: memref<1x1x64xf32>, %dq: memref<1x1x64x64xf32>) {
  scf.forall (%i) in (1) {
    moe.softmax_mix_backward_dq
        ins(%q, %k, %lse, %delta : memref<1x1x64x64xbf16>, memref<1x1x?x64xbf16>, memref<1x1x64xf32>, memref<1x1x64xf32>)
        outs(%dq : memref<1x1x64x64xf32>)
        {moe.kernel_config = #moe.kernel_config<rows = 64, threads = 128, schedule = mma>}
  } {mapping = [#gpu.block<x>], moe.block_threads = 256 : i64}
  return
}

// -----

// CHECK: error: cannot run 'moe.softmax_mix' on the threads of a block: expected a static number of columns of the values, in at most 16 equal groups of at most 256, found #moe.kernel_config<rows = 32, schedule = float>
func.func @columns_without_equal_groups(
    %q: memref<1x1x32x64xf32>, %v: memref<1x32x257xf32>, %y: memref<1x1x32x257xf32>, %lse: memref<1x1x32xf32>) {
  scf.forall (%i) in (1) {
    moe.softmax_mix ins(%q, %q : memref<1x1x32x64xf32>, memref<1x1x32x64xf32>)
        values(%v : memref<1x32x257xf32>)
        outs(%y, %lse : memref<1x1x32x257xf32>, memref<1x1x32xf32>)
        {moe.kernel_config = #moe.kernel_config<rows = 32, schedule = float>}
  } {mapping = [#gpu.block<x>]}
  return
}
