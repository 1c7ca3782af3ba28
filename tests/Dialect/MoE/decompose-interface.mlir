// RUN: %moe-opt %s --transform-interpreter | FileCheck %s

// The stock transform op reads the same interface as moe-decompose.

// CHECK-LABEL: func @router_logits
// CHECK-NOT:     moe.
// CHECK:         linalg.generic
func.func @router_logits(%h: tensor<?x8xbf16>, %w: tensor<4x8xf32>,
                         %bias: tensor<4xf32>, %z0: tensor<?x4xf32>)
    -> tensor<?x4xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<?x8xbf16>, tensor<4x8xf32>)
      bias(%bias : tensor<4xf32>) outs(%z0 : tensor<?x4xf32>) -> tensor<?x4xf32>
  return %z : tensor<?x4xf32>
}
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(
      %root: !transform.any_op {transform.readonly}) {
    %op = transform.structured.match ops{["moe.router_logits"]} in %root
        : (!transform.any_op) -> !transform.any_op
    %parts = transform.structured.decompose_interface %op
        : (!transform.any_op) -> !transform.any_op
    transform.yield
  }
}
