// RUN: %moe-opt %s --moe-to-cpu=threads=false | %run-cpu | FileCheck %s
// RUN: %moe-opt %s --moe-decompose --moe-to-cpu=threads=false | %run-cpu | FileCheck %s

// Five rows in runs of two, none and two; the fourth names a token that is not
// there, the last is in no run.

func.func private @print(%y: tensor<5x4xf32>) {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0.0 : f32
  %v = vector.transfer_read %y[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<5x4xf32>, vector<5x4xf32>
  vector.print %v : vector<5x4xf32>
  return
}
func.func private @print_gated(%y: tensor<5x2xf32>) {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0.0 : f32
  %v = vector.transfer_read %y[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<5x2xf32>, vector<5x2xf32>
  vector.print %v : vector<5x2xf32>
  return
}

func.func private @layer(%x: tensor<?x3xf32>, %w: tensor<3x4x3xf32>, %o: tensor<4xi32>, %rows: tensor<5xi64>,
                         %b: tensor<3x4xf32>, %y: tensor<5x4xf32>) -> (tensor<5x4xf32>, tensor<5x4xf32>) {
  %linear = moe.grouped_linear ins(%x, %w, %o : tensor<?x3xf32>, tensor<3x4x3xf32>, tensor<4xi32>)
      rows(%rows : tensor<5xi64>) bias(%b : tensor<3x4xf32>) outs(%y : tensor<5x4xf32>) -> tensor<5x4xf32>
  %relu2 = moe.grouped_linear ins(%x, %w, %o : tensor<?x3xf32>, tensor<3x4x3xf32>, tensor<4xi32>)
      rows(%rows : tensor<5xi64>) bias(%b : tensor<3x4xf32>) outs(%y : tensor<5x4xf32>)
      {activation = #moe.activation<relu2>} -> tensor<5x4xf32>
  return %linear, %relu2 : tensor<5x4xf32>, tensor<5x4xf32>
}

func.func private @packed(%x: tensor<?x3xf32>, %panels: tensor<3x2x3x3xf32>, %pairs: tensor<3x2x2x3x2xbf16>,
                          %transposed: tensor<3x3x4xf32>, %o: tensor<4xi32>, %rows: tensor<5xi64>,
                          %b: tensor<3x4xf32>, %y: tensor<5x4xf32>)
    -> (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>) {
  %0 = moe.grouped_linear ins(%x, %panels, %o : tensor<?x3xf32>, tensor<3x2x3x3xf32>, tensor<4xi32>)
      rows(%rows : tensor<5xi64>) bias(%b : tensor<3x4xf32>) outs(%y : tensor<5x4xf32>)
      {packed = 3} -> tensor<5x4xf32>
  %1 = moe.grouped_linear ins(%x, %pairs, %o : tensor<?x3xf32>, tensor<3x2x2x3x2xbf16>, tensor<4xi32>)
      rows(%rows : tensor<5xi64>) bias(%b : tensor<3x4xf32>) outs(%y : tensor<5x4xf32>)
      {packed = 3} -> tensor<5x4xf32>
  %2 = moe.grouped_linear ins(%x, %transposed, %o : tensor<?x3xf32>, tensor<3x3x4xf32>, tensor<4xi32>)
      rows(%rows : tensor<5xi64>) bias(%b : tensor<3x4xf32>) outs(%y : tensor<5x4xf32>)
      {transposed} -> tensor<5x4xf32>
  return %0, %1, %2 : tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>
}

func.func private @gated(%x: tensor<?x3xf32>, %w: tensor<3x4x3xf32>, %o: tensor<4xi32>, %rows: tensor<5xi64>,
                         %b: tensor<3x4xf32>, %y: tensor<5x2xf32>)
    -> (tensor<5x2xf32>, tensor<5x2xf32>, tensor<5x2xf32>) {
  %clamp = moe.grouped_linear ins(%x, %w, %o : tensor<?x3xf32>, tensor<3x4x3xf32>, tensor<4xi32>)
      rows(%rows : tensor<5xi64>) bias(%b : tensor<3x4xf32>) outs(%y : tensor<5x2xf32>)
      {activation = #moe.activation<silu>, gate = #moe.gate<interleaved>, alpha = 1.702, limit = 2.0,
       up_offset = 1.0} -> tensor<5x2xf32>
  %activated = moe.grouped_linear ins(%x, %w, %o : tensor<?x3xf32>, tensor<3x4x3xf32>, tensor<4xi32>)
      rows(%rows : tensor<5xi64>) bias(%b : tensor<3x4xf32>) outs(%y : tensor<5x2xf32>)
      {activation = #moe.activation<silu>, gate = #moe.gate<concatenated>, limit = 2.0,
       bound = #moe.bound<clamp_activated>} -> tensor<5x2xf32>
  %softcap = moe.grouped_linear ins(%x, %w, %o : tensor<?x3xf32>, tensor<3x4x3xf32>, tensor<4xi32>)
      rows(%rows : tensor<5xi64>) bias(%b : tensor<3x4xf32>) outs(%y : tensor<5x2xf32>)
      {activation = #moe.activation<silu>, gate = #moe.gate<concatenated>, limit = 2.0, up_limit = 4.0,
       bound = #moe.bound<softcap>} -> tensor<5x2xf32>
  return %clamp, %activated, %softcap : tensor<5x2xf32>, tensor<5x2xf32>, tensor<5x2xf32>
}

func.func private @packed_gated(%x: tensor<?x3xf32>, %halves: tensor<3x2x3x2xf32>, %o: tensor<4xi32>,
                                %rows: tensor<5xi64>, %b: tensor<3x4xf32>, %y: tensor<5x2xf32>) -> tensor<5x2xf32> {
  %r = moe.grouped_linear ins(%x, %halves, %o : tensor<?x3xf32>, tensor<3x2x3x2xf32>, tensor<4xi32>)
      rows(%rows : tensor<5xi64>) bias(%b : tensor<3x4xf32>) outs(%y : tensor<5x2xf32>)
      {packed = 2, activation = #moe.activation<silu>, gate = #moe.gate<concatenated>, limit = 2.0,
       bound = #moe.bound<clamp_activated>} -> tensor<5x2xf32>
  return %r : tensor<5x2xf32>
}

func.func private @gradient(%dy: tensor<5x4xf32>, %x: tensor<?x3xf32>, %o: tensor<4xi32>, %rows: tensor<5xi64>,
                            %dw: tensor<3x4x3xf32>) -> tensor<3x4x3xf32> {
  %r = moe.grouped_outer ins(%dy, %x, %o : tensor<5x4xf32>, tensor<?x3xf32>, tensor<4xi32>)
      rows(%rows : tensor<5xi64>) outs(%dw : tensor<3x4x3xf32>) -> tensor<3x4x3xf32>
  return %r : tensor<3x4x3xf32>
}

func.func private @rows(%s: tensor<?x2xi32>, %r: tensor<6xi64>) -> tensor<6xi64> {
  %rows = moe.token_rows ins(%s : tensor<?x2xi32>) outs(%r : tensor<6xi64>) -> tensor<6xi64>
  return %rows : tensor<6xi64>
}

func.func @main() {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0.0 : f32
  %pad_i = arith.constant 0 : i64
  %halves = arith.constant dense<[[[[-3.0, -1.0], [2.0, -3.0], [0.0, 2.0]], [[-2.0, 0.0], [3.0, -2.0], [1.0, 3.0]]], [[[1.0, 3.0], [-1.0, 1.0], [-3.0, -1.0]], [[2.0, -3.0], [0.0, 2.0], [-2.0, 0.0]]], [[[-2.0, 0.0], [3.0, -2.0], [1.0, 3.0]], [[-1.0, 1.0], [-3.0, -1.0], [2.0, -3.0]]]]> : tensor<3x2x3x2xf32>
  %x4 = arith.constant dense<[[1.0, 2.0, 3.0], [0.0, -1.0, 1.0], [2.0, 0.0, 1.0], [1.0, 1.0, 1.0]]> : tensor<4x3xf32>
  %x = tensor.cast %x4 : tensor<4x3xf32> to tensor<?x3xf32>
  %w = arith.constant dense<[[[-3.0, 2.0, 0.0], [-2.0, 3.0, 1.0], [-1.0, -3.0, 2.0], [0.0, -2.0, 3.0]], [[1.0, -1.0, -3.0], [2.0, 0.0, -2.0], [3.0, 1.0, -1.0], [-3.0, 2.0, 0.0]], [[-2.0, 3.0, 1.0], [-1.0, -3.0, 2.0], [0.0, -2.0, 3.0], [1.0, -1.0, -3.0]]]> : tensor<3x4x3xf32>
  %wt = arith.constant dense<[[[-3.0, -2.0, -1.0, 0.0], [2.0, 3.0, -3.0, -2.0], [0.0, 1.0, 2.0, 3.0]], [[1.0, 2.0, 3.0, -3.0], [-1.0, 0.0, 1.0, 2.0], [-3.0, -2.0, -1.0, 0.0]], [[-2.0, -1.0, 0.0, 1.0], [3.0, -3.0, -2.0, -1.0], [1.0, 2.0, 3.0, -3.0]]]> : tensor<3x3x4xf32>
  %panels = arith.constant dense<[[[[-3.0, -2.0, -1.0], [2.0, 3.0, -3.0], [0.0, 1.0, 2.0]], [[0.0, 0.0, 0.0], [-2.0, 0.0, 0.0], [3.0, 0.0, 0.0]]], [[[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0], [-3.0, -2.0, -1.0]], [[-3.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]], [[[-2.0, -1.0, 0.0], [3.0, -3.0, -2.0], [1.0, 2.0, 3.0]], [[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [-3.0, 0.0, 0.0]]]]> : tensor<3x2x3x3xf32>
  %pairs = arith.constant dense<[[[[[-3.0, 2.0], [-2.0, 3.0], [-1.0, -3.0]], [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]], [[[0.0, -2.0], [0.0, 0.0], [0.0, 0.0]], [[3.0, 0.0], [0.0, 0.0], [0.0, 0.0]]]], [[[[1.0, -1.0], [2.0, 0.0], [3.0, 1.0]], [[-3.0, 0.0], [-2.0, 0.0], [-1.0, 0.0]]], [[[-3.0, 2.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]]], [[[[-2.0, 3.0], [-1.0, -3.0], [0.0, -2.0]], [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]], [[[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]], [[-3.0, 0.0], [0.0, 0.0], [0.0, 0.0]]]]]> : tensor<3x2x2x3x2xbf16>
  %b = arith.constant dense<[[-2.0, 1.0, -1.0, 2.0], [0.0, -2.0, 1.0, -1.0], [2.0, 0.0, -2.0, 1.0]]> : tensor<3x4xf32>
  %o = arith.constant dense<[0, 2, 2, 4]> : tensor<4xi32>
  %rows = arith.constant dense<[1, 0, 3, 9, 2]> : tensor<5xi64>
  %y = tensor.empty() : tensor<5x4xf32>
  %yg = tensor.empty() : tensor<5x2xf32>
  %dw = tensor.empty() : tensor<3x4x3xf32>

  %l:2 = func.call @layer(%x, %w, %o, %rows, %b, %y)
      : (tensor<?x3xf32>, tensor<3x4x3xf32>, tensor<4xi32>, tensor<5xi64>, tensor<3x4xf32>, tensor<5x4xf32>)
      -> (tensor<5x4xf32>, tensor<5x4xf32>)
  // CHECK: [[Z:\( \( -4, -1, 4, 7 \), \( -1, 8, -2, 7 \), \( 4, -2, -1, -2 \), \( 2, 0, -2, 1 \), \( 0, 0, 0, 0 \) \)]]
  func.call @print(%l#0) : (tensor<5x4xf32>) -> ()
  // CHECK: ( ( 0, 0, 16, 49 ), ( 0, 64, 0, 49 ), ( 16, 0, 0, 0 ), ( 4, 0, 0, 1 ), ( 0, 0, 0, 0 ) )
  func.call @print(%l#1) : (tensor<5x4xf32>) -> ()

  %p:3 = func.call @packed(%x, %panels, %pairs, %wt, %o, %rows, %b, %y)
      : (tensor<?x3xf32>, tensor<3x2x3x3xf32>, tensor<3x2x2x3x2xbf16>, tensor<3x3x4xf32>, tensor<4xi32>,
         tensor<5xi64>, tensor<3x4xf32>, tensor<5x4xf32>) -> (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>)
  // CHECK-COUNT-3: [[Z]]
  func.call @print(%p#0) : (tensor<5x4xf32>) -> ()
  func.call @print(%p#1) : (tensor<5x4xf32>) -> ()
  func.call @print(%p#2) : (tensor<5x4xf32>) -> ()

  %g:3 = func.call @gated(%x, %w, %o, %rows, %b, %yg)
      : (tensor<?x3xf32>, tensor<3x4x3xf32>, tensor<4xi32>, tensor<5xi64>, tensor<3x4xf32>, tensor<5x2xf32>)
      -> (tensor<5x2xf32>, tensor<5x2xf32>, tensor<5x2xf32>)
  // CHECK: ( ( {{-?}}0, 5.8069{{.*}} ), ( -0.4626{{.*}}, -0.1930{{.*}} ), ( -1.9356{{.*}}, 0.1542{{.*}} ), ( 1.9356{{.*}}, -0.1286{{.*}} ), ( 0, 0 ) )
  func.call @print_gated(%g#0) : (tensor<5x2xf32>) -> ()
  // CHECK: ( ( -0.1438{{.*}}, -0.5378{{.*}} ), ( 0.5378{{.*}}, 4 ), ( -2, 0.4768{{.*}} ), ( -3.5231{{.*}}, 0 ), ( 0, 0 ) )
  func.call @print_gated(%g#1) : (tensor<5x2xf32>) -> ()
  %h = func.call @packed_gated(%x, %halves, %o, %rows, %b, %yg)
      : (tensor<?x3xf32>, tensor<3x2x3x2xf32>, tensor<4xi32>, tensor<5xi64>, tensor<3x4xf32>, tensor<5x2xf32>)
      -> tensor<5x2xf32>
  // CHECK: ( ( -0.1438{{.*}}, -0.5378{{.*}} ), ( 0.5378{{.*}}, 4 ), ( -2, 0.4768{{.*}} ), ( -3.5231{{.*}}, 0 ), ( 0, 0 ) )
  func.call @print_gated(%h) : (tensor<5x2xf32>) -> ()
  // CHECK: ( ( -0.1056{{.*}}, -0.9359{{.*}} ), ( 0.4594{{.*}}, 7.5234{{.*}} ), ( -1.8548{{.*}}, 0.3356{{.*}} ), ( -2.4799{{.*}}, 0 ), ( 0, 0 ) )
  func.call @print_gated(%g#2) : (tensor<5x2xf32>) -> ()

  %grad = func.call @gradient(%l#0, %x, %o, %rows, %dw)
      : (tensor<5x4xf32>, tensor<?x3xf32>, tensor<4xi32>, tensor<5xi64>, tensor<3x4x3xf32>) -> tensor<3x4x3xf32>
  %gv = vector.transfer_read %grad[%c0, %c0, %c0], %pad {in_bounds = [true, true, true]} : tensor<3x4x3xf32>, vector<3x4x3xf32>
  // CHECK: ( ( ( -1, 2, -7 ), ( 8, 17, 23 ), ( -2, -8, -2 ), ( 7, 7, 28 ) ), ( ( 0, 0, 0 ), ( 0, 0, 0 ), ( 0, 0, 0 ), ( 0, 0, 0 ) ), ( ( 4, 4, 4 ), ( -2, -2, -2 ), ( -1, -1, -1 ), ( -2, -2, -2 ) ) )
  vector.print %gv : vector<3x4x3xf32>

  // Slot -1 and slot 7 have no row; rows 1 and 5 no token.
  %s3 = arith.constant dense<[[0, 3], [4, -1], [7, 2]]> : tensor<3x2xi32>
  %s = tensor.cast %s3 : tensor<3x2xi32> to tensor<?x2xi32>
  %r0 = tensor.empty() : tensor<6xi64>
  %r = func.call @rows(%s, %r0) : (tensor<?x2xi32>, tensor<6xi64>) -> tensor<6xi64>
  %rv = vector.transfer_read %r[%c0], %pad_i {in_bounds = [true]} : tensor<6xi64>, vector<6xi64>
  // CHECK: ( 0, 0, 2, 0, 1, 0 )
  vector.print %rv : vector<6xi64>
  return
}
