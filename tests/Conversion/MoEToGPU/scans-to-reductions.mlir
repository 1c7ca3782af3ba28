// RUN: %moe-opt %s --split-input-file --moe-scans-to-reductions --canonicalize --cse --mlir-print-local-scope | FileCheck %s

#all = affine_map<(a, b) -> (a, b)>

// Each place reduces the elements up to it.

// CHECK-LABEL: func.func @running_sum
// CHECK-NOT:     scf.for
// CHECK:         %[[START:.*]] = linalg.fill ins(%c0_i64
// CHECK:         %[[SUMS:.*]] = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d0, d1)>], iterator_types = ["parallel", "parallel", "reduction"]} ins(%arg0 : tensor<3x?xi1>) outs(%[[START]] : tensor<3x?xi64>)
// CHECK:         ^bb0(%[[X:.*]]: i1, %[[SUM:.*]]: i64):
// CHECK:           %[[WIDE:.*]] = arith.extui %[[X]]
// CHECK:           %[[NEXT:.*]] = arith.addi %[[SUM]], %[[WIDE]]
// CHECK-DAG:       %[[I:.*]] = linalg.index 1
// CHECK-DAG:       %[[J:.*]] = linalg.index 2
// CHECK:           %[[IS:.*]] = arith.cmpi ule, %[[J]], %[[I]]
// CHECK:           arith.select %[[IS]], %[[NEXT]], %[[SUM]]
// CHECK:         return %[[SUMS]]
func.func @running_sum(%x: tensor<3x?xi1>) -> tensor<3x?xi64> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %zero = arith.constant 0 : i64
  %n = tensor.dim %x, %c1 : tensor<3x?xi1>
  %row = tensor.empty() : tensor<3x1xi64>
  %start = linalg.fill ins(%zero : i64) outs(%row : tensor<3x1xi64>) -> tensor<3x1xi64>
  %kept = tensor.empty(%n) : tensor<3x?xi64>
  %r:2 = scf.for %i = %c0 to %n step %c1 iter_args(%sum = %start, %out = %kept) -> (tensor<3x1xi64>, tensor<3x?xi64>) {
    %piece = tensor.extract_slice %x[0, %i] [3, 1] [1, 1] : tensor<3x?xi1> to tensor<3x1xi1>
    %next = linalg.generic {indexing_maps = [#all, #all], iterator_types = ["parallel", "parallel"]}
        ins(%piece : tensor<3x1xi1>) outs(%sum : tensor<3x1xi64>) {
    ^bb0(%in: i1, %old: i64):
      %0 = arith.extui %in : i1 to i64
      %1 = arith.addi %old, %0 : i64
      linalg.yield %1 : i64
    } -> tensor<3x1xi64>
    %into = tensor.insert_slice %next into %out[0, %i] [3, 1] [1, 1] : tensor<3x1xi64> into tensor<3x?xi64>
    scf.yield %next, %into : tensor<3x1xi64>, tensor<3x?xi64>
  }
  return %r#1 : tensor<3x?xi64>
}

// -----

#all = affine_map<(a, b) -> (a, b)>

// Not all places, and a last value that is read, too.

// CHECK-LABEL: func.func @others
// CHECK-COUNT-2: scf.for
func.func @others(%x: tensor<3x8xf32>) -> (tensor<3x7xf32>, tensor<3x1xf32>, tensor<3x8xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c7 = arith.constant 7 : index
  %c8 = arith.constant 8 : index
  %zero = arith.constant 0.0 : f32
  %row = tensor.empty() : tensor<3x1xf32>
  %start = linalg.fill ins(%zero : f32) outs(%row : tensor<3x1xf32>) -> tensor<3x1xf32>
  %short = tensor.empty() : tensor<3x7xf32>
  %part:2 = scf.for %i = %c0 to %c7 step %c1 iter_args(%sum = %start, %out = %short) -> (tensor<3x1xf32>, tensor<3x7xf32>) {
    %piece = tensor.extract_slice %x[0, %i] [3, 1] [1, 1] : tensor<3x8xf32> to tensor<3x1xf32>
    %next = linalg.generic {indexing_maps = [#all, #all], iterator_types = ["parallel", "parallel"]}
        ins(%piece : tensor<3x1xf32>) outs(%sum : tensor<3x1xf32>) {
    ^bb0(%in: f32, %old: f32):
      %0 = arith.addf %old, %in : f32
      linalg.yield %0 : f32
    } -> tensor<3x1xf32>
    %into = tensor.insert_slice %next into %out[0, %i] [3, 1] [1, 1] : tensor<3x1xf32> into tensor<3x7xf32>
    scf.yield %next, %into : tensor<3x1xf32>, tensor<3x7xf32>
  }
  %kept = tensor.empty() : tensor<3x8xf32>
  %r:2 = scf.for %i = %c0 to %c8 step %c1 iter_args(%sum = %start, %out = %kept) -> (tensor<3x1xf32>, tensor<3x8xf32>) {
    %piece = tensor.extract_slice %x[0, %i] [3, 1] [1, 1] : tensor<3x8xf32> to tensor<3x1xf32>
    %next = linalg.generic {indexing_maps = [#all, #all], iterator_types = ["parallel", "parallel"]}
        ins(%piece : tensor<3x1xf32>) outs(%sum : tensor<3x1xf32>) {
    ^bb0(%in: f32, %old: f32):
      %0 = arith.addf %old, %in : f32
      linalg.yield %0 : f32
    } -> tensor<3x1xf32>
    %into = tensor.insert_slice %next into %out[0, %i] [3, 1] [1, 1] : tensor<3x1xf32> into tensor<3x8xf32>
    scf.yield %next, %into : tensor<3x1xf32>, tensor<3x8xf32>
  }
  return %part#1, %r#0, %r#1 : tensor<3x7xf32>, tensor<3x1xf32>, tensor<3x8xf32>
}

// -----

#all = affine_map<(a, b) -> (a, b)>

// A body that reads the place means something else at each.

// CHECK-LABEL: func.func @reads_the_place
// CHECK:         scf.for
func.func @reads_the_place(%x: tensor<3x8xi64>) -> tensor<3x8xi64> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c8 = arith.constant 8 : index
  %zero = arith.constant 0 : i64
  %row = tensor.empty() : tensor<3x1xi64>
  %start = linalg.fill ins(%zero : i64) outs(%row : tensor<3x1xi64>) -> tensor<3x1xi64>
  %kept = tensor.empty() : tensor<3x8xi64>
  %r:2 = scf.for %i = %c0 to %c8 step %c1 iter_args(%sum = %start, %out = %kept) -> (tensor<3x1xi64>, tensor<3x8xi64>) {
    %piece = tensor.extract_slice %x[0, %i] [3, 1] [1, 1] : tensor<3x8xi64> to tensor<3x1xi64>
    %next = linalg.generic {indexing_maps = [#all, #all], iterator_types = ["parallel", "parallel"]}
        ins(%piece : tensor<3x1xi64>) outs(%sum : tensor<3x1xi64>) {
    ^bb0(%in: i64, %old: i64):
      %place = arith.index_cast %i : index to i64
      %0 = arith.muli %in, %place : i64
      %1 = arith.addi %old, %0 : i64
      linalg.yield %1 : i64
    } -> tensor<3x1xi64>
    %into = tensor.insert_slice %next into %out[0, %i] [3, 1] [1, 1] : tensor<3x1xi64> into tensor<3x8xi64>
    scf.yield %next, %into : tensor<3x1xi64>, tensor<3x8xi64>
  }
  return %r#1 : tensor<3x8xi64>
}
