// RUN: %moe-opt %s --moe-decompose-for-cpu | FileCheck %s

// Codes without a kernel become a weight of floats: those that are not in
// panels, panels that are no whole vectors, and features of a number that is
// not known. The last op has a kernel.

// CHECK-LABEL: func @quantized
// CHECK-COUNT-3: arith.extui {{.*}} : i8 to i32
// CHECK-NOT:     arith.extui
// CHECK:         moe.grouped_linear ins({{.*}} tensor<8x2x16x32x4xi8>
// CHECK-NOT:     moe.grouped_linear
func.func @quantized(
    %x: tensor<?x128xf32>, %w: tensor<8x40x64xi8>, %narrow: tensor<8x10x16x4x4xi8>,
    %o: tensor<9xi32>, %s: tensor<8x40x4xf32>, %sn: tensor<8x10x4x4xf32>, %any: tensor<?x?xf32>,
    %dynamic: tensor<8x2x?x32x4xi8>, %sd: tensor<8x2x?x32xf32>, %panels: tensor<8x2x16x32x4xi8>,
    %sp: tensor<8x2x4x32xf32>, %y: tensor<?x40xf32>)
    -> (tensor<?x40xf32>, tensor<?x40xf32>, tensor<?x40xf32>, tensor<?x40xf32>) {
  %0 = moe.grouped_linear ins(%x, %w, %o : tensor<?x128xf32>, tensor<8x40x64xi8>, tensor<9xi32>)
      scales(%s : tensor<8x40x4xf32>) outs(%y : tensor<?x40xf32>)
      {format = #moe.weight_format<int4>, group = 32} -> tensor<?x40xf32>
  %1 = moe.grouped_linear
      ins(%x, %narrow, %o : tensor<?x128xf32>, tensor<8x10x16x4x4xi8>, tensor<9xi32>)
      scales(%sn : tensor<8x10x4x4xf32>) outs(%y : tensor<?x40xf32>)
      {format = #moe.weight_format<int4>, group = 32, packed = 4} -> tensor<?x40xf32>
  %2 = moe.grouped_linear
      ins(%any, %dynamic, %o : tensor<?x?xf32>, tensor<8x2x?x32x4xi8>, tensor<9xi32>)
      scales(%sd : tensor<8x2x?x32xf32>) outs(%y : tensor<?x40xf32>)
      {format = #moe.weight_format<int4>, group = 32, packed = 32} -> tensor<?x40xf32>
  %3 = moe.grouped_linear
      ins(%x, %panels, %o : tensor<?x128xf32>, tensor<8x2x16x32x4xi8>, tensor<9xi32>)
      scales(%sp : tensor<8x2x4x32xf32>) outs(%y : tensor<?x40xf32>)
      {format = #moe.weight_format<int4>, group = 32, packed = 32} -> tensor<?x40xf32>
  return %0, %1, %2, %3 : tensor<?x40xf32>, tensor<?x40xf32>, tensor<?x40xf32>, tensor<?x40xf32>
}
