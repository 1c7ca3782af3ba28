// RUN: %moe-opt %s --resolve-ranked-shaped-type-result-dims --canonicalize | FileCheck %s

// The size of a result is the size of its destination, without computing it.

// CHECK-LABEL: func @result_sizes_are_destination_sizes
// CHECK-SAME:    %[[Z:[^:]*]]: tensor<?x?xf32>, %[[G0:[^:]*]]: tensor<?x?xf32>, %[[I0:[^:]*]]: tensor<?x?xi32>
// CHECK-DAG:     %[[C0:.*]] = arith.constant 0
// CHECK-DAG:     %[[C1:.*]] = arith.constant 1
// CHECK-NOT:     moe.
// CHECK-DAG:     %[[N:.*]] = tensor.dim %[[G0]], %[[C0]]
// CHECK-DAG:     %[[K:.*]] = tensor.dim %[[I0]], %[[C1]]
// CHECK:         return %[[N]], %[[K]]
func.func @result_sizes_are_destination_sizes(
    %z: tensor<?x?xf32>, %g0: tensor<?x?xf32>, %i0: tensor<?x?xi32>)
    -> (index, index) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %g, %i = moe.topk_renorm ins(%z : tensor<?x?xf32>)
      outs(%g0, %i0 : tensor<?x?xf32>, tensor<?x?xi32>)
      -> tensor<?x?xf32>, tensor<?x?xi32>
  %n = tensor.dim %g, %c0 : tensor<?x?xf32>
  %k = tensor.dim %i, %c1 : tensor<?x?xi32>
  return %n, %k : index, index
}

// Each of several results has its own.

// CHECK-LABEL: func @sizes_of_the_second_result
// CHECK-SAME:    %[[COUNT:[^:,]*]]: tensor<?xi32>)
// CHECK:         %[[E:.*]] = tensor.dim %[[COUNT]]
// CHECK:         return %[[E]]
func.func @sizes_of_the_second_result(
    %h: tensor<?x?xf32>, %assign: tensor<?xi32>, %s: tensor<?x?xf32>,
    %count: tensor<?xi32>) -> index {
  %c0 = arith.constant 0 : index
  %r:3 = moe.mad_dispersion ins(%h, %assign : tensor<?x?xf32>, tensor<?xi32>)
      outs(%s, %s, %count : tensor<?x?xf32>, tensor<?x?xf32>, tensor<?xi32>)
      -> tensor<?x?xf32>, tensor<?x?xf32>, tensor<?xi32>
  %e = tensor.dim %r#2, %c0 : tensor<?xi32>
  return %e : index
}
