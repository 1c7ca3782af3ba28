// Seeds of the target `artifact`: tensors and a scalar, sizes known only at run
// time, a size that is computed, and kernels with a workspace or several.
func.func @route(%h: tensor<?x8xf32>, %weight: tensor<4x8xf32>, %scale: f32)
    -> (tensor<?x2xf32>, tensor<?x2xi64>, tensor<?xf32>) {
  %c0 = arith.constant 0 : index
  %c2 = arith.constant 2 : index
  %n = tensor.dim %h, %c0 : tensor<?x8xf32>
  %z0 = tensor.empty(%n) : tensor<?x4xf32>
  %z = moe.router_logits ins(%h, %weight : tensor<?x8xf32>, tensor<4x8xf32>)
      outs(%z0 : tensor<?x4xf32>) -> tensor<?x4xf32>
  %g0 = tensor.empty(%n) : tensor<?x2xf32>
  %i0 = tensor.empty(%n) : tensor<?x2xi64>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x4xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi64>)
      {score = #moe.score_function<softmax>} -> tensor<?x2xf32>, tensor<?x2xi64>
  %twice = arith.muli %n, %c2 : index
  %e = tensor.empty(%twice) : tensor<?xf32>
  %f = linalg.fill ins(%scale : f32) outs(%e : tensor<?xf32>) -> tensor<?xf32>
  return %g, %i, %f : tensor<?x2xf32>, tensor<?x2xi64>, tensor<?xf32>
}
