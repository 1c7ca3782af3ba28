// RUN: %moe-opt %s --split-input-file --moe-concatenations-to-selections --moe-concatenations-to-selections --mlir-print-local-scope | FileCheck %s

#all = affine_map<(a, b) -> (a, b)>

// The halves of a rotary embedding, one of them negated: each element is read
// from where it was cut.

// CHECK-LABEL: func.func @rotate_half
// CHECK-NOT:     tensor.insert_slice
// CHECK:         %[[TURNED:.*]] = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} outs(%{{.*}} : tensor<?x64xf32>)
// CHECK-DAG:       %[[I:.*]] = linalg.index 0
// CHECK-DAG:       %[[J:.*]] = linalg.index 1
// CHECK:           %[[LEFT:.*]] = arith.minsi %[[J]], %c31
// CHECK:           %[[FROM:.*]] = arith.addi %[[LEFT]], %c32
// CHECK:           %[[Y:.*]] = tensor.extract %arg0[%[[I]], %[[FROM]]]
// CHECK:           %[[MINUS:.*]] = arith.negf %[[Y]]
// CHECK:           arith.maxsi %[[J]], %c32
// CHECK:           %[[X:.*]] = tensor.extract %arg0
// CHECK:           %[[RIGHT:.*]] = arith.cmpi sge, %[[J]], %c32
// CHECK:           arith.select %[[RIGHT]], %[[X]], %[[MINUS]]
// CHECK:         linalg.generic {{.*}} ins(%[[TURNED]]
func.func @rotate_half(%x: tensor<?x64xf32>) -> tensor<?x64xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?x64xf32>
  %left = tensor.extract_slice %x[0, 0] [%n, 32] [1, 1] : tensor<?x64xf32> to tensor<?x32xf32>
  %right = tensor.extract_slice %x[0, 32] [%n, 32] [1, 1] : tensor<?x64xf32> to tensor<?x32xf32>
  %half = tensor.empty(%n) : tensor<?x32xf32>
  %minus = linalg.generic {indexing_maps = [#all, #all], iterator_types = ["parallel", "parallel"]}
      ins(%right : tensor<?x32xf32>) outs(%half : tensor<?x32xf32>) {
  ^bb0(%in: f32, %out: f32):
    %r = arith.negf %in : f32
    linalg.yield %r : f32
  } -> tensor<?x32xf32>
  %whole = tensor.empty(%n) : tensor<?x64xf32>
  %0 = tensor.insert_slice %minus into %whole[0, 0] [%n, 32] [1, 1] : tensor<?x32xf32> into tensor<?x64xf32>
  %1 = tensor.insert_slice %left into %0[0, 32] [%n, 32] [1, 1] : tensor<?x32xf32> into tensor<?x64xf32>
  %y = linalg.generic {indexing_maps = [#all, #all], iterator_types = ["parallel", "parallel"]}
      ins(%1 : tensor<?x64xf32>) outs(%whole : tensor<?x64xf32>) {
  ^bb0(%in: f32, %out: f32):
    %r = math.sin %in : f32
    linalg.yield %r : f32
  } -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}

// -----

#all = affine_map<(a, b) -> (a, b)>

// What is stored as a whole is written part by part.

// CHECK-LABEL: func.func @stored
// CHECK-COUNT-2: tensor.insert_slice
func.func @stored(%x: tensor<4x3xf32>, %y: tensor<4x5xf32>) -> tensor<4x8xf32> {
  %whole = tensor.empty() : tensor<4x8xf32>
  %0 = tensor.insert_slice %x into %whole[0, 0] [4, 3] [1, 1] : tensor<4x3xf32> into tensor<4x8xf32>
  %1 = tensor.insert_slice %y into %0[0, 3] [4, 5] [1, 1] : tensor<4x5xf32> into tensor<4x8xf32>
  return %1 : tensor<4x8xf32>
}

// -----

#all = affine_map<(a, b) -> (a, b)>

// A gap holds nothing that could be chosen.

// CHECK-LABEL: func.func @gap
// CHECK-COUNT-2: tensor.insert_slice
func.func @gap(%x: tensor<4x3xf32>, %y: tensor<4x4xf32>) -> tensor<4x8xf32> {
  %whole = tensor.empty() : tensor<4x8xf32>
  %0 = tensor.insert_slice %x into %whole[0, 0] [4, 3] [1, 1] : tensor<4x3xf32> into tensor<4x8xf32>
  %1 = tensor.insert_slice %y into %0[0, 4] [4, 4] [1, 1] : tensor<4x4xf32> into tensor<4x8xf32>
  %z = linalg.generic {indexing_maps = [#all, #all], iterator_types = ["parallel", "parallel"]}
      ins(%1 : tensor<4x8xf32>) outs(%whole : tensor<4x8xf32>) {
  ^bb0(%in: f32, %out: f32):
    %r = math.sin %in : f32
    linalg.yield %r : f32
  } -> tensor<4x8xf32>
  return %z : tensor<4x8xf32>
}
