// The inference IR of a HyperRouter is that of an SMoE, op for op: nothing of
// the hypernetwork is left (HyperRouter C.4).

// RUN: %moe-opt %s --canonicalize -o %t.folded.mlir
// RUN: %moe-opt %S/Inputs/smoe.mlir --canonicalize -o %t.plain.mlir
// RUN: diff %t.folded.mlir %t.plain.mlir
// RUN: %moe-opt %s --moe-to-cpu -o %t.folded.mlir
// RUN: %moe-opt %S/Inputs/smoe.mlir --moe-to-cpu -o %t.plain.mlir
// RUN: diff %t.folded.mlir %t.plain.mlir

func.func @route(%h: tensor<?x2xf32>, %n: index)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %e = arith.constant dense<[1.0, 2.0]> : tensor<2xf32>
  %w1 = arith.constant dense<[[1.0, 1.0], [-1.0, -1.0]]> : tensor<2x2xf32>
  %b1 = arith.constant dense<0.0> : tensor<2xf32>
  %w2 = arith.constant dense<[[1.0, 5.0], [2.0, 5.0], [1.0, 5.0], [2.0, 5.0], [4.0, 5.0], [3.0, 5.0]]> : tensor<6x2xf32>
  %b2 = arith.constant dense<[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]> : tensor<6xf32>
  %w0 = tensor.empty() : tensor<2x2xf32>
  %b0 = tensor.empty() : tensor<2xf32>
  %weight, %bias = moe.hyper_router
      ins(%e, %w1, %b1, %w2, %b2 : tensor<2xf32>, tensor<2x2xf32>,
          tensor<2xf32>, tensor<6x2xf32>, tensor<6xf32>)
      outs(%w0, %b0 : tensor<2x2xf32>, tensor<2xf32>)
      -> tensor<2x2xf32>, tensor<2xf32>
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
