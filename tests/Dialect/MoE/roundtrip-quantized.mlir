// RUN: %moe-opt %s | %moe-opt | FileCheck %s
// RUN: %moe-opt %s --mlir-print-op-generic | %moe-opt | FileCheck %s
// RUN: %moe-opt %s --emit-bytecode | %moe-opt | FileCheck %s

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

// Zeros lie in panels as scales do, and may have another type.

// CHECK-LABEL: func @panels_with_zeros
// CHECK:         moe.grouped_linear ins({{.*}} tensor<8x3x32x16x4xi8>
// CHECK-SAME:      bias(%{{[^ ]*}} : tensor<8x40xf16>) scales(%{{[^ ]*}} : tensor<8x3x16x16xf32>) zeros(%{{[^ ]*}} : tensor<8x3x16x16xbf16>) outs(%{{[^ ]*}} : tensor<?x20xf32>)
// CHECK-SAME:      {activation = #moe.activation<silu>, activations = #moe.activation_format<int8>, format = #moe.weight_format<int8>, gate = #moe.gate<interleaved>, group = 8 : i64, packed = 16 : i64}
func.func @panels_with_zeros(%x: tensor<?x128xf32>, %w: tensor<8x3x32x16x4xi8>, %o: tensor<9xi64>,
                             %bias: tensor<8x40xf16>, %s: tensor<8x3x16x16xf32>,
                             %z: tensor<8x3x16x16xbf16>, %y: tensor<?x20xf32>) -> tensor<?x20xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x128xf32>, tensor<8x3x32x16x4xi8>, tensor<9xi64>)
      bias(%bias : tensor<8x40xf16>) scales(%s : tensor<8x3x16x16xf32>)
      zeros(%z : tensor<8x3x16x16xbf16>) outs(%y : tensor<?x20xf32>)
      {format = #moe.weight_format<int8>, group = 8, packed = 16,
       activations = #moe.activation_format<int8>, activation = #moe.activation<silu>,
       gate = #moe.gate<interleaved>} -> tensor<?x20xf32>
  return %r : tensor<?x20xf32>
}

// An odd last feature has a byte of its own, and one behind a group a scale.

// CHECK-LABEL: func @last_feature
// CHECK:         {format = #moe.weight_format<fp4_e2m1>, group = 16 : i64}
// CHECK:         {format = #moe.weight_format<int4>, group = 64 : i64}
func.func @last_feature(%x: memref<?x33xf16>, %w: memref<8x40x17xi8>, %o: memref<9xi32>,
                        %s: memref<8x40x3xf16>, %any: memref<?x?xf32>, %anyw: memref<?x?x?xi8>,
                        %anyo: memref<?xi32>, %anys: memref<?x?x?xf32>, %anyz: memref<?x?x?xf32>,
                        %y: memref<?x40xf16>, %anyy: memref<?x?xf32>) {
  moe.grouped_linear ins(%x, %w, %o : memref<?x33xf16>, memref<8x40x17xi8>, memref<9xi32>)
      scales(%s : memref<8x40x3xf16>) outs(%y : memref<?x40xf16>)
      {format = #moe.weight_format<fp4_e2m1>, group = 16}
  moe.grouped_linear ins(%any, %anyw, %anyo : memref<?x?xf32>, memref<?x?x?xi8>, memref<?xi32>)
      scales(%anys : memref<?x?x?xf32>) zeros(%anyz : memref<?x?x?xf32>)
      outs(%anyy : memref<?x?xf32>) {format = #moe.weight_format<int4>, group = 64}
  return
}

// CHECK-LABEL: func @panels_of_float8
// CHECK:         moe.grouped_linear ins({{.*}} memref<8x3x16x16x4xi8>
// CHECK-SAME:      {activations = #moe.activation_format<int8>, format = #moe.weight_format<fp8_e4m3>, packed = 16 : i64}
func.func @panels_of_float8(%x: memref<?x40xbf16>, %w: memref<8x3x16x16x4xi8>, %o: memref<9xi32>,
                            %s: memref<8x3x1x16xf32>, %y: memref<?x40xbf16>) {
  moe.grouped_linear ins(%x, %w, %o : memref<?x40xbf16>, memref<8x3x16x16x4xi8>, memref<9xi32>)
      scales(%s : memref<8x3x1x16xf32>) outs(%y : memref<?x40xbf16>)
      {format = #moe.weight_format<fp8_e4m3>, packed = 16,
       activations = #moe.activation_format<int8>}
  return
}

// Of two levels are 8 bytes and an f16 for each 256 features; of 16 features in a
// group they are 16. Codes of 6 bits take three steps for 16 features.

// CHECK-LABEL: func @two_levels
// CHECK:         scales({{.*}} : memref<8x40x20xi8>) zeros({{.*}} : memref<8x40x20xi8>)
// CHECK:         scales({{.*}} : memref<8x3x36x16xi8>)
// CHECK:         {format = #moe.weight_format<int6>, group = 16 : i64, packed = 16 : i64}
func.func @two_levels(%x: memref<?x300xf32>, %w: memref<8x40x150xi8>, %o: memref<9xi32>,
                      %s: memref<8x40x20xi8>, %z: memref<8x40x20xi8>,
                      %panels: memref<8x3x60x16x4xi8>, %ofpanels: memref<8x3x36x16xi8>,
                      %y: memref<?x40xf32>) {
  moe.grouped_linear ins(%x, %w, %o : memref<?x300xf32>, memref<8x40x150xi8>, memref<9xi32>)
      scales(%s : memref<8x40x20xi8>) zeros(%z : memref<8x40x20xi8>) outs(%y : memref<?x40xf32>)
      {format = #moe.weight_format<int4>, group = 32}
  moe.grouped_linear ins(%x, %panels, %o : memref<?x300xf32>, memref<8x3x60x16x4xi8>, memref<9xi32>)
      scales(%ofpanels : memref<8x3x36x16xi8>) outs(%y : memref<?x40xf32>)
      {format = #moe.weight_format<int6>, group = 16, packed = 16}
  return
}
