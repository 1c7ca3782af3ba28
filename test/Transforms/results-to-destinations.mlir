// RUN: %moe-opt %s --moe-results-to-destinations --split-input-file --verify-diagnostics | FileCheck %s

// CHECK-LABEL: func @appends_a_destination_a_result
// CHECK-SAME:    (%[[X:.*]]: tensor<?xf32> {bufferization.writable = false}, %[[K:.*]]: index,
// CHECK-SAME:     %[[OUT0:.*]]: tensor<?xf32>, %[[OUT1:.*]]: tensor<4xi32>) -> (tensor<?xf32>, tensor<4xi32>)
// CHECK-SAME:    llvm.emit_c_interface
func.func @appends_a_destination_a_result(%x: tensor<?xf32>, %k: index)
    -> (tensor<?xf32>, tensor<4xi32>) {
  // CHECK: %[[I:.*]] = tensor.empty
  %i = tensor.empty() : tensor<4xi32>
  // CHECK-DAG: %[[R0:.*]] = bufferization.materialize_in_destination %[[X]] in %[[OUT0]]
  // CHECK-DAG: %[[R1:.*]] = bufferization.materialize_in_destination %[[I]] in %[[OUT1]]
  // CHECK: return %[[R0]], %[[R1]]
  return %x, %i : tensor<?xf32>, tensor<4xi32>
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
