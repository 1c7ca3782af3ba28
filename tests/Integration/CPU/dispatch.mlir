// RUN: %moe-opt %s --moe-to-cpu=threads=false | %run-cpu | FileCheck %s
// RUN: %moe-opt %s --moe-decompose --moe-to-cpu=threads=false | %run-cpu | FileCheck %s

// The counting sort and the comparisons of all pairs give the same rows.

func.func @main() {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0 : i32
  %pad = arith.constant 0.0 : f32
  %i = arith.constant dense<[[0, 1], [1, 0], [0, 2], [-1, 0], [0, 1]]> : tensor<5x2xi32>
  %priority = arith.constant dense<[1.0, 2.0, 3.0, 9.0, 3.0]> : tensor<5xf32>
  %gates = arith.constant dense<[[0.1, 0.9], [0.5, 0.6], [0.3, 0.7], [0.0, 0.8], [0.3, 0.9]]> : tensor<5x2xf32>
  %two = arith.constant 2 : i32
  %s0 = tensor.empty() : tensor<5x2xi32>
  %o0 = tensor.empty() : tensor<4xi32>
  %n0 = tensor.empty() : tensor<3xi32>

  %a:3 = moe.dispatch ins(%i : tensor<5x2xi32>)
      outs(%s0, %o0, %n0 : tensor<5x2xi32>, tensor<4xi32>, tensor<3xi32>)
      {alignment = 4 : i64} -> tensor<5x2xi32>, tensor<4xi32>, tensor<3xi32>
  %as = vector.transfer_read %a#0[%c0, %c0], %zero {in_bounds = [true, true]} : tensor<5x2xi32>, vector<5x2xi32>
  // CHECK: ( ( 0, 9 ), ( 8, 3 ), ( 1, 12 ), ( -1, 4 ), ( 2, 10 ) )
  vector.print %as : vector<5x2xi32>
  %ao = vector.transfer_read %a#1[%c0], %zero {in_bounds = [true]} : tensor<4xi32>, vector<4xi32>
  // CHECK: ( 0, 8, 12, 16 )
  vector.print %ao : vector<4xi32>

  // Tokens by priority 3, 2, 4, 1, 0, two rows an expert.
  %b:3 = moe.dispatch ins(%i : tensor<5x2xi32>) priority(%priority : tensor<5xf32>)
      capacity(%two : i32)
      outs(%s0, %o0, %n0 : tensor<5x2xi32>, tensor<4xi32>, tensor<3xi32>)
      {drop = #moe.drop<priority>} -> tensor<5x2xi32>, tensor<4xi32>, tensor<3xi32>
  %bs = vector.transfer_read %b#0[%c0, %c0], %zero {in_bounds = [true, true]} : tensor<5x2xi32>, vector<5x2xi32>
  // CHECK: ( ( -1, -1 ), ( 2, -1 ), ( 0, 4 ), ( -1, -1 ), ( 1, 3 ) )
  vector.print %bs : vector<5x2xi32>

  // Expert 0 keeps the gates 0.8 and 0.6, in the order of the choices.
  %c:3 = moe.dispatch ins(%i : tensor<5x2xi32>) gates(%gates : tensor<5x2xf32>)
      capacity(%two : i32)
      outs(%s0, %o0, %n0 : tensor<5x2xi32>, tensor<4xi32>, tensor<3xi32>)
      {drop = #moe.drop<probs>} -> tensor<5x2xi32>, tensor<4xi32>, tensor<3xi32>
  %cs = vector.transfer_read %c#0[%c0, %c0], %zero {in_bounds = [true, true]} : tensor<5x2xi32>, vector<5x2xi32>
  // CHECK: ( ( -1, 2 ), ( -1, 0 ), ( -1, 4 ), ( -1, 1 ), ( -1, 3 ) )
  vector.print %cs : vector<5x2xi32>

  // A row of nine features: one vector and one more.
  %x = arith.constant dense<[[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 8.0]]> : tensor<2x9xf32>
  %g = arith.constant dense<[[2.0, 3.0], [4.0, 5.0]]> : tensor<2x2xf32>
  %s = arith.constant dense<[[0, 1], [1, -1]]> : tensor<2x2xi32>
  %y0 = tensor.empty() : tensor<2x9xf32>
  %y = moe.combine ins(%x, %g, %s : tensor<2x9xf32>, tensor<2x2xf32>, tensor<2x2xi32>)
      outs(%y0 : tensor<2x9xf32>) -> tensor<2x9xf32>
  %yv = vector.transfer_read %y[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<2x9xf32>, vector<2x9xf32>
  // CHECK: ( ( 8, 8, 8, 8, 8, 8, 8, 8, 42 ), ( 8, 8, 8, 8, 8, 8, 8, 8, 32 ) )
  vector.print %yv : vector<2x9xf32>
  return
}
