// RUN: %moe-opt %s --moe-to-cpu=threads=false | %run-cpu | FileCheck %s

// Equal logits mix the mean of the visible values; a query that sees no key has
// mixed 0 and lse -inf (E6); NaN in a masked token does not leak (E11); a single
// token is mixed with itself (E13).

func.func private @mix(%q: tensor<1x1x?x3xf32>, %v: tensor<1x?x2xf32>, %mask: tensor<1x?xi1>)
    -> (tensor<1x1x?x2xf32>, tensor<1x1x?xf32>) {
  %c2 = arith.constant 2 : index
  %n = tensor.dim %q, %c2 : tensor<1x1x?x3xf32>
  %o = tensor.empty(%n) : tensor<1x1x?x2xf32>
  %l = tensor.empty(%n) : tensor<1x1x?xf32>
  %r:2 = moe.softmax_mix ins(%q, %q : tensor<1x1x?x3xf32>, tensor<1x1x?x3xf32>)
      values(%v : tensor<1x?x2xf32>)
      query_mask(%mask : tensor<1x?xi1>) key_mask(%mask : tensor<1x?xi1>)
      outs(%o, %l : tensor<1x1x?x2xf32>, tensor<1x1x?xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<1x1x?x2xf32>, tensor<1x1x?xf32>
  return %r#0, %r#1 : tensor<1x1x?x2xf32>, tensor<1x1x?xf32>
}

func.func @main() {
  %c0 = arith.constant 0 : index
  %pad = arith.constant 0.0 : f32
  // Tokens 0 and 2 are masked; token 2 holds NaN.
  %q = arith.constant dense<[[[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0x7FC00000, 0.0, 0.0], [0.0, 0.0, 0.0]]]]> : tensor<1x1x4x3xf32>
  %v = arith.constant dense<[[[9.0, 9.0], [1.0, 2.0], [0x7FC00000, 9.0], [3.0, 6.0]]]> : tensor<1x4x2xf32>
  %mask = arith.constant dense<[[false, true, false, true]]> : tensor<1x4xi1>
  %qd = tensor.cast %q : tensor<1x1x4x3xf32> to tensor<1x1x?x3xf32>
  %vd = tensor.cast %v : tensor<1x4x2xf32> to tensor<1x?x2xf32>
  %md = tensor.cast %mask : tensor<1x4xi1> to tensor<1x?xi1>
  %o, %l = func.call @mix(%qd, %vd, %md)
      : (tensor<1x1x?x3xf32>, tensor<1x?x2xf32>, tensor<1x?xi1>) -> (tensor<1x1x?x2xf32>, tensor<1x1x?xf32>)
  %mixed = vector.transfer_read %o[%c0, %c0, %c0, %c0], %pad {in_bounds = [true, true]} : tensor<1x1x?x2xf32>, vector<4x2xf32>
  %lse = vector.transfer_read %l[%c0, %c0, %c0], %pad {in_bounds = [true]} : tensor<1x1x?xf32>, vector<4xf32>
  // CHECK: ( ( 0, 0 ), ( 1, 2 ), ( 0, 0 ), ( 2, 4 ) )
  vector.print %mixed : vector<4x2xf32>
  // CHECK: ( -inf, 0, -inf, 0.69314{{.*}} )
  vector.print %lse : vector<4xf32>

  // One token.
  %q1 = tensor.extract_slice %qd[0, 0, 3, 0] [1, 1, 1, 3] [1, 1, 1, 1] : tensor<1x1x?x3xf32> to tensor<1x1x1x3xf32>
  %v1 = tensor.extract_slice %vd[0, 3, 0] [1, 1, 2] [1, 1, 1] : tensor<1x?x2xf32> to tensor<1x1x2xf32>
  %m1 = tensor.extract_slice %md[0, 3] [1, 1] [1, 1] : tensor<1x?xi1> to tensor<1x1xi1>
  %q1d = tensor.cast %q1 : tensor<1x1x1x3xf32> to tensor<1x1x?x3xf32>
  %v1d = tensor.cast %v1 : tensor<1x1x2xf32> to tensor<1x?x2xf32>
  %m1d = tensor.cast %m1 : tensor<1x1xi1> to tensor<1x?xi1>
  %o1, %l1 = func.call @mix(%q1d, %v1d, %m1d)
      : (tensor<1x1x?x3xf32>, tensor<1x?x2xf32>, tensor<1x?xi1>) -> (tensor<1x1x?x2xf32>, tensor<1x1x?xf32>)
  %mixed1 = vector.transfer_read %o1[%c0, %c0, %c0, %c0], %pad {in_bounds = [true]} : tensor<1x1x?x2xf32>, vector<2xf32>
  // CHECK: ( 3, 6 )
  vector.print %mixed1 : vector<2xf32>
  return
}
