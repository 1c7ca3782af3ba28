// RUN: %moe-opt %s --moe-privatize-destinations | FileCheck %s
// RUN: %moe-opt %s --moe-privatize-destinations --moe-privatize-destinations | FileCheck %s

// CHECK-LABEL: func @keeps_two_results_apart
// CHECK-DAG:     %[[E0:.*]] = tensor.empty
// CHECK-DAG:     %[[E1:.*]] = tensor.empty
// CHECK-DAG:     %[[F0:.*]] = linalg.fill {{.*}} outs(%[[E0]]
// CHECK-DAG:     %[[F1:.*]] = linalg.fill {{.*}} outs(%[[E1]]
// CHECK-DAG:     linalg.matmul {{.*}} outs(%[[F0]]
// CHECK-DAG:     linalg.matmul {{.*}} outs(%[[F1]]
func.func @keeps_two_results_apart(%a: tensor<4x4xf32>, %b: tensor<4x4xf32>)
    -> (tensor<4x4xf32>, tensor<4x4xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4x4xf32>
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<4x4xf32>) -> tensor<4x4xf32>
  %0 = linalg.matmul ins(%a, %b : tensor<4x4xf32>, tensor<4x4xf32>)
      outs(%f : tensor<4x4xf32>) -> tensor<4x4xf32>
  %1 = linalg.matmul ins(%b, %a : tensor<4x4xf32>, tensor<4x4xf32>)
      outs(%f : tensor<4x4xf32>) -> tensor<4x4xf32>
  return %0, %1 : tensor<4x4xf32>, tensor<4x4xf32>
}

// A value that was computed is not a destination: it is computed once.

// CHECK-LABEL: func @leaves_computed_values
// CHECK:         linalg.matmul
// CHECK-NOT:     linalg.matmul
func.func @leaves_computed_values(%a: tensor<4x4xf32>, %c: tensor<4x4xf32>)
    -> (tensor<4x4xf32>, tensor<4x4xf32>) {
  %0 = linalg.matmul ins(%a, %a : tensor<4x4xf32>, tensor<4x4xf32>)
      outs(%c : tensor<4x4xf32>) -> tensor<4x4xf32>
  return %0, %0 : tensor<4x4xf32>, tensor<4x4xf32>
}

// Destinations that nothing uses stay as they are.

// CHECK-LABEL: func @leaves_unused_destinations
// CHECK-COUNT-1: tensor.empty
func.func @leaves_unused_destinations() {
  %e = tensor.empty() : tensor<4xf32>
  return
}
