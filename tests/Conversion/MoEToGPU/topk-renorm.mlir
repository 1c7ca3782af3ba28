// RUN: %moe-opt %s --split-input-file --convert-moe-to-gpu --canonicalize --cse --mlir-print-local-scope | FileCheck %s

// 16-bit scores and the index share a 32-bit key. 64 experts are 16 keys on each
// of 4 lanes: two 16-byte loads, two words an instruction, a network for each 8
// keys, two exchanges of the 8 highest. Nothing loops over the k choices, and a
// lane stores its two by one access.

// CHECK-LABEL: gpu.func @packs_16_bit_scores_kernel
// CHECK-NOT:     moe.
// CHECK-COUNT-2: vector.load {{.*}} {alignment = 16 : i64} {{.*}} vector<8xbf16>
// CHECK-COUNT-8: llvm.inline_asm {{.*}}"fma.rn.bf16x2
// CHECK-COUNT-7: llvm.inline_asm {{.*}}"max.NaN.bf16x2
// CHECK-COUNT-8: llvm.inline_asm {{.*}}"prmt.b32
// CHECK-NOT:     scf.for
// CHECK:         arith.maxui {{.*}} : i32
// CHECK-COUNT-16: gpu.shuffle xor {{.*}} : i32
// CHECK:         llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f"
// CHECK:         llvm.call_intrinsic "llvm.nvvm.rcp.approx.ftz.f"
// CHECK:         vector.store {{.*}} {alignment = 8 : i64} {{.*}} vector<2xf32>
// CHECK:         vector.store {{.*}} {alignment = 8 : i64} {{.*}} vector<2xi32>
// CHECK-NOT:     math.
func.func @packs_16_bit_scores(%z: memref<64x64xbf16>, %gates: memref<64x8xf32>,
                               %indices: memref<64x8xi32>) {
  scf.forall (%i) in (1) {
    moe.topk_renorm ins(%z : memref<64x64xbf16>)
        outs(%gates, %indices : memref<64x8xf32>, memref<64x8xi32>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// CHECK-LABEL: gpu.func @compares_f32_scores_in_64_bits_kernel
// CHECK-COUNT-4: vector.load {{.*}} {alignment = 16 : i64} {{.*}} vector<4xf32>
// CHECK-NOT:     scf.for
// CHECK:         arith.maxui {{.*}} : i64
// CHECK-COUNT-16: gpu.shuffle xor {{.*}} : i64
func.func @compares_f32_scores_in_64_bits(
    %z: memref<64x64xf32>, %gates: memref<64x8xf32>, %indices: memref<64x8xi32>) {
  scf.forall (%i) in (1) {
    moe.topk_renorm ins(%z : memref<64x64xf32>)
        outs(%gates, %indices : memref<64x8xf32>, memref<64x8xi32>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Softmax over the selected logits needs no exponential of the others: one a
// slot, here two slots of four lanes.

// CHECK-LABEL: gpu.func @needs_no_row_softmax_to_renormalise_kernel
// CHECK-COUNT-2: llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f"
// CHECK-NOT:     ex2
func.func @needs_no_row_softmax_to_renormalise(
    %z: memref<64x64xf32>, %gates: memref<64x8xf32>, %indices: memref<64x8xi32>) {
  scf.forall (%i) in (1) {
    moe.topk_renorm ins(%z : memref<64x64xf32>)
        outs(%gates, %indices : memref<64x8xf32>, memref<64x8xi32>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// CHECK-LABEL: gpu.func @needs_the_row_softmax_without_renorm_kernel
// CHECK-COUNT-18: llvm.call_intrinsic "llvm.nvvm.ex2.approx.ftz.f"
// CHECK-NOT:     ex2
func.func @needs_the_row_softmax_without_renorm(
    %z: memref<64x64xf32>, %gates: memref<64x8xf32>, %indices: memref<64x8xi32>) {
  scf.forall (%i) in (1) {
    moe.topk_renorm ins(%z : memref<64x64xf32>)
        outs(%gates, %indices : memref<64x8xf32>, memref<64x8xi32>)
        {renorm = false}
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Rows that start anywhere are loaded by element. Lanes past the last expert
// hold the key of no expert and load inside the row.

// CHECK-LABEL: gpu.func @handles_any_number_of_experts_kernel
// CHECK-NOT:     vector.load
// CHECK:         arith.minsi %{{.*}}, %c36_i32
// CHECK:         arith.cmpi slt, %{{.*}}, %c37_i32
func.func @handles_any_number_of_experts(
    %z: memref<8x37xf32>, %gates: memref<8x5xf32>, %indices: memref<8x5xi64>) {
  scf.forall (%i) in (1) {
    moe.topk_renorm ins(%z : memref<8x37xf32>)
        outs(%gates, %indices : memref<8x5xf32>, memref<8x5xi64>)
  } {mapping = [#gpu.block<x>]}
  return
}

// -----

// Where a sorted list of 64-bit keys would not stay in registers, the choices
// come out one a round.

// CHECK-LABEL: gpu.func @chooses_many_by_rounds_kernel
// CHECK:         scf.for %{{.*}} = %c0_i32 to %c64_i32
// CHECK:           arith.maxui {{.*}} : i64
// CHECK:           gpu.shuffle xor {{.*}} : i64
func.func @chooses_many_by_rounds(
    %z: memref<4x2048xf32>, %gates: memref<4x64xf32>, %indices: memref<4x64xi64>) {
  scf.forall (%i) in (1) {
    moe.topk_renorm ins(%z : memref<4x2048xf32>)
        outs(%gates, %indices : memref<4x64xf32>, memref<4x64xi64>)
  } {mapping = [#gpu.block<x>]}
  return
}
