// RUN: %moe-opt %s --moe-to-cpu=threads=false | %run-cpu | FileCheck %s

// Sizes that are no multiple of any tile; sums of small integers are exact.

func.func @main() {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0.0 : f32
  // 18 features: one vector and two more.
  %h = arith.constant dense<[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0]]> : tensor<1x18xf32>
  %w = arith.constant dense<2.0> : tensor<5x18xf32>
  %b = arith.constant dense<[0.0, 1.0, 2.0, 3.0, 4.0]> : tensor<5xf32>
  %z0 = tensor.empty() : tensor<1x5xf32>
  %z = moe.router_logits ins(%h, %w : tensor<1x18xf32>, tensor<5x18xf32>) bias(%b : tensor<5xf32>)
      outs(%z0 : tensor<1x5xf32>) -> tensor<1x5xf32>
  %zv = vector.transfer_read %z[%c0, %c0], %pad {in_bounds = [true]} : tensor<1x5xf32>, vector<5xf32>
  // CHECK: ( 342, 343, 344, 345, 346 )
  vector.print %zv : vector<5xf32>

  %x = arith.constant dense<3.0> : tensor<7x4xf32>
  %y = arith.constant dense<[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]> : tensor<4x3xf32>
  %p0 = tensor.empty() : tensor<7x3xf32>
  %zero = linalg.fill ins(%pad : f32) outs(%p0 : tensor<7x3xf32>) -> tensor<7x3xf32>
  %p = linalg.matmul ins(%x, %y : tensor<7x4xf32>, tensor<4x3xf32>) outs(%zero : tensor<7x3xf32>) -> tensor<7x3xf32>
  %pv = vector.transfer_read %p[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<7x3xf32>, vector<7x3xf32>
  // CHECK: ( ( 12, 24, 36 ), ( 12, 24, 36 ), ( 12, 24, 36 ), ( 12, 24, 36 ), ( 12, 24, 36 ), ( 12, 24, 36 ), ( 12, 24, 36 ) )
  vector.print %pv : vector<7x3xf32>
  return
}
