// RUN: %moe-opt %s | %moe-opt | FileCheck %s
// RUN: %moe-opt %s --mlir-print-op-generic | %moe-opt | FileCheck %s
// RUN: %moe-opt %s --emit-bytecode | %moe-opt | FileCheck %s

// CHECK-LABEL: func @token_rows
// CHECK:         moe.token_rows ins(%{{[^ ]*}} : tensor<?x2xi32>) outs(%{{[^ ]*}} : tensor<?xi64>) -> tensor<?xi64>
func.func @token_rows(%s: tensor<?x2xi32>, %r: tensor<?xi64>) -> tensor<?xi64> {
  %rows = moe.token_rows ins(%s : tensor<?x2xi32>) outs(%r : tensor<?xi64>) -> tensor<?xi64>
  return %rows : tensor<?xi64>
}

// CHECK-LABEL: func @grouped_linear
// CHECK:         moe.grouped_linear ins(%{{[^ ]*}}, %{{[^ ]*}}, %{{[^ ]*}} : tensor<?x64xf32>, tensor<8x32x64xf32>, tensor<9xi32>)
// CHECK-SAME:      outs(%{{[^ ]*}} : tensor<?x32xf32>) -> tensor<?x32xf32>
func.func @grouped_linear(%x: tensor<?x64xf32>, %w: tensor<8x32x64xf32>, %o: tensor<9xi32>,
                          %y: tensor<?x32xf32>) -> tensor<?x32xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x64xf32>, tensor<8x32x64xf32>, tensor<9xi32>)
      outs(%y : tensor<?x32xf32>) -> tensor<?x32xf32>
  return %r : tensor<?x32xf32>
}

// 16-bit weights with f32 rows; a gate halves the features.

// CHECK-LABEL: func @grouped_linear_with_everything
// CHECK:         moe.grouped_linear ins(%{{[^ ]*}}, %{{[^ ]*}}, %{{[^ ]*}} : tensor<?x64xf32>, tensor<?x64x32xbf16>, tensor<?xi64>)
// CHECK-SAME:      rows(%{{[^ ]*}} : tensor<?xi32>) bias(%{{[^ ]*}} : tensor<?x32xf16>) outs(%{{[^ ]*}} : tensor<?x16xf32>)
// CHECK-SAME:      {activation = #moe.activation<silu>, alpha = 1.702000e+00 : f64, bound = #moe.bound<clamp_activated>,
// CHECK-SAME:       gate = #moe.gate<interleaved>, limit = 7.000000e+00 : f64, transposed,
// CHECK-SAME:       up_limit = 5.000000e+00 : f64, up_offset = 1.000000e+00 : f64}
func.func @grouped_linear_with_everything(
    %x: tensor<?x64xf32>, %w: tensor<?x64x32xbf16>, %o: tensor<?xi64>, %rows: tensor<?xi32>,
    %bias: tensor<?x32xf16>, %y: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x64xf32>, tensor<?x64x32xbf16>, tensor<?xi64>)
      rows(%rows : tensor<?xi32>) bias(%bias : tensor<?x32xf16>) outs(%y : tensor<?x16xf32>)
      {transposed, activation = #moe.activation<silu>, alpha = 1.702, gate = #moe.gate<interleaved>,
       bound = #moe.bound<clamp_activated>, limit = 7.0, up_limit = 5.0, up_offset = 1.0}
      -> tensor<?x16xf32>
  return %r : tensor<?x16xf32>
}

// CHECK-LABEL: func @grouped_linear_packed
// CHECK:         moe.grouped_linear {{.*}} tensor<8x3x7x16xf32>{{.*}} {packed = 16 : i64}
// CHECK:         moe.grouped_linear {{.*}} memref<8x3x4x16x2xbf16>{{.*}} {activation = #moe.activation<gelu>, gate = #moe.gate<concatenated>, packed = 16 : i64}
func.func @grouped_linear_packed(
    %x: tensor<?x7xf32>, %w: tensor<8x3x7x16xf32>, %o: tensor<9xi32>, %y: tensor<?x40xf32>,
    %mx: memref<?x7xbf16>, %pairs: memref<8x3x4x16x2xbf16>, %mo: memref<9xi32>, %my: memref<?x20xbf16>)
    -> tensor<?x40xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x7xf32>, tensor<8x3x7x16xf32>, tensor<9xi32>)
      outs(%y : tensor<?x40xf32>) {packed = 16} -> tensor<?x40xf32>
  moe.grouped_linear ins(%mx, %pairs, %mo : memref<?x7xbf16>, memref<8x3x4x16x2xbf16>, memref<9xi32>)
      outs(%my : memref<?x20xbf16>)
      {packed = 16, activation = #moe.activation<gelu>, gate = #moe.gate<concatenated>}
  return %r : tensor<?x40xf32>
}

// CHECK-LABEL: func @grouped_outer
// CHECK:         moe.grouped_outer ins(%{{[^ ]*}}, %{{[^ ]*}}, %{{[^ ]*}} : tensor<?x32xbf16>, tensor<?x64xf32>, tensor<9xi64>)
// CHECK-SAME:      rows(%{{[^ ]*}} : tensor<?xi64>) outs(%{{[^ ]*}} : tensor<8x32x64xbf16>) -> tensor<8x32x64xbf16>
func.func @grouped_outer(%dy: tensor<?x32xbf16>, %x: tensor<?x64xf32>, %o: tensor<9xi64>,
                         %rows: tensor<?xi64>, %dw: tensor<8x32x64xbf16>) -> tensor<8x32x64xbf16> {
  %r = moe.grouped_outer ins(%dy, %x, %o : tensor<?x32xbf16>, tensor<?x64xf32>, tensor<9xi64>)
      rows(%rows : tensor<?xi64>) outs(%dw : tensor<8x32x64xbf16>) -> tensor<8x32x64xbf16>
  return %r : tensor<8x32x64xbf16>
}
