// RUN: %moe-opt %s --convert-moe-to-cpu="bf16-dot bf16-tiles" --split-input-file | FileCheck %s

// Rows of x, copied, are left tiles, and panels of pairs right ones, where they
// lie: one tile of rows by four vectors of columns, or two by two. 100 ks are
// three steps of 32 and one of 4, whose pairs are copied with zeros behind them.

// CHECK-LABEL: func @packed
// CHECK:         memref.collapse_shape {{.*}} : memref<8x2x50x64x2xbf16> into memref<8x2x50x128xbf16>
// CHECK-COUNT-4: amx.tile_zero : !amx.tile<16x16xf32>
// CHECK:         scf.for
// CHECK:           amx.tile_load {{.*}} : memref<32x{{[0-9]+}}xbf16> into !amx.tile<16x32xbf16>
// CHECK-COUNT-4:   amx.tile_mulf
// CHECK:         amx.tile_load {{.*}} : memref<32x{{[0-9]+}}xbf16> into !amx.tile<16x32xbf16>
// CHECK:         amx.tile_load {{.*}} : memref<16x128xbf16> into !amx.tile<16x32xbf16>
// CHECK-COUNT-4: amx.tile_store
// CHECK-NOT:     avx512bf16
// CHECK-NOT:     moe.
func.func @packed(%x: memref<?x100xbf16>, %w: memref<8x2x50x64x2xbf16>, %offsets: memref<9xi64>,
                  %y: memref<?x128xf32>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x100xbf16>, memref<8x2x50x64x2xbf16>, memref<9xi64>)
      outs(%y : memref<?x128xf32>) {packed = 64 : i64}
  return
}

// -----

// Columns whose ks lie side by side are left tiles where they lie, and rows
// become panels. The last tile begins six columns early: no tile reads what is
// behind the columns.

// CHECK-LABEL: func @k_contiguous
// CHECK:         memref.view {{.*}} to memref<2x32x16xi32>
// CHECK:         memref.view {{.*}} to memref<2x32x32xbf16>
// CHECK:         amx.tile_load {{.*}} : memref<8x74x64xbf16> into !amx.tile<16x32xbf16>
// CHECK:         amx.tile_store
// CHECK:         vector.shuffle
// CHECK-NOT:     moe.
func.func @k_contiguous(%x: memref<?x64xbf16>, %w: memref<8x74x64xbf16>, %offsets: memref<9xi64>,
                        %y: memref<?x74xf32>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x64xbf16>, memref<8x74x64xbf16>, memref<9xi64>)
      outs(%y : memref<?x74xf32>)
  return
}

// -----

// Columns that lie side by side become pairs in a buffer, which is bf16 for
// tiles.

// CHECK-LABEL: func @n_contiguous
// CHECK:         %[[PAIRS:.*]] = memref.view {{.*}} : memref<{{[0-9]+}}xi8> to memref<{{.*}}x64xi32>
// CHECK:         %[[ELEMENTS:.*]] = memref.view {{.*}} : memref<{{[0-9]+}}xi8> to memref<{{.*}}x128xbf16>
// CHECK:         vector.store {{.*}}, %[[PAIRS]]
// CHECK:         amx.tile_load %[[ELEMENTS]]
func.func @n_contiguous(%x: memref<?x64xbf16>, %w: memref<8x64x128xbf16>,
                        %offsets: memref<9xi64>, %y: memref<?x128xf32>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x64xbf16>, memref<8x64x128xbf16>, memref<9xi64>)
      outs(%y : memref<?x128xf32>) {transposed}
  return
}

// -----

// Numbers of 32 bits are no pairs.

// CHECK-LABEL: func @floats
// CHECK-NOT:     amx.
func.func @floats(%x: memref<?x64xf32>, %w: memref<8x74x64xf32>, %offsets: memref<9xi64>,
                  %y: memref<?x74xf32>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x64xf32>, memref<8x74x64xf32>, memref<9xi64>)
      outs(%y : memref<?x74xf32>)
  return
}
