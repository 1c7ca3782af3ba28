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

// A bias that is repeated is an initial value.

// CHECK-LABEL: func @repeats_a_bias_for_each_use
// CHECK-COUNT-2: linalg.broadcast
// CHECK-COUNT-2: linalg.matmul
func.func @repeats_a_bias_for_each_use(%a: tensor<4x4xf32>, %bias: tensor<4xf32>)
    -> (tensor<4x4xf32>, tensor<4x4xf32>) {
  %e = tensor.empty() : tensor<4x4xf32>
  %b = linalg.broadcast ins(%bias : tensor<4xf32>) outs(%e : tensor<4x4xf32>) dimensions = [0]
  %0 = linalg.matmul ins(%a, %a : tensor<4x4xf32>, tensor<4x4xf32>)
      outs(%b : tensor<4x4xf32>) -> tensor<4x4xf32>
  %1 = linalg.matmul ins(%0, %a : tensor<4x4xf32>, tensor<4x4xf32>)
      outs(%b : tensor<4x4xf32>) -> tensor<4x4xf32>
  return %0, %1 : tensor<4x4xf32>, tensor<4x4xf32>
}

// What is stored starts from a copy where the start is read later: the second
// product could not be computed in the memory of the first result.

// CHECK-LABEL: func @copies_a_start_that_is_read_later
// CHECK:         %[[Y:.*]] = linalg.exp
// CHECK:         %[[COPY:.*]] = bufferization.alloc_tensor() copy(%[[Y]])
// CHECK:         linalg.matmul {{.*}} outs(%[[COPY]]
// CHECK:         linalg.matmul {{.*}} outs(%[[Y]]
func.func @copies_a_start_that_is_read_later(
    %a: tensor<4x4xf32>, %out0: memref<4x4xf32>, %out1: memref<4x4xf32>) {
  %e = tensor.empty() : tensor<4x4xf32>
  %y = linalg.exp ins(%a : tensor<4x4xf32>) outs(%e : tensor<4x4xf32>) -> tensor<4x4xf32>
  %0 = linalg.matmul ins(%a, %a : tensor<4x4xf32>, tensor<4x4xf32>)
      outs(%y : tensor<4x4xf32>) -> tensor<4x4xf32>
  %1 = linalg.matmul ins(%0, %a : tensor<4x4xf32>, tensor<4x4xf32>)
      outs(%y : tensor<4x4xf32>) -> tensor<4x4xf32>
  bufferization.materialize_in_destination %0 in restrict writable %out0
      : (tensor<4x4xf32>, memref<4x4xf32>) -> ()
  bufferization.materialize_in_destination %1 in restrict writable %out1
      : (tensor<4x4xf32>, memref<4x4xf32>) -> ()
  return
}

// A size is no memory.

// CHECK-LABEL: func @asks_for_the_size_of_a_start
// CHECK-NOT:     alloc_tensor
// CHECK:         return
func.func @asks_for_the_size_of_a_start(
    %a: tensor<?x4xf32>, %w: tensor<4x4xf32>, %n: index, %out: memref<?x4xf32>) -> index {
  %zero = arith.constant 0 : index
  %e = tensor.empty(%n) : tensor<?x4xf32>
  %y = linalg.exp ins(%a : tensor<?x4xf32>) outs(%e : tensor<?x4xf32>) -> tensor<?x4xf32>
  %size = tensor.dim %y, %zero : tensor<?x4xf32>
  %0 = linalg.matmul ins(%a, %w : tensor<?x4xf32>, tensor<4x4xf32>)
      outs(%y : tensor<?x4xf32>) -> tensor<?x4xf32>
  bufferization.materialize_in_destination %0 in restrict writable %out
      : (tensor<?x4xf32>, memref<?x4xf32>) -> ()
  return %size : index
}

// The same between the destinations of a loop: one is stored before the other.

// CHECK-LABEL: func @keeps_destinations_of_a_loop_apart
// CHECK:         scf.forall (%[[I:.*]]) in (4) shared_outs(%[[FIRST:.*]] = %{{.*}}, %[[SECOND:.*]] = %{{.*}})
// CHECK:           %[[OWN:.*]] = tensor.empty() : tensor<1x4xf32>
// CHECK:           %[[Y:.*]] = linalg.exp {{.*}} outs(%[[OWN]]
// CHECK:           %[[COPY:.*]] = bufferization.alloc_tensor() copy(%[[Y]])
// CHECK:           %[[P:.*]] = linalg.matmul {{.*}} outs(%[[COPY]]
// CHECK:           %[[Q:.*]] = linalg.matmul {{.*}} outs(%[[Y]]
// CHECK:             tensor.parallel_insert_slice %[[P]] into %[[FIRST]]
// CHECK:             tensor.parallel_insert_slice %[[Q]] into %[[SECOND]]
func.func @keeps_destinations_of_a_loop_apart(%a: tensor<4x4xf32>, %w: tensor<4x4xf32>)
    -> (tensor<4x4xf32>, tensor<4x4xf32>) {
  %e0 = tensor.empty() : tensor<4x4xf32>
  %e1 = tensor.empty() : tensor<4x4xf32>
  %0:2 = scf.forall (%i) in (4) shared_outs(%first = %e0, %second = %e1)
      -> (tensor<4x4xf32>, tensor<4x4xf32>) {
    %x = tensor.extract_slice %a[%i, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
    %d = tensor.extract_slice %first[%i, 0] [1, 4] [1, 1] : tensor<4x4xf32> to tensor<1x4xf32>
    %y = linalg.exp ins(%x : tensor<1x4xf32>) outs(%d : tensor<1x4xf32>) -> tensor<1x4xf32>
    %p = linalg.matmul ins(%x, %w : tensor<1x4xf32>, tensor<4x4xf32>)
        outs(%y : tensor<1x4xf32>) -> tensor<1x4xf32>
    %q = linalg.matmul ins(%p, %w : tensor<1x4xf32>, tensor<4x4xf32>)
        outs(%y : tensor<1x4xf32>) -> tensor<1x4xf32>
    scf.forall.in_parallel {
      tensor.parallel_insert_slice %p into %first[%i, 0] [1, 4] [1, 1]
          : tensor<1x4xf32> into tensor<4x4xf32>
      tensor.parallel_insert_slice %q into %second[%i, 0] [1, 4] [1, 1]
          : tensor<1x4xf32> into tensor<4x4xf32>
    }
  }
  return %0#0, %0#1 : tensor<4x4xf32>, tensor<4x4xf32>
}
