// RUN: %moe-opt %s | %moe-opt | FileCheck %s

// Weights that are codes, with scales and zeros, in rows and in panels.

// CHECK-LABEL: func @int4
// CHECK:         moe.grouped_linear ins({{.*}} tensor<8x40x16xi8>
// CHECK-SAME:      scales(%{{[^ ]*}} : tensor<8x40x1xbf16>) zeros(%{{[^ ]*}} : tensor<8x40x1xbf16>)
// CHECK-SAME:      {activations = #moe.activation_format<int8>, format = #moe.weight_format<int4>, group = 32 : i64}
func.func @int4(%x: tensor<?x32xbf16>, %w: tensor<8x40x16xi8>, %o: tensor<9xi32>,
                %s: tensor<8x40x1xbf16>, %z: tensor<8x40x1xbf16>, %y: tensor<?x40xbf16>)
    -> tensor<?x40xbf16> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x32xbf16>, tensor<8x40x16xi8>, tensor<9xi32>)
      scales(%s : tensor<8x40x1xbf16>) zeros(%z : tensor<8x40x1xbf16>)
      outs(%y : tensor<?x40xbf16>)
      {format = #moe.weight_format<int4>, group = 32,
       activations = #moe.activation_format<int8>} -> tensor<?x40xbf16>
  return %r : tensor<?x40xbf16>
}

// Without a group a row has one scale; what is said by default is not printed.

// CHECK-LABEL: func @rows_of_bytes
// CHECK:         {format = #moe.weight_format<int8>}
// CHECK:         {format = #moe.weight_format<fp8_e4m3>, group = 128 : i64}
func.func @rows_of_bytes(%x: tensor<?x256xf32>, %w: tensor<8x40x256xi8>, %o: tensor<9xi32>,
                         %s: tensor<8x40x1xf32>, %blocks: tensor<8x40x2xf16>, %y: tensor<?x40xf32>)
    -> (tensor<?x40xf32>, tensor<?x40xf32>) {
  %a = moe.grouped_linear ins(%x, %w, %o : tensor<?x256xf32>, tensor<8x40x256xi8>, tensor<9xi32>)
      scales(%s : tensor<8x40x1xf32>) outs(%y : tensor<?x40xf32>)
      {format = #moe.weight_format<int8>, activations = #moe.activation_format<none>}
      -> tensor<?x40xf32>
  %b = moe.grouped_linear ins(%x, %w, %o : tensor<?x256xf32>, tensor<8x40x256xi8>, tensor<9xi32>)
      scales(%blocks : tensor<8x40x2xf16>) outs(%y : tensor<?x40xf32>)
      {format = #moe.weight_format<fp8_e4m3>, group = 128} -> tensor<?x40xf32>
  return %a, %b : tensor<?x40xf32>, tensor<?x40xf32>
}

// CHECK-LABEL: func @panels
// CHECK:         moe.grouped_linear ins({{.*}} memref<8x3x16x32x4xi8>
// CHECK-SAME:      rows({{.*}}) bias({{.*}}) scales(%{{[^ ]*}} : memref<8x3x4x32xbf16>)
// CHECK-SAME:      {activation = #moe.activation<silu>, format = #moe.weight_format<fp4_e2m1>, gate = #moe.gate<concatenated>, group = 32 : i64, packed = 32 : i64}
func.func @panels(%x: memref<?x100xbf16>, %w: memref<8x3x16x32x4xi8>, %o: memref<9xi32>,
                  %rows: memref<?xi32>, %bias: memref<8x80xbf16>, %s: memref<8x3x4x32xbf16>,
                  %y: memref<?x40xbf16>) {
  moe.grouped_linear ins(%x, %w, %o : memref<?x100xbf16>, memref<8x3x16x32x4xi8>, memref<9xi32>)
      rows(%rows : memref<?xi32>) bias(%bias : memref<8x80xbf16>)
      scales(%s : memref<8x3x4x32xbf16>) outs(%y : memref<?x40xbf16>)
      {format = #moe.weight_format<fp4_e2m1>, group = 32, packed = 32,
       activation = #moe.activation<silu>, gate = #moe.gate<concatenated>}
  return
}
