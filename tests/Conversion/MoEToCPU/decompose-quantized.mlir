// RUN: %moe-opt %s --moe-decompose-for-cpu | FileCheck %s
// RUN: %moe-opt %s --moe-decompose-for-cpu=vector-width=8 | FileCheck %s --check-prefix=EIGHT
// RUN: %moe-opt %s --moe-decompose-for-cpu=vector-width=4 | FileCheck %s --check-prefix=FOUR

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

// What vectors of 16 lanes do not divide those of 8 do: groups of 8, and halves
// of panels of 8.

// CHECK-LABEL: func @half_vectors
// CHECK-COUNT-2: arith.extui {{.*}} : i8 to i32
// CHECK-NOT:     moe.grouped_linear
// EIGHT-LABEL: func @half_vectors
// EIGHT-NOT:     arith.extui
// EIGHT-COUNT-2: moe.grouped_linear
func.func @half_vectors(
    %x: tensor<?x128xf32>, %w: tensor<8x2x16x32x4xi8>, %o: tensor<9xi32>, %s: tensor<8x2x16x32xf32>,
    %y: tensor<?x40xf32>, %halves: tensor<8x4x16x16x4xi8>, %sh: tensor<8x4x4x16xf32>,
    %gated: tensor<?x32xf32>) -> (tensor<?x40xf32>, tensor<?x32xf32>) {
  %0 = moe.grouped_linear
      ins(%x, %w, %o : tensor<?x128xf32>, tensor<8x2x16x32x4xi8>, tensor<9xi32>)
      scales(%s : tensor<8x2x16x32xf32>) outs(%y : tensor<?x40xf32>)
      {format = #moe.weight_format<int4>, group = 8, packed = 32} -> tensor<?x40xf32>
  %1 = moe.grouped_linear
      ins(%x, %halves, %o : tensor<?x128xf32>, tensor<8x4x16x16x4xi8>, tensor<9xi32>)
      scales(%sh : tensor<8x4x4x16xf32>) outs(%gated : tensor<?x32xf32>)
      {format = #moe.weight_format<int4>, group = 32, packed = 16,
       gate = #moe.gate<concatenated>} -> tensor<?x32xf32>
  return %0, %1 : tensor<?x40xf32>, tensor<?x32xf32>
}

// Floats of 4 bits are looked up by instructions of vectors of 8 and 16 lanes.
// Without them they are decomposed; integers are not.

// CHECK-LABEL: func @floats_of_4_bits
// CHECK-COUNT-2: moe.grouped_linear
// EIGHT-LABEL: func @floats_of_4_bits
// EIGHT-COUNT-2: moe.grouped_linear
// FOUR-LABEL: func @floats_of_4_bits
// FOUR:         arith.extui {{.*}} : i8 to i32
// FOUR-NOT:     arith.extui
// FOUR:         moe.grouped_linear {{.*}} {format = #moe.weight_format<int4>, packed = 32 : i64}
// FOUR-NOT:     moe.grouped_linear
func.func @floats_of_4_bits(
    %x: tensor<?x128xf32>, %w: tensor<8x2x16x32x4xi8>, %o: tensor<9xi32>, %s: tensor<8x2x1x32xf32>,
    %y: tensor<?x40xf32>) -> (tensor<?x40xf32>, tensor<?x40xf32>) {
  %0 = moe.grouped_linear
      ins(%x, %w, %o : tensor<?x128xf32>, tensor<8x2x16x32x4xi8>, tensor<9xi32>)
      scales(%s : tensor<8x2x1x32xf32>) outs(%y : tensor<?x40xf32>)
      {format = #moe.weight_format<fp4_e2m1>, packed = 32} -> tensor<?x40xf32>
  %1 = moe.grouped_linear
      ins(%x, %w, %o : tensor<?x128xf32>, tensor<8x2x16x32x4xi8>, tensor<9xi32>)
      scales(%s : tensor<8x2x1x32xf32>) outs(%y : tensor<?x40xf32>)
      {format = #moe.weight_format<int4>, packed = 32} -> tensor<?x40xf32>
  return %0, %1 : tensor<?x40xf32>, tensor<?x40xf32>
}
