// REQUIRES: ptxas
// RUN: %python %S/Inputs/assemble_for_every_chip.py %s %ptxas %t

// Every kernel assembles for every chip without a warning and keeps its values
// in registers.

// CHECK-COUNT-4: 0 bytes spill stores, 0 bytes spill loads
// CHECK-NOT: warning

func.func @route(%h: tensor<?x352xbf16>, %w: tensor<16x352xbf16>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %h, %c0 : tensor<?x352xbf16>
  %z0 = tensor.empty(%n) : tensor<?x16xf32>
  %z = moe.router_logits ins(%h, %w : tensor<?x352xbf16>, tensor<16x352xbf16>)
      outs(%z0 : tensor<?x16xf32>) -> tensor<?x16xf32>
  %g0 = tensor.empty(%n) : tensor<?x2xf32>
  %i0 = tensor.empty(%n) : tensor<?x2xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0, %r#1 : tensor<?x2xf32>, tensor<?x2xi32>
}

func.func @largest(%z: tensor<?x2048xf32>)
    -> (tensor<?x64xf32>, tensor<?x64xi64>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x2048xf32>
  %g0 = tensor.empty(%n) : tensor<?x64xf32>
  %i0 = tensor.empty(%n) : tensor<?x64xi64>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x2048xf32>)
      outs(%g0, %i0 : tensor<?x64xf32>, tensor<?x64xi64>) {renorm = false}
      -> tensor<?x64xf32>, tensor<?x64xi64>
  return %r#0, %r#1 : tensor<?x64xf32>, tensor<?x64xi64>
}

func.func @grouped(%z: tensor<?x256xbf16>, %bias: tensor<256xf32>,
                   %mask: tensor<?xi1>)
    -> (tensor<?x8xf32>, tensor<?x8xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x256xbf16>
  %g0 = tensor.empty(%n) : tensor<?x8xf32>
  %i0 = tensor.empty(%n) : tensor<?x8xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x256xbf16>)
      bias(%bias : tensor<256xf32>) mask(%mask : tensor<?xi1>)
      outs(%g0, %i0 : tensor<?x8xf32>, tensor<?x8xi32>)
      {score = #moe.score_function<sigmoid>, n_group = 8 : i64,
       topk_group = 4 : i64, route_scale = 2.5 : f64}
      -> tensor<?x8xf32>, tensor<?x8xi32>
  return %r#0, %r#1 : tensor<?x8xf32>, tensor<?x8xi32>
}

func.func @softplus(%z: tensor<?x384xf16>, %bias: tensor<384xf32>)
    -> (tensor<?x6xf32>, tensor<?x6xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x384xf16>
  %g0 = tensor.empty(%n) : tensor<?x6xf32>
  %i0 = tensor.empty(%n) : tensor<?x6xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x384xf16>)
      bias(%bias : tensor<384xf32>)
      outs(%g0, %i0 : tensor<?x6xf32>, tensor<?x6xi32>)
      {score = #moe.score_function<sqrtsoftplus>, route_scale = 1.5 : f64}
      -> tensor<?x6xf32>, tensor<?x6xi32>
  return %r#0, %r#1 : tensor<?x6xf32>, tensor<?x6xi32>
}
