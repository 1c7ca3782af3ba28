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

// Counts are added to: those of before are read, and two counts of the same
// tokens are more than one.

// CHECK-LABEL: func @keeps_the_store_before_an_op_that_accumulates
// CHECK:         memref.store
// CHECK:         moe.co_selections
// CHECK:         %[[SUM:.*]] = memref.load
// CHECK:         return %[[SUM]]
func.func @keeps_the_store_before_an_op_that_accumulates(
    %i: memref<9x2xi32>, %c: memref<4x4xi32>, %x: i32) -> i32 {
  %c0 = arith.constant 0 : index
  memref.store %x, %c[%c0, %c0] : memref<4x4xi32>
  %before = memref.load %c[%c0, %c0] : memref<4x4xi32>
  moe.co_selections ins(%i : memref<9x2xi32>) outs(%c : memref<4x4xi32>)
  %after = memref.load %c[%c0, %c0] : memref<4x4xi32>
  return %after : i32
}
