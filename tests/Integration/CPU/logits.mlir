// RUN: %moe-opt %s --moe-to-cpu=threads=false | %run-cpu | FileCheck %s

// Small numbers whose logits are exact: directions of (3, 4) and (-4, 3), a
// metric that doubles one feature, a network that is off for negative sums.

func.func @main() {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0.0 : f32

  // A token of zeros has logits of zero; one along an expert has 1 / tau.
  %h = arith.constant dense<[[0.0, 0.0], [6.0, 8.0], [-4.0, 3.0]]> : tensor<3x2xf32>
  %emb = arith.constant dense<[[3.0, 4.0], [-8.0, 6.0]]> : tensor<2x2xf32>
  %z0 = tensor.empty() : tensor<3x2xf32>
  %z = moe.cosine_logits ins(%h, %emb : tensor<3x2xf32>, tensor<2x2xf32>)
      outs(%z0 : tensor<3x2xf32>) {tau = 0.5 : f64} -> tensor<3x2xf32>
  %zv = vector.transfer_read %z[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<3x2xf32>, vector<3x2xf32>
  // The products of the angle of 90 degrees, -0.48 and 0.48, are rounded.
// CHECK: ( ( 0, 0 ), ( 2, {{0|1.4[0-9]*e-08}} ), ( {{0|1.4[0-9]*e-08}}, 2 ) )
  vector.print %zv : vector<3x2xf32>

  // Token 0 had expert 1, token 1 none, token 2 one out of range.
  %m = arith.constant dense<[[1.0, 1.0], [2.0, 1.0]]> : tensor<2x2xf32>
  %x = arith.constant dense<1.0> : tensor<3x2xf32>
  %idx = arith.constant dense<[[1], [-1], [7]]> : tensor<3x1xi32>
  %a0 = tensor.empty() : tensor<3x2xf32>
  %a = moe.ac_logits ins(%x, %m, %idx, %emb : tensor<3x2xf32>, tensor<2x2xf32>, tensor<3x1xi32>, tensor<2x2xf32>)
      outs(%a0 : tensor<3x2xf32>) -> tensor<3x2xf32>
  %av = vector.transfer_read %a[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<3x2xf32>, vector<3x2xf32>
  // CHECK: ( ( 10, -10 ), ( 7, -2 ), ( 7, -2 ) )
  vector.print %av : vector<3x2xf32>

  // 1/(s + eps) is 2, 4 and 8: divided by the mean of its row; no tokens, no
  // opinion (E14).
  %s = arith.constant dense<[[0.375, 0.125, 0.0], [0.0, 0.0, 0.0]]> : tensor<2x3xf32>
  %count = arith.constant dense<[3, 0]> : tensor<2xi32>
  %w0 = tensor.empty() : tensor<2x3xf32>
  %w = moe.dispersion_weights ins(%s, %count : tensor<2x3xf32>, tensor<2xi32>)
      outs(%w0 : tensor<2x3xf32>) {eps = 0.125 : f64, scale = #moe.dispersion_scale<none>} -> tensor<2x3xf32>
  %wv = vector.transfer_read %w[%c0, %c0], %pad {in_bounds = [true, true]} : tensor<2x3xf32>, vector<2x3xf32>
  // CHECK: ( ( 2, 4, 8 ), ( 1, 1, 1 ) )
  vector.print %wv : vector<2x3xf32>
  return
}
