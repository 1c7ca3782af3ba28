// RUN: %moe-opt %s --generate-runtime-verification | FileCheck %s

// Every dynamic size is compared with the first operand that has the dim.

// CHECK-LABEL: func @dims_agree
// CHECK-SAME:    %[[H:[^:]*]]: tensor<?x?xf32>, %[[W:[^:]*]]: tensor<?x?xf32>, %[[Z:[^:]*]]: tensor<?x?xf32>
// CHECK:         %[[D:.*]] = tensor.dim %[[H]]
// CHECK:         %[[F:.*]] = tensor.dim %[[W]]
// CHECK:         %[[SAME:.*]] = arith.cmpi eq, %[[F]], %[[D]]
// CHECK:         cf.assert %[[SAME]], {{.*}}expected dim 1 of 'weight' to match dim 1 of 'h'
// CHECK:         cf.assert {{.*}}expected dim 0 of 'z' to match dim 0 of 'h'
// CHECK:         cf.assert {{.*}}expected dim 1 of 'z' to match dim 0 of 'weight'
// CHECK:         moe.router_logits
func.func @dims_agree(%h: tensor<?x?xf32>, %w: tensor<?x?xf32>,
                      %z0: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<?x?xf32>, tensor<?x?xf32>)
      outs(%z0 : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %z : tensor<?x?xf32>
}

// What the verifier has seen is not checked again.

// CHECK-LABEL: func @static_sizes_need_no_check
// CHECK-NOT:     cf.assert
// CHECK:         moe.router_logits
func.func @static_sizes_need_no_check(
    %h: tensor<5x8xf32>, %w: tensor<4x8xf32>, %z0: tensor<5x4xf32>)
    -> tensor<5x4xf32> {
  %z = moe.router_logits ins(%h, %w : tensor<5x8xf32>, tensor<4x8xf32>)
      outs(%z0 : tensor<5x4xf32>) -> tensor<5x4xf32>
  return %z : tensor<5x4xf32>
}

// More choices than experts are an error at run time too (E8), on buffers as
// on tensors.

// CHECK-LABEL: func @topk_renorm_c1
// CHECK-SAME:    %[[Z:[^:]*]]: memref<?x?xf32>, %[[G:[^:]*]]: memref<?x?xf32>
// CHECK:         %[[K:.*]] = memref.dim %[[G]]
// CHECK:         %[[E:.*]] = memref.dim %[[Z]]
// CHECK:         arith.cmpi ule
// CHECK-NEXT:    cf.assert {{.*}}expected k to be at most e
// CHECK:         moe.topk_renorm
func.func @topk_renorm_c1(%z: memref<?x?xf32>, %g: memref<?x?xf32>,
                          %i: memref<?x?xi32>) {
  moe.topk_renorm ins(%z : memref<?x?xf32>)
      outs(%g, %i : memref<?x?xf32>, memref<?x?xi32>)
  return
}

// An adjacency is square.

// CHECK-LABEL: func @adjacency_update_c1
// CHECK:         cf.assert {{.*}}expected k to be at most e
// CHECK:         cf.assert {{.*}}expected e to be at most l
// CHECK:         cf.assert {{.*}}expected l to be at most e
// CHECK:         moe.adjacency_update
func.func @adjacency_update_c1(%a: tensor<?x?xf32>, %i: tensor<?x?xi32>,
                               %new: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %r = moe.adjacency_update ins(%a, %i : tensor<?x?xf32>, tensor<?x?xi32>)
      outs(%new : tensor<?x?xf32>) -> tensor<?x?xf32>
  return %r : tensor<?x?xf32>
}
