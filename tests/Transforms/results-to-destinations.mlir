// RUN: %moe-opt %s --moe-results-to-destinations --split-input-file --verify-diagnostics | FileCheck %s

// CHECK-LABEL: func @appends_a_destination_a_result
// CHECK-SAME:    (%[[X:.*]]: tensor<?xf32> {bufferization.writable = false}, %[[K:.*]]: index,
// CHECK-SAME:     %[[OUT0:.*]]: memref<?xf32>, %[[OUT1:.*]]: memref<4xi32>)
// CHECK-SAME:    llvm.emit_c_interface
func.func @appends_a_destination_a_result(%x: tensor<?xf32>, %k: index)
    -> (tensor<?xf32>, tensor<4xi32>) {
  // CHECK: %[[I:.*]] = tensor.empty
  %i = tensor.empty() : tensor<4xi32>
  // CHECK-DAG: bufferization.materialize_in_destination %[[X]] in restrict writable %[[OUT0]]
  // CHECK-DAG: bufferization.materialize_in_destination %[[I]] in restrict writable %[[OUT1]]
  // CHECK: return{{$}}
  return %x, %i : tensor<?xf32>, tensor<4xi32>
}

// CHECK-LABEL: func @stores_a_scalar_in_a_buffer_of_rank_0
// CHECK-SAME:    (%[[X:.*]]: f32, %[[OUT:.*]]: memref<f32>)
func.func @stores_a_scalar_in_a_buffer_of_rank_0(%x: f32) -> f32 {
  // CHECK: %[[T:.*]] = tensor.from_elements %[[X]] : tensor<f32>
  // CHECK: materialize_in_destination %[[T]] in restrict writable %[[OUT]]
  return %x : f32
}

// CHECK-LABEL: func @computes_a_reshaped_result_in_a_view_of_the_destination
// CHECK-SAME:    (%{{.*}}: index, %[[OUT:.*]]: memref<?x16xf32>)
func.func @computes_a_reshaped_result_in_a_view_of_the_destination(%n: index)
    -> tensor<?x16xf32> {
  %f = arith.constant 1.0 : f32
  %empty = tensor.empty(%n) : tensor<?x16xf32>
  // CHECK: %[[VIEW:.*]] = memref.expand_shape %[[OUT]] {{\[}}[0, 1], [2]]
  // CHECK: %[[EMPTY:.*]] = tensor.empty({{.*}}) : tensor<1x?x16xf32>
  %split = tensor.expand_shape %empty [[0, 1], [2]] output_shape [1, %n, 16]
      : tensor<?x16xf32> into tensor<1x?x16xf32>
  // CHECK: %[[FILL:.*]] = linalg.fill {{.*}} outs(%[[EMPTY]]
  %fill = linalg.fill ins(%f : f32) outs(%split : tensor<1x?x16xf32>) -> tensor<1x?x16xf32>
  %joined = tensor.collapse_shape %fill [[0, 1], [2]]
      : tensor<1x?x16xf32> into tensor<?x16xf32>
  // CHECK: materialize_in_destination %[[FILL]] in restrict writable %[[VIEW]]
  return %joined : tensor<?x16xf32>
}

// CHECK-LABEL: func private @leaves_private_functions
// CHECK-SAME:    (%{{.*}}: tensor<?xf32>) -> tensor<?xf32> {
func.func private @leaves_private_functions(%x: tensor<?xf32>) -> tensor<?xf32> {
  return %x : tensor<?xf32>
}

// -----

// expected-error @below {{expected public function '@callee' not to be called inside its module, found a call; make it private}}
func.func @callee(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
func.func private @caller(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-note @below {{called here}}
  %r = func.call @callee(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}

// -----

// CHECK-LABEL: func @lets_arguments_be_written_that_results_update
// CHECK-SAME:    (%[[X:.*]]: tensor<4xf32> {bufferization.writable = true},
// CHECK-SAME:     %[[Y:.*]]: tensor<4xf32> {bufferization.writable = false}, %[[OUT:.*]]: memref<4xf32>)
// CHECK-SAME:    -> (tensor<4xf32> {moe.updates = 0 : i64})
func.func @lets_arguments_be_written_that_results_update(%x: tensor<4xf32>, %y: tensor<4xf32>)
    -> (tensor<4xf32>, tensor<4xf32> {moe.updates = 0 : i64}) {
  // CHECK: materialize_in_destination %[[X]] in restrict writable %[[OUT]]
  // CHECK: return %[[Y]] : tensor<4xf32>
  return %x, %y : tensor<4xf32>, tensor<4xf32>
}

// -----

// expected-error @below {{expected result 0 to update an argument of its type, found 'moe.updates' 1}}
func.func @updates_an_argument_of_its_type(%x: tensor<4xf32>, %n: index)
    -> (tensor<4xf32> {moe.updates = 1 : i64}) {
  return %x : tensor<4xf32>
}
