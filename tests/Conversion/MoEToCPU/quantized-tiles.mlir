// RUN: %moe-opt %s --convert-moe-to-cpu="int8-dot bf16-dot bf16-tiles byte-table" --split-input-file | FileCheck %s

// Rows of bf16 are multiplied by a matrix unit, a block of 32 features at a
// time, with four vectors of columns whose codes became pairs in a buffer. A
// lonely row is read and written with a stride of 0: there are no others.

// CHECK-LABEL: func @bf16_rows
// CHECK:         memref.view {{.*}} to memref<{{[0-9]+}}x2x64xi32>
// CHECK:         %[[PAIRS:.*]] = memref.view {{.*}} to memref<{{[0-9]+}}x2x128xbf16>
// CHECK-COUNT-4: amx.tile_zero
// CHECK:         amx.tile_load {{.*}}, %[[STRIDE:.*]] : memref<144x{{[0-9]+}}xbf16> into !amx.tile<16x32xbf16>
// CHECK:         amx.tile_load %[[PAIRS]]
// CHECK-COUNT-4: amx.tile_mulf
// CHECK:         amx.tile_store {{.*}}, %[[STRIDE]]
// CHECK-NOT:     avx512bf16
// CHECK-NOT:     moe.
func.func @bf16_rows(%x: memref<?x128xbf16>, %w: memref<8x2x16x64x4xi8>, %offsets: memref<9xi32>,
                     %scales: memref<8x2x4x64xbf16>, %y: memref<?x128xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x128xbf16>, memref<8x2x16x64x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x4x64xbf16>) outs(%y : memref<?x128xbf16>)
      {format = #moe.weight_format<int4>, group = 32 : i64, packed = 64 : i64}
  return
}

// -----

// Rows of int8 are not: integers are exact, and few rows are faster so.

// CHECK-LABEL: func @int8_rows
// CHECK-NOT:     amx.tile
// CHECK:         avx512.vpdpbusd
func.func @int8_rows(%x: memref<?x128xbf16>, %w: memref<8x2x16x64x4xi8>, %offsets: memref<9xi32>,
                     %scales: memref<8x2x4x64xbf16>, %y: memref<?x128xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x128xbf16>, memref<8x2x16x64x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x4x64xbf16>) outs(%y : memref<?x128xbf16>)
      {format = #moe.weight_format<int4>, group = 32 : i64, packed = 64 : i64,
       activations = #moe.activation_format<int8>}
  return
}

// -----

// Of two levels a scale is made once for all rows of a block. Six bits become
// pairs as four do.

// CHECK-LABEL: func @two_levels
// CHECK:         vector.load {{.*}} : memref<8x2x48x64x4xi8>, vector<64xi8>
// CHECK:         amx.tile_mulf
// CHECK:         %[[UNIT:.*]] = arith.extf {{.*}} : vector<16xf16> to vector<16xf32>
// CHECK:         %[[BYTES:.*]] = arith.extsi {{.*}} : vector<16xi8> to vector<16xi32>
// CHECK:         %[[STEP:.*]] = arith.sitofp %[[BYTES]]
// CHECK:         arith.mulf %[[STEP]], %[[UNIT]] : vector<16xf32>
// CHECK-NOT:     moe.
func.func @two_levels(%x: memref<?x256xbf16>, %w: memref<8x2x48x64x4xi8>, %offsets: memref<9xi32>,
                      %scales: memref<8x2x10x64xi8>, %y: memref<?x128xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x256xbf16>, memref<8x2x48x64x4xi8>, memref<9xi32>)
      scales(%scales : memref<8x2x10x64xi8>) outs(%y : memref<?x128xbf16>)
      {format = #moe.weight_format<int6>, group = 32 : i64, packed = 64 : i64}
  return
}
