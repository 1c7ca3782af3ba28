// RUN: %moe-opt %s --cse | FileCheck %s

// Equal ops on tensors are computed once.

// CHECK-LABEL: func @merges_equal_ops_on_tensors
// CHECK-COUNT-1: moe.router_logits
// CHECK-NOT:     moe.router_logits
func.func @merges_equal_ops_on_tensors(
    %h: tensor<5x8xf32>, %w: tensor<4x8xf32>, %z0: tensor<5x4xf32>)
    -> (tensor<5x4xf32>, tensor<5x4xf32>) {
  %a = moe.router_logits ins(%h, %w : tensor<5x8xf32>, tensor<4x8xf32>)
      outs(%z0 : tensor<5x4xf32>) -> tensor<5x4xf32>
  %b = moe.router_logits ins(%h, %w : tensor<5x8xf32>, tensor<4x8xf32>)
      outs(%z0 : tensor<5x4xf32>) -> tensor<5x4xf32>
  return %a, %b : tensor<5x4xf32>, tensor<5x4xf32>
}

// On buffers each of them writes.

// CHECK-LABEL: func @keeps_equal_ops_on_buffers
// CHECK-COUNT-2: moe.router_logits
func.func @keeps_equal_ops_on_buffers(
    %h: memref<5x8xf32>, %w: memref<4x8xf32>, %z: memref<5x4xf32>) {
  moe.router_logits ins(%h, %w : memref<5x8xf32>, memref<4x8xf32>)
      outs(%z : memref<5x4xf32>)
  moe.router_logits ins(%h, %w : memref<5x8xf32>, memref<4x8xf32>)
      outs(%z : memref<5x4xf32>)
  return
}
