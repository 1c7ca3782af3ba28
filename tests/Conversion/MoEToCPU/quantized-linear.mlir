// RUN: %moe-opt %s --convert-moe-to-cpu="int8-dot bf16-dot byte-table" --split-input-file | FileCheck %s
// RUN: %moe-opt %s --convert-moe-to-cpu="int8-dot bf16-dot stream-prefetcher" --split-input-file | FileCheck %s --check-prefix=STREAM
// RUN: %moe-opt %s --convert-moe-to-cpu="vector-width=8 vector-registers=16" --split-input-file | FileCheck %s --check-prefix=FLOATS
// RUN: %moe-opt %s --convert-moe-to-cpu="vector-width=8 vector-registers=16 int8-dot" --split-input-file | FileCheck %s --check-prefix=YMM

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
// YMM-LABEL: func @int8_rows
// YMM:         vector.load {{.*}} : memref<8x2x16x32x4xi8>, vector<32xi8>
// YMM:         llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.256"
// YMM-NOT:     moe.
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

// -----

// With 0x4300 (twice: 1124090624) above it a code of 4 bits is the bf16 of 128
// more, and so much more are its zeros. One row, and two, ask for the lines of a block ahead,
// each once: of two vectors of columns four, and one of scales. With a CPU that asks for what is
// read in order by itself they ask for the scales alone.

// CHECK-LABEL: func @int4_bf16_rows
// CHECK:         scf.index_switch
// CHECK-NEXT:    case 1 {
// CHECK:           scf.for
// CHECK-COUNT-8:     memref.prefetch {{.*}}, read, locality<3>, data : memref<8x2x16x32x4xi8>
// CHECK:             memref.prefetch {{.*}}, read, locality<3>, data : memref<8x2x4x32xbf16>
// CHECK-NOT:         memref.prefetch
// CHECK:             %[[BYTES:.*]] = vector.load {{.*}} : memref<8x2x16x32x4xi8>, vector<64xi8>
// CHECK:             %[[WORDS:.*]] = vector.bitcast %[[BYTES]]
// CHECK:             %[[NIBBLES:.*]] = arith.constant dense<252645135> : vector<16xi32>
// CHECK:             %[[LOW:.*]] = arith.andi %[[WORDS]], %[[NIBBLES]]
// CHECK:             %[[PAIR_OF_128:.*]] = arith.constant dense<1124090624> : vector<16xi32>
// CHECK:             %[[EVEN_BYTES:.*]] = arith.constant dense<16711935> : vector<16xi32>
// CHECK:             %[[EVEN:.*]] = arith.andi %[[LOW]], %[[EVEN_BYTES]]
// CHECK:             arith.ori %[[EVEN]], %[[PAIR_OF_128]]
// CHECK:             llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"
// CHECK:             %[[BEHIND:.*]] = arith.constant dense<-1.28{{0*}}e+02> : vector<16xf32>
// CHECK:             %[[ZERO:.*]] = vector.load {{.*}} : memref<8x2x4x32xf32>, vector<16xf32>
// CHECK:             arith.subf %[[BEHIND]], %[[ZERO]]
// CHECK:         case 2 {
// CHECK-COUNT-9:     memref.prefetch
// CHECK-NOT:         memref.prefetch
// CHECK:         case 3 {
// CHECK-NOT:         memref.prefetch
// CHECK-NOT:     moe.
// STREAM-LABEL: func @int4_bf16_rows
// STREAM:         case 1 {
// STREAM-NOT:         memref.prefetch {{.*}} : memref<8x2x16x32x4xi8>
// STREAM:             memref.prefetch {{.*}} : memref<8x2x4x32xbf16>
// STREAM-NOT:         memref.prefetch
// STREAM:         case 2 {
// FLOATS-LABEL: func @int4_bf16_rows
// FLOATS-NOT:     llvm.call_intrinsic
// FLOATS:         vector.load {{.*}} : memref<8x2x16x32x4xi8>, vector<32xi8>
// FLOATS:         arith.sitofp {{.*}} : vector<8xi32> to vector<8xf32>
// FLOATS:         math.fma {{.*}} : vector<8xf32>
// FLOATS-NOT:     llvm.call_intrinsic
// FLOATS-NOT:     moe.
func.func @int4_bf16_rows(%x: memref<?x128xbf16>, %w: memref<8x2x16x32x4xi8>, %offsets: memref<9xi32>,
                          %scales: memref<8x2x4x32xbf16>, %zeros: memref<8x2x4x32xf32>,
                          %y: memref<?x64xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x128xbf16>, memref<8x2x16x32x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x4x32xbf16>) zeros(%zeros : memref<8x2x4x32xf32>)
      outs(%y : memref<?x64xbf16>)
      {format = #moe.weight_format<int4>, group = 32 : i64, packed = 32 : i64}
  return
}

// -----

// A table of 128 gives a code less 127.5, as codes from 128 on mirror those below. Without one a
// bf16 has no place for codes above 128. Nor is a float of 8 bits a byte: both are multiplied as f32.

// CHECK-LABEL: func @int8_bf16_rows_and_float8_int8_rows
// CHECK:         arith.minui {{.*}} : vector<64xi8>
// CHECK-COUNT-2: llvm.call_intrinsic "llvm.x86.avx512.vpermi2var.qi.512"
// CHECK:         llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"
// CHECK:         math.roundeven
// CHECK:         return
// STREAM-LABEL: func @int8_bf16_rows_and_float8_int8_rows
// STREAM-NOT:     llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"
// STREAM-NOT:     llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"
// STREAM:         math.fma {{.*}} : vector<16xf32>
// STREAM:         math.roundeven
// STREAM-NOT:     llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"
// STREAM-NOT:     llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"
// STREAM:         math.fma {{.*}} : vector<16xf32>
// STREAM-NOT:     llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"
// STREAM-NOT:     llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"
// STREAM:         return
func.func @int8_bf16_rows_and_float8_int8_rows(%x: memref<?x128xbf16>, %w: memref<8x2x32x32x4xi8>, %offsets: memref<9xi32>,
                          %scales: memref<8x2x1x32xbf16>, %y: memref<?x64xbf16>, %z: memref<?x64xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x128xbf16>, memref<8x2x32x32x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x1x32xbf16>) outs(%y : memref<?x64xbf16>)
      {format = #moe.weight_format<int8>, packed = 32 : i64}
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x128xbf16>, memref<8x2x32x32x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x1x32xbf16>) outs(%z : memref<?x64xbf16>)
      {format = #moe.weight_format<fp8_e4m3>, packed = 32 : i64,
       activations = #moe.activation_format<int8>}
  return
}

// -----

// Of 40 features the last block has eight; what is behind them is not read. A
// group of 16 is a block of its own.

// CHECK-LABEL: func @last_features
// CHECK-DAG:       memref.alloca() {alignment = 64 : i64} : memref<128x48xf32>
// CHECK-DAG:       memref.alloca() {alignment = 64 : i64} : memref<128x3xf32>
// CHECK:           %[[LEFT:.*]] = arith.subi %c40{{.*}}, %{{.*}} : index
// CHECK:           %[[LANES:.*]] = vector.create_mask %[[LEFT]] : vector<16xi1>
// CHECK:           vector.maskedload %arg0{{.*}}, %[[LANES]]
// CHECK-NOT:       vector.load %arg0
// CHECK-NOT:     moe.
func.func @last_features(%x: memref<?x40xf32>, %w: memref<8x2x8x32x4xi8>, %offsets: memref<9xi32>,
                         %scales: memref<8x2x3x32xf32>, %y: memref<?x64xf32>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x40xf32>, memref<8x2x8x32x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x3x32xf32>) outs(%y : memref<?x64xf32>)
      {format = #moe.weight_format<int4>, group = 16 : i64, packed = 32 : i64}
  return
}

// -----

// Scales of two levels: the f16 of 256 features are loaded once for their eight
// blocks, each of which has a byte. A block of 16 codes of 6 bits is three lines;
// no code is 128 or more, so that words of 16 bits hold two products of bytes.

// CHECK-LABEL: func @two_levels
// CHECK:         scf.for %{{.*}} = %{{.*}} to %{{.*}} step %c16
// CHECK:           vector.bitcast {{.*}} : vector<16xi16> to vector<16xf16>
// CHECK:           scf.for
// CHECK:             vector.load {{.*}} : memref<8x2x18x32xi8>, vector<16xi8>
// CHECK:             arith.extsi {{.*}} : vector<16xi8> to vector<16xi32>
// CHECK-COUNT-3:     vector.load {{.*}} : memref<8x2x48x32x4xi8>, vector<64xi8>
// CHECK:             llvm.call_intrinsic "llvm.x86.avx512.vpdpbusd.512"
// CHECK-NOT:     moe.
// YMM-LABEL: func @two_levels
// YMM:         arith.extf {{.*}} : vector<8xf16> to vector<8xf32>
// YMM-NOT:     moe.
func.func @two_levels(%x: memref<?x256xbf16>, %w: memref<8x2x48x32x4xi8>, %offsets: memref<9xi32>,
                      %scales: memref<8x2x18x32xi8>, %y: memref<?x64xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x256xbf16>, memref<8x2x48x32x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x18x32xi8>) outs(%y : memref<?x64xbf16>)
      {format = #moe.weight_format<int6>, group = 16 : i64, packed = 32 : i64,
       activations = #moe.activation_format<int8>}
  return
}
