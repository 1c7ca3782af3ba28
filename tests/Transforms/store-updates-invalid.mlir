// RUN: moe-opt %s --moe-store-updates --verify-diagnostics

func.func @expects_buffers(%a: tensor<4xf32>)
    -> (tensor<4xf32> {moe.updates = 0 : i64}) {
  // expected-error @below {{expected a buffer for result 0, which updates an argument, found 'tensor<4xf32>'; bufferize first}}
  return %a : tensor<4xf32>
}
