// RUN: %moe-opt %s --split-input-file --moe-attach-nvvm-target=chip=sm_89 --moe-select-kernel-config --convert-moe-to-gpu --canonicalize --cse --mlir-print-local-scope | FileCheck %s

// On tensor cores. The prologue starts the first chunk of queries and keys; in
// the loops, a wait and a barrier come before the next copies, and these before
// the products that hide them. Weights stay in registers: their bf16 parts are
// the left operands of the second product.

// CHECK-LABEL: moe.kernels = [{
// CHECK-SAME:    dynamic_smem = {{[0-9]+}} : i64
// CHECK:       gpu.launch_func @on_tensor_cores_gpu
// CHECK-SAME:    dynamic_shared_memory_size %{{.*}}
// CHECK:       llvm.mlir.global external @on_tensor_cores_kernel_shared() {addr_space = 3 : i32, alignment = 128 : i64} : !llvm.array<0 x i8>
// CHECK:       gpu.func @on_tensor_cores_kernel
// CHECK:         gpu.barrier
// CHECK:         nvvm.cp.async.shared.global %{{.*}}, %{{.*}}, 16, cache = cg, %{{.*}}
// CHECK:         nvvm.cp.async.commit.group
// CHECK:         scf.for
// CHECK:           scf.for
// CHECK:             nvvm.cp.async.wait.group 0
// CHECK-NEXT:        gpu.barrier
// CHECK:             nvvm.cp.async.shared.global
// CHECK:             nvvm.cp.async.commit.group
// CHECK:             nvvm.ldmatrix
// CHECK-SAME:          layout = #nvvm.mma_layout<row>
// CHECK:             nvvm.mma.sync
// CHECK-SAME:          multiplicandAPtxType = #nvvm.mma_type<bf16>
// CHECK:             scf.yield
// CHECK:           gpu.shuffle xor
// CHECK:           llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f"
// CHECK:           nvvm.convert.f32x2.to.bf16x2
// CHECK:           nvvm.ldmatrix
// CHECK-SAME:        layout = #nvvm.mma_layout<col>
// CHECK:           nvvm.mma.sync
// CHECK:         nvvm.cp.async.wait.group 0
// CHECK:         memref.store
func.func @on_tensor_cores(
    %q: memref<1x1x128x352xbf16>, %k: memref<1x1x?x352xbf16>,
    %v: memref<1x?x16xbf16>, %mixed: memref<1x1x128x16xf32>,
    %lse: memref<1x1x128xf32>) {
  scf.forall (%i) in (1) {
    moe.softmax_mix
        ins(%q, %k : memref<1x1x128x352xbf16>, memref<1x1x?x352xbf16>)
        values(%v : memref<1x?x16xbf16>)
        outs(%mixed, %lse : memref<1x1x128x16xf32>, memref<1x1x128xf32>)
        {visibility = #moe.visibility<causal>}
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// f32 keeps to the float units, and so do rows that are not whole units of 16
// bytes.

// CHECK-LABEL: gpu.func @on_float_units_kernel
// CHECK-NOT:     nvvm.mma.sync
// CHECK:         llvm.call_intrinsic "llvm.fma.f32"
// CHECK:         gpu.return
func.func @on_float_units(
    %q: memref<1x1x64x32xf32>, %k: memref<1x1x?x32xf32>, %lse: memref<1x1x64xf32>) {
  scf.forall (%i) in (1) {
    moe.softmax_mix ins(%q, %k : memref<1x1x64x32xf32>, memref<1x1x?x32xf32>)
        outs(%lse : memref<1x1x64xf32>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// CHECK-LABEL: gpu.func @rows_without_alignment_kernel
// CHECK-NOT:     nvvm.mma.sync
// CHECK:         gpu.return
func.func @rows_without_alignment(
    %q: memref<1x1x64x13xbf16>, %k: memref<1x1x?x13xbf16>, %lse: memref<1x1x64xf32>) {
  scf.forall (%i) in (1) {
    moe.softmax_mix ins(%q, %k : memref<1x1x64x13xbf16>, memref<1x1x?x13xbf16>)
        outs(%lse : memref<1x1x64xf32>)
  } {mapping = [#gpu.block<x>]}
  return
}
