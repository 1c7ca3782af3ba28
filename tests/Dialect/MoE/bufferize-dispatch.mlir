// RUN: %moe-opt %s --one-shot-bufferize="bufferize-function-boundaries function-boundary-type-conversion=identity-layout-map" | FileCheck %s

// Results live in the buffers of their destinations; nothing is copied.

// CHECK-LABEL: func @bufferizes_every_destination
// CHECK-NOT:     memref.copy
// CHECK-NOT:     memref.alloc
// CHECK:         moe.dispatch ins(%{{.*}} : memref<?x2xi32>) capacity(%{{.*}} : i32) outs(%[[S:.*]], %{{.*}}, %{{.*}} : memref<?x2xi32>, memref<9xi32>, memref<8xi32>)
// CHECK:         moe.combine ins(%{{.*}}, %{{.*}}, %[[S]] : memref<?x32xf32>, memref<?x2xf32>, memref<?x2xi32>) outs(%[[Y:.*]] : memref<?x32xf32>)
// CHECK:         return %[[Y]]
func.func @bufferizes_every_destination(
    %i: tensor<?x2xi32>, %n: i32, %s: tensor<?x2xi32>, %o: tensor<9xi32>, %c: tensor<8xi32>,
    %x: tensor<?x32xf32>, %g: tensor<?x2xf32>, %y: tensor<?x32xf32>) -> tensor<?x32xf32> {
  %r:3 = moe.dispatch ins(%i : tensor<?x2xi32>) capacity(%n : i32)
      outs(%s, %o, %c : tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>)
      -> tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>
  %z = moe.combine ins(%x, %g, %r#0 : tensor<?x32xf32>, tensor<?x2xf32>, tensor<?x2xi32>)
      outs(%y : tensor<?x32xf32>) -> tensor<?x32xf32>
  return %z : tensor<?x32xf32>
}
