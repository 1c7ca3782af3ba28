// RUN: %moe-opt %s --moe-concatenate-in-place --canonicalize --split-input-file | FileCheck %s
// RUN: %moe-opt %s --moe-concatenate-in-place --moe-concatenate-in-place --canonicalize --split-input-file | FileCheck %s

// The first part stays where it is, also where sizes are known only at run
// time; the second is put behind it.

// CHECK-LABEL: func @leaves_the_first_part
// CHECK:         %[[X:.*]] = linalg.exp
// CHECK:         %[[TAIL:.*]] = tensor.extract_slice %[[X]][0, 6]
// CHECK:         %[[NEGATED:.*]] = linalg.negf ins(%[[TAIL]]
// CHECK:         %[[Z:.*]] = tensor.insert_slice %[[NEGATED]] into %[[X]][0, 6]
// CHECK:         return %[[Z]]
func.func @leaves_the_first_part(%a: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %a, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%n) : tensor<?x8xf32>
  %x = linalg.exp ins(%a : tensor<?x8xf32>) outs(%e : tensor<?x8xf32>) -> tensor<?x8xf32>
  %head = tensor.extract_slice %x[0, 0] [%n, 6] [1, 1] : tensor<?x8xf32> to tensor<?x6xf32>
  %tail = tensor.extract_slice %x[0, 6] [%n, 2] [1, 1] : tensor<?x8xf32> to tensor<?x2xf32>
  %e2 = tensor.empty(%n) : tensor<?x2xf32>
  %negated = linalg.negf ins(%tail : tensor<?x2xf32>) outs(%e2 : tensor<?x2xf32>) -> tensor<?x2xf32>
  %whole = tensor.empty(%n) : tensor<?x8xf32>
  %y = tensor.insert_slice %head into %whole[0, 0] [%n, 6] [1, 1] : tensor<?x6xf32> into tensor<?x8xf32>
  %z = tensor.insert_slice %negated into %y[0, 6] [%n, 2] [1, 1] : tensor<?x2xf32> into tensor<?x8xf32>
  return %z : tensor<?x8xf32>
}

// -----

// Another place, another shape, a tensor with other elements, and an argument,
// which is not written.

// CHECK-LABEL: func @copies_elsewhere
// CHECK-COUNT-4: tensor.insert_slice
func.func @copies_elsewhere(%a: tensor<4x8xf32>, %filled: tensor<4x8xf32>)
    -> (tensor<4x8xf32>, tensor<4x9xf32>, tensor<4x8xf32>, tensor<4x8xf32>) {
  %e = tensor.empty() : tensor<4x8xf32>
  %x = linalg.exp ins(%a : tensor<4x8xf32>) outs(%e : tensor<4x8xf32>) -> tensor<4x8xf32>
  %head = tensor.extract_slice %x[0, 0] [4, 6] [1, 1] : tensor<4x8xf32> to tensor<4x6xf32>
  %whole = tensor.empty() : tensor<4x8xf32>
  %0 = tensor.insert_slice %head into %whole[0, 2] [4, 6] [1, 1] : tensor<4x6xf32> into tensor<4x8xf32>
  %wider = tensor.empty() : tensor<4x9xf32>
  %1 = tensor.insert_slice %head into %wider[0, 0] [4, 6] [1, 1] : tensor<4x6xf32> into tensor<4x9xf32>
  %2 = tensor.insert_slice %head into %filled[0, 0] [4, 6] [1, 1] : tensor<4x6xf32> into tensor<4x8xf32>
  %part = tensor.extract_slice %a[0, 0] [4, 6] [1, 1] : tensor<4x8xf32> to tensor<4x6xf32>
  %3 = tensor.insert_slice %part into %whole[0, 0] [4, 6] [1, 1] : tensor<4x6xf32> into tensor<4x8xf32>
  return %0, %1, %2, %3 : tensor<4x8xf32>, tensor<4x9xf32>, tensor<4x8xf32>, tensor<4x8xf32>
}

// -----

// A size at run time that may be another one.

// CHECK-LABEL: func @asks_for_the_same_size
// CHECK:         tensor.empty(%{{.*}}) : tensor<?x8xf32>
// CHECK:         tensor.insert_slice
func.func @asks_for_the_same_size(%a: tensor<?x8xf32>, %n: index, %m: index) -> tensor<?x8xf32> {
  %e = tensor.empty(%m) : tensor<?x8xf32>
  %x = linalg.exp ins(%a : tensor<?x8xf32>) outs(%e : tensor<?x8xf32>) -> tensor<?x8xf32>
  %head = tensor.extract_slice %x[0, 0] [%n, 6] [1, 1] : tensor<?x8xf32> to tensor<?x6xf32>
  %whole = tensor.empty(%n) : tensor<?x8xf32>
  %y = tensor.insert_slice %head into %whole[0, 0] [%n, 6] [1, 1] : tensor<?x6xf32> into tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
