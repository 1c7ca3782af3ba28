// What hyper-router-folds.mlir must become.

func.func @route(%h: tensor<?x2xf32>, %n: index)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %weight = arith.constant dense<[[3.0, 7.0], [9.0, 16.0]]> : tensor<2x2xf32>
  %bias = arith.constant dense<[5.0, 14.0]> : tensor<2xf32>
  %z0 = tensor.empty(%n) : tensor<?x2xf32>
  %z = moe.router_logits ins(%h, %weight : tensor<?x2xf32>, tensor<2x2xf32>)
      bias(%bias : tensor<2xf32>) outs(%z0 : tensor<?x2xf32>) -> tensor<?x2xf32>
  %g0 = tensor.empty(%n) : tensor<?x2xf32>
  %i0 = tensor.empty(%n) : tensor<?x2xi32>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x2xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g, %i : tensor<?x2xf32>, tensor<?x2xi32>
}
