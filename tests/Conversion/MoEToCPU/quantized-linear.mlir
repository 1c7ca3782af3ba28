// RUN: %moe-opt %s --convert-moe-to-cpu="int8-dot bf16-dot byte-table" --split-input-file | FileCheck %s
// RUN: %moe-opt %s --convert-moe-to-cpu="vector-width=8 vector-registers=16" --split-input-file | FileCheck %s --check-prefix=FLOATS

// Codes are read in the order of addresses and multiplied where they are in
// registers; a block's sum is multiplied with its scale. With rows of bytes all
// of it are integers, and four products one instruction.

// CHECK-LABEL: func @int8_rows
// CHECK:         scf.forall
// CHECK:           vector.reduction <maximumf>
// CHECK:           math.roundeven
// CHECK:           arith.fptosi
// CHECK:           memref.prefetch {{.*}} : memref<8x2x16x32x4xi8>
// CHECK:           vector.load {{.*}} : memref<8x2x16x32x4xi8>, vector<64xi8>
// CHECK:           llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"
// CHECK:           vector.load {{.*}} : memref<8x2x4x32xbf16>, vector<16xbf16>
// CHECK-NOT:     moe.
// FLOATS-LABEL: func @int8_rows
// FLOATS:         math.roundeven
// FLOATS:         arith.sitofp {{.*}} : vector<8xi32> to vector<8xf32>
// FLOATS:         math.fma {{.*}} : vector<8xf32>
// FLOATS-NOT:     moe.
func.func @int8_rows(%x: memref<?x128xbf16>, %w: memref<8x2x16x32x4xi8>, %offsets: memref<9xi32>,
                     %scales: memref<8x2x4x32xbf16>, %y: memref<?x64xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x128xbf16>, memref<8x2x16x32x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x4x32xbf16>) outs(%y : memref<?x64xbf16>)
      {format = #moe.weight_format<int4>, group = 32 : i64, packed = 32 : i64,
       activations = #moe.activation_format<int8>}
  return
}

// -----

// Rows that are not rounded are multiplied in pairs of bf16; codes of 4 bits
// become such pairs by one `or`. Floats of 4 bits are looked up first.

// CHECK-LABEL: func @bf16_rows
// CHECK:         llvm.call_intrinsic "llvm.x86.avx512.pshuf.b.512"
// CHECK:         arith.ori {{.*}} : vector<16xi32>
// CHECK:         llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"
// CHECK-NOT:     math.roundeven
// CHECK-NOT:     moe.
// FLOATS-LABEL: func @bf16_rows
// FLOATS:         llvm.call_intrinsic "llvm.x86.avx2.pshuf.b"
// FLOATS-NOT:     moe.
func.func @bf16_rows(%x: memref<?x128xbf16>, %w: memref<8x2x16x32x4xi8>, %offsets: memref<9xi32>,
                     %scales: memref<8x2x4x32xbf16>, %y: memref<?x64xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x128xbf16>, memref<8x2x16x32x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x4x32xbf16>) outs(%y : memref<?x64xbf16>)
      {format = #moe.weight_format<fp4_e2m1>, group = 32 : i64, packed = 32 : i64}
  return
}

// -----

// Both bytes of a bf16 are looked up by those of floats of 8 bits. Without such
// tables an f16 is made of them, whose bits of mantissa are at other places.

// CHECK-LABEL: func @float8
// CHECK-COUNT-2: llvm.call_intrinsic "llvm.x86.avx512.vpermi2var.qi.512"
// CHECK:         llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"
// CHECK-NOT:     moe.
// FLOATS-LABEL: func @float8
// FLOATS:         arith.extf {{.*}} : vector<16xf16> to vector<16xf32>
// FLOATS-COUNT-4: vector.shuffle
// FLOATS-NOT:     moe.
func.func @float8(%x: memref<?x128xbf16>, %w: memref<8x2x32x32x4xi8>, %offsets: memref<9xi32>,
                  %scales: memref<8x2x1x32xf32>, %y: memref<?x64xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x128xbf16>, memref<8x2x32x32x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x1x32xf32>) outs(%y : memref<?x64xbf16>)
      {format = #moe.weight_format<fp8_e4m3>, group = 128 : i64, packed = 32 : i64}
  return
}
