// RUN: %moe-opt %s --moe-to-cpu=threads=false | %run-cpu | FileCheck %s
// RUN: %moe-opt %s --moe-decompose --moe-to-cpu=threads=false | %run-cpu | FileCheck %s

// Weights that are codes: two experts with one row and two, 40 features in
// groups of 32, two features of y. A row's numbers are whole, so that sums are
// exact. Codes in panels have a kernel; in rows they are decomposed.

func.func private @print(%y: tensor<3x2xf32>) {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0.0 : f32
  %v = vector.transfer_read %y[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<3x2xf32>, vector<3x2xf32>
  vector.print %v : vector<3x2xf32>
  return
}

// (3 e + 5 f + 7 k) mod `codes`, and 128 more where k is odd and `sign` is 128.
func.func private @code(%e: index, %f: index, %k: index, %codes: index, %sign: index) -> index {
  %c2 = arith.constant 2 : index
  %c3 = arith.constant 3 : index
  %c5 = arith.constant 5 : index
  %c7 = arith.constant 7 : index
  %e3 = arith.muli %e, %c3 : index
  %f5 = arith.muli %f, %c5 : index
  %k7 = arith.muli %k, %c7 : index
  %ef = arith.addi %e3, %f5 : index
  %sum = arith.addi %ef, %k7 : index
  %code = arith.remui %sum, %codes : index
  %odd = arith.remui %k, %c2 : index
  %signed = arith.muli %odd, %sign : index
  %result = arith.addi %code, %signed : index
  return %result : index
}

// A byte with the codes of features k and `other` in its halves.
func.func private @two_codes(%e: index, %f: index, %k: index, %other: index) -> i8 {
  %c0 = arith.constant 0 : index
  %c16 = arith.constant 16 : index
  %low = func.call @code(%e, %f, %k, %c16, %c0) : (index, index, index, index, index) -> index
  %high = func.call @code(%e, %f, %other, %c16, %c0) : (index, index, index, index, index) -> index
  %upper = arith.muli %high, %c16 : index
  %byte = arith.addi %low, %upper : index
  %r = arith.index_cast %byte : index to i8
  return %r : i8
}

func.func private @rows_of_4_bits() -> tensor<2x2x20xi8> {
  %w = tensor.generate {
  ^bb0(%e: index, %f: index, %c: index):
    %c1 = arith.constant 1 : index
    %k = arith.addi %c, %c : index
    %next = arith.addi %k, %c1 : index
    %byte = func.call @two_codes(%e, %f, %k, %next) : (index, index, index, index) -> i8
    tensor.yield %byte : i8
  } : tensor<2x2x20xi8>
  return %w : tensor<2x2x20xi8>
}

// 16 columns, of which two are read; behind feature 40 there are codes, too.
func.func private @panels_of_4_bits() -> tensor<2x1x8x16x4xi8> {
  %w = tensor.generate {
  ^bb0(%e: index, %p: index, %t: index, %f: index, %s: index):
    %c4 = arith.constant 4 : index
    %c8 = arith.constant 8 : index
    %first = arith.muli %t, %c8 : index
    %k = arith.addi %first, %s : index
    %other = arith.addi %k, %c4 : index
    %byte = func.call @two_codes(%e, %f, %k, %other) : (index, index, index, index) -> i8
    tensor.yield %byte : i8
  } : tensor<2x1x8x16x4xi8>
  return %w : tensor<2x1x8x16x4xi8>
}

// 64 to 79 of e4m3 are 2 to 7.5, and 128 makes them negative.
func.func private @byte(%e: index, %f: index, %k: index, %codes: index, %first: index) -> i8 {
  %c128 = arith.constant 128 : index
  %code = func.call @code(%e, %f, %k, %codes, %c128) : (index, index, index, index, index) -> index
  %sum = arith.addi %code, %first : index
  %r = arith.index_cast %sum : index to i8
  return %r : i8
}

func.func private @rows_of_8_bits(%codes: index, %first: index) -> tensor<2x2x40xi8> {
  %w = tensor.generate {
  ^bb0(%e: index, %f: index, %k: index):
    %byte = func.call @byte(%e, %f, %k, %codes, %first) : (index, index, index, index, index) -> i8
    tensor.yield %byte : i8
  } : tensor<2x2x40xi8>
  return %w : tensor<2x2x40xi8>
}

func.func private @panels_of_8_bits(%codes: index, %first: index) -> tensor<2x1x16x16x4xi8> {
  %w = tensor.generate {
  ^bb0(%e: index, %p: index, %t: index, %f: index, %s: index):
    %c4 = arith.constant 4 : index
    %start = arith.muli %t, %c4 : index
    %k = arith.addi %start, %s : index
    %byte = func.call @byte(%e, %f, %k, %codes, %first) : (index, index, index, index, index) -> i8
    tensor.yield %byte : i8
  } : tensor<2x1x16x16x4xi8>
  return %w : tensor<2x1x16x16x4xi8>
}

// Groups of columns in panels: those of the columns that are read, then ones.
func.func private @in_panels(%rows: tensor<2x2x2xf32>) -> tensor<2x1x2x16xf32> {
  %panels = tensor.generate {
  ^bb0(%e: index, %p: index, %u: index, %q: index):
    %c1 = arith.constant 1 : index
    %one = arith.constant 1.0 : f32
    %f = arith.minui %q, %c1 : index
    %value = tensor.extract %rows[%e, %f, %u] : tensor<2x2x2xf32>
    %is_read = arith.cmpi ule, %q, %c1 : index
    %r = arith.select %is_read, %value, %one : f32
    tensor.yield %r : f32
  } : tensor<2x1x2x16xf32>
  return %panels : tensor<2x1x2x16xf32>
}

func.func private @int4(%x: tensor<3x40xf32>, %w: tensor<2x2x20xi8>, %o: tensor<3xi32>, %s: tensor<2x2x2xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x2x20xi8>, tensor<3xi32>)
      scales(%s : tensor<2x2x2xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<int4>, group = 32} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func private @int4_panels(%x: tensor<3x40xf32>, %w: tensor<2x1x8x16x4xi8>, %o: tensor<3xi32>, %s: tensor<2x1x2x16xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x1x8x16x4xi8>, tensor<3xi32>)
      scales(%s : tensor<2x1x2x16xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<int4>, group = 32, packed = 16} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func private @int4_zeros(%x: tensor<3x40xf32>, %w: tensor<2x2x20xi8>, %o: tensor<3xi32>, %s: tensor<2x2x2xf32>, %z: tensor<2x2x2xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x2x20xi8>, tensor<3xi32>)
      scales(%s : tensor<2x2x2xf32>) zeros(%z : tensor<2x2x2xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<int4>, group = 32} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func private @int4_zeros_panels(%x: tensor<3x40xf32>, %w: tensor<2x1x8x16x4xi8>, %o: tensor<3xi32>, %s: tensor<2x1x2x16xf32>, %z: tensor<2x1x2x16xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x1x8x16x4xi8>, tensor<3xi32>)
      scales(%s : tensor<2x1x2x16xf32>) zeros(%z : tensor<2x1x2x16xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<int4>, group = 32, packed = 16} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func private @int4_rounded(%x: tensor<3x40xf32>, %w: tensor<2x2x20xi8>, %o: tensor<3xi32>, %s: tensor<2x2x2xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x2x20xi8>, tensor<3xi32>)
      scales(%s : tensor<2x2x2xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<int4>, group = 32, activations = #moe.activation_format<int8>} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func private @int4_rounded_panels(%x: tensor<3x40xf32>, %w: tensor<2x1x8x16x4xi8>, %o: tensor<3xi32>, %s: tensor<2x1x2x16xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x1x8x16x4xi8>, tensor<3xi32>)
      scales(%s : tensor<2x1x2x16xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<int4>, group = 32, packed = 16, activations = #moe.activation_format<int8>} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func private @fp4(%x: tensor<3x40xf32>, %w: tensor<2x2x20xi8>, %o: tensor<3xi32>, %s: tensor<2x2x2xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x2x20xi8>, tensor<3xi32>)
      scales(%s : tensor<2x2x2xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<fp4_e2m1>, group = 32} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func private @int8(%x: tensor<3x40xf32>, %w: tensor<2x2x40xi8>, %o: tensor<3xi32>, %s: tensor<2x2x2xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x2x40xi8>, tensor<3xi32>)
      scales(%s : tensor<2x2x2xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<int8>, group = 32} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func private @int8_panels(%x: tensor<3x40xf32>, %w: tensor<2x1x16x16x4xi8>, %o: tensor<3xi32>, %s: tensor<2x1x2x16xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x1x16x16x4xi8>, tensor<3xi32>)
      scales(%s : tensor<2x1x2x16xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<int8>, group = 32, packed = 16} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func private @fp8(%x: tensor<3x40xf32>, %w: tensor<2x2x40xi8>, %o: tensor<3xi32>, %s: tensor<2x2x2xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x2x40xi8>, tensor<3xi32>)
      scales(%s : tensor<2x2x2xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<fp8_e4m3>, group = 32} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func private @fp8_panels(%x: tensor<3x40xf32>, %w: tensor<2x1x16x16x4xi8>, %o: tensor<3xi32>, %s: tensor<2x1x2x16xf32>) {
  %init = tensor.empty() : tensor<3x2xf32>
  %y = moe.grouped_linear ins(%x, %w, %o : tensor<3x40xf32>, tensor<2x1x16x16x4xi8>, tensor<3xi32>)
      scales(%s : tensor<2x1x2x16xf32>) outs(%init : tensor<3x2xf32>)
      {format = #moe.weight_format<fp8_e4m3>, group = 32, packed = 16} -> tensor<3x2xf32>
  func.call @print(%y) : (tensor<3x2xf32>) -> ()
  return
}

func.func @main() {
  %c0 = arith.constant 0 : index
  %c16 = arith.constant 16 : index
  %c64 = arith.constant 64 : index
  %c128 = arith.constant 128 : index
  %x = arith.constant dense<[[-2.0, -1.0, 0.0, 1.0, 2.0, -2.0, -1.0, 0.0, 1.0, 2.0, -2.0, -1.0, 0.0, 1.0, 2.0, -2.0, -1.0, 0.0, 1.0, 2.0, -2.0, -1.0, 0.0, 1.0, 2.0, -2.0, -1.0, 0.0, 1.0, 2.0, -2.0, -1.0, 0.0, 1.0, 2.0, -2.0, -1.0, 0.0, 1.0, 2.0], [-1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0], [127.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, -3.0, -2.0, -1.0, 0.0, 127.0, 2.0, 3.0, -3.0, -2.0, -1.0, 0.0, 1.0]]> : tensor<3x40xf32>
  %o = arith.constant dense<[0, 1, 3]> : tensor<3xi32>
  %s = arith.constant dense<[[[1.0, 0.5], [2.0, 0.5]], [[1.0, 1.0], [2.0, 1.0]]]> : tensor<2x2x2xf32>
  %z = arith.constant dense<[[[3.0, 4.0], [4.0, 4.0]], [[3.0, 5.0], [4.0, 5.0]]]> : tensor<2x2x2xf32>
  %sp = func.call @in_panels(%s) : (tensor<2x2x2xf32>) -> tensor<2x1x2x16xf32>
  %zp = func.call @in_panels(%z) : (tensor<2x2x2xf32>) -> tensor<2x1x2x16xf32>
  %w4 = func.call @rows_of_4_bits() : () -> tensor<2x2x20xi8>
  %p4 = func.call @panels_of_4_bits() : () -> tensor<2x1x8x16x4xi8>
  %w8 = func.call @rows_of_8_bits(%c128, %c0) : (index, index) -> tensor<2x2x40xi8>
  %p8 = func.call @panels_of_8_bits(%c128, %c0) : (index, index) -> tensor<2x1x16x16x4xi8>
  %wf = func.call @rows_of_8_bits(%c16, %c64) : (index, index) -> tensor<2x2x40xi8>
  %pf = func.call @panels_of_8_bits(%c16, %c64) : (index, index) -> tensor<2x1x16x16x4xi8>
  // CHECK-COUNT-2: ( ( 31.5, -64 ), ( 10, 15 ), ( -1276, -41 ) )
  func.call @int4(%x, %w4, %o, %s) : (tensor<3x40xf32>, tensor<2x2x20xi8>, tensor<3xi32>, tensor<2x2x2xf32>) -> ()
  func.call @int4_panels(%x, %p4, %o, %sp) : (tensor<3x40xf32>, tensor<2x1x8x16x4xi8>, tensor<3xi32>, tensor<2x1x2x16xf32>) -> ()
  // CHECK-COUNT-2: ( ( 22.5, -82 ), ( 5, 7 ), ( -275, 1332 ) )
  func.call @int4_zeros(%x, %w4, %o, %s, %z) : (tensor<3x40xf32>, tensor<2x2x20xi8>, tensor<3xi32>, tensor<2x2x2xf32>, tensor<2x2x2xf32>) -> ()
  func.call @int4_zeros_panels(%x, %p4, %o, %sp, %zp) : (tensor<3x40xf32>, tensor<2x1x8x16x4xi8>, tensor<3xi32>, tensor<2x1x2x16xf32>, tensor<2x1x2x16xf32>) -> ()
  // CHECK-COUNT-2: ( ( 31.51{{.*}}, -64.21{{.*}} ), ( {{10|9.999.*}}, {{15|14.999.*}} ), ( -1276, -41 ) )
  func.call @int4_rounded(%x, %w4, %o, %s) : (tensor<3x40xf32>, tensor<2x2x20xi8>, tensor<3xi32>, tensor<2x2x2xf32>) -> ()
  func.call @int4_rounded_panels(%x, %p4, %o, %sp) : (tensor<3x40xf32>, tensor<2x1x8x16x4xi8>, tensor<3xi32>, tensor<2x1x2x16xf32>) -> ()
  // CHECK: ( ( -17, 17.25 ), ( -9.5, -16.5 ), ( 336, 64 ) )
  func.call @fp4(%x, %w4, %o, %s) : (tensor<3x40xf32>, tensor<2x2x20xi8>, tensor<3xi32>, tensor<2x2x2xf32>) -> ()
  // CHECK-COUNT-2: ( ( 43.5, -4 ), ( 34, 335 ), ( -20036, -34081 ) )
  func.call @int8(%x, %w8, %o, %s) : (tensor<3x40xf32>, tensor<2x2x40xi8>, tensor<3xi32>, tensor<2x2x2xf32>) -> ()
  func.call @int8_panels(%x, %p8, %o, %sp) : (tensor<3x40xf32>, tensor<2x1x16x16x4xi8>, tensor<3xi32>, tensor<2x1x2x16xf32>) -> ()
  // CHECK-COUNT-2: ( ( 9.625, 23.875 ), ( 2.25, -0.5 ), ( 722.25, 1551.5 ) )
  func.call @fp8(%x, %wf, %o, %s) : (tensor<3x40xf32>, tensor<2x2x40xi8>, tensor<3xi32>, tensor<2x2x2xf32>) -> ()
  func.call @fp8_panels(%x, %pf, %o, %sp) : (tensor<3x40xf32>, tensor<2x1x16x16x4xi8>, tensor<3xi32>, tensor<2x1x2x16xf32>) -> ()
  return
}
