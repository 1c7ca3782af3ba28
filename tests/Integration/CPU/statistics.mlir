// RUN: %moe-opt %s --moe-to-cpu=threads=false | %run-cpu | FileCheck %s

// Dispersion of two clusters with a large common offset, an empty one (E14) and
// a token in none; the graph's rows of unused experts only decay (E16).

func.func @main() {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0.0 : f32
  %none = arith.constant 0 : i32
  %h = arith.constant dense<[[1000001.0, 1.0], [1000003.0, 1.0], [50.0, 5.0], [7.0, 7.0]]> : tensor<4x2xf32>
  %assign = arith.constant dense<[0, 0, 2, -1]> : tensor<4xi32>
  %s0 = tensor.empty() : tensor<3x2xf32>
  %m0 = tensor.empty() : tensor<3x2xf32>
  %n0 = tensor.empty() : tensor<3xi32>
  %s, %m, %n = moe.mad_dispersion ins(%h, %assign : tensor<4x2xf32>, tensor<4xi32>)
      outs(%s0, %m0, %n0 : tensor<3x2xf32>, tensor<3x2xf32>, tensor<3xi32>)
      -> tensor<3x2xf32>, tensor<3x2xf32>, tensor<3xi32>
  %sv = vector.transfer_read %s[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<3x2xf32>, vector<3x2xf32>
  %mv = vector.transfer_read %m[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<3x2xf32>, vector<3x2xf32>
  %nv = vector.transfer_read %n[%c0], %none {in_bounds = [true]} : tensor<3xi32>, vector<3xi32>
  // CHECK: ( ( 1, 0 ), ( 0, 0 ), ( 0, 0 ) )
  vector.print %sv : vector<3x2xf32>
  // CHECK: ( ( 1e+06, 1 ), ( 0, 0 ), ( 50, 5 ) )
  vector.print %mv : vector<3x2xf32>
  // CHECK: ( 2, 0, 1 )
  vector.print %nv : vector<3xi32>

  %a = arith.constant dense<1.0> : tensor<3x3xf32>
  %indices = arith.constant dense<[[0, 1], [1, 0], [0, -1]]> : tensor<3x2xi32>
  %a0 = tensor.empty() : tensor<3x3xf32>
  %new = moe.adjacency_update ins(%a, %indices : tensor<3x3xf32>, tensor<3x2xi32>)
      outs(%a0 : tensor<3x3xf32>) {beta = 0.5 : f64} -> tensor<3x3xf32>
  %av = vector.transfer_read %new[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<3x3xf32>, vector<3x3xf32>
  // Counts are [[3, 2, 0], [2, 2, 0], [0, 0, 0]].
  // CHECK: ( ( 0.8, 0.7, 0.5 ), ( 0.75, 0.75, 0.5 ), ( 0.5, 0.5, 0.5 ) )
  vector.print %av : vector<3x3xf32>
  return
}
