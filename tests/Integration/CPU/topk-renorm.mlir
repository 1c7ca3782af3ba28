// RUN: %moe-opt %s --moe-to-cpu=threads=false | %run-cpu | FileCheck %s

// Three rows, so one partial block: ties go to the lower index and -0 equals
// +0 (E1, E2), NaN ranks last and makes the gates NaN (E3), an empty support
// gives indices 0..k-1 and gates 0 (E6).
// topk_renorm_e1, topk_renorm_e2, topk_renorm_e3, topk_renorm_e6

func.func private @renormed(%z: tensor<4x5xf32>) -> (tensor<4x3xf32>, tensor<4x3xi32>) {
  %g = tensor.empty() : tensor<4x3xf32>
  %i = tensor.empty() : tensor<4x3xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<4x5xf32>) outs(%g, %i : tensor<4x3xf32>, tensor<4x3xi32>)
      -> tensor<4x3xf32>, tensor<4x3xi32>
  return %r#0, %r#1 : tensor<4x3xf32>, tensor<4x3xi32>
}

func.func @main() {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0.0 : f32
  %none = arith.constant 0 : i32
  %z = arith.constant dense<[
    [1.0, 3.0, 2.0, 3.0, 1.0],
    [-0.0, 0.0, -1.0, 0.0, -0.0],
    [1.0, 0x7FC00000, 0xFF800000, 2.0, 0xFF800000],
    [0xFF800000, 0xFF800000, 0xFF800000, 0xFF800000, 0xFF800000]
  ]> : tensor<4x5xf32>
  %g, %i = func.call @renormed(%z) : (tensor<4x5xf32>) -> (tensor<4x3xf32>, tensor<4x3xi32>)
  %gates = vector.transfer_read %g[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<4x3xf32>, vector<4x3xf32>
  %indices = vector.transfer_read %i[%c0, %c0], %none {in_bounds = [true, true]} : tensor<4x3xi32>, vector<4x3xi32>
  // CHECK: ( ( 1, 3, 2 ), ( 0, 1, 3 ), ( 3, 0, 2 ), ( 0, 1, 2 ) )
  vector.print %indices : vector<4x3xi32>
  // softmax(3, 3, 2) and softmax(0, 0, 0).
  // CHECK: ( ( 0.42231{{.*}}, 0.42231{{.*}}, 0.15536{{.*}} ), ( 0.33333{{.*}}, 0.33333{{.*}}, 0.33333{{.*}} ), ( nan, nan, nan ), ( 0, 0, 0 ) )
  vector.print %gates : vector<4x3xf32>
  return
}
