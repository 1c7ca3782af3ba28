// RUN: %moe-opt %s --moe-keep-reduced-dims --split-input-file | FileCheck %s
// RUN: %moe-opt %s --moe-keep-reduced-dims --moe-keep-reduced-dims --split-input-file | FileCheck %s

// A mean has the dim that its reader broadcasts: a loop of one iteration behind
// that of its rows, in front of the one that it sums over.

// CHECK-DAG:   #[[READ:.*]] = affine_map<(d0, d1, d2) -> (d0, d2)>
// CHECK-DAG:   #[[SUM:.*]] = affine_map<(d0, d1, d2) -> (d0, d1)>
// CHECK-LABEL: func @keeps_the_dim_of_a_mean
// CHECK-SAME:    %[[X:[^:]*]]: tensor<?x8xf32>
// CHECK:         %[[FILL:.*]] = linalg.fill {{.*}} -> tensor<?x1xf32>
// CHECK:         %[[S:.*]] = linalg.generic {indexing_maps = [#[[READ]], #[[SUM]]]
// CHECK-SAME:      iterator_types = ["parallel", "parallel", "reduction"]}
// CHECK-SAME:      ins(%[[X]] : tensor<?x8xf32>) outs(%[[FILL]] : tensor<?x1xf32>)
// CHECK:         %[[M:.*]] = linalg.generic {{.*}} ins(%[[S]] : tensor<?x1xf32>)
// CHECK:           arith.divf
// CHECK-NOT:     tensor.expand_shape
// CHECK:         return %[[M]]
#id = affine_map<(d0) -> (d0)>
#read = affine_map<(d0, d1) -> (d0, d1)>
#sum = affine_map<(d0, d1) -> (d0)>
func.func @keeps_the_dim_of_a_mean(%x: tensor<?x8xf32>) -> tensor<?x1xf32> {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0.0 : f32
  %eight = arith.constant 8.0 : f32
  %n = tensor.dim %x, %c0 : tensor<?x8xf32>
  %e = tensor.empty(%n) : tensor<?xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%e : tensor<?xf32>) -> tensor<?xf32>
  %s = linalg.generic {indexing_maps = [#read, #sum], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<?x8xf32>) outs(%zeros : tensor<?xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.addf %o, %in : f32
    linalg.yield %0 : f32
  } -> tensor<?xf32>
  %m = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%s : tensor<?xf32>) outs(%e : tensor<?xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.divf %in, %eight : f32
    linalg.yield %0 : f32
  } -> tensor<?xf32>
  %k = tensor.expand_shape %m [[0, 1]] output_shape [%n, 1] : tensor<?xf32> into tensor<?x1xf32>
  return %k : tensor<?x1xf32>
}

// -----

// The loop that is summed stays in front of that of contiguous elements.

// CHECK-DAG:   #[[READ:.*]] = affine_map<(d0, d1, d2, d3) -> (d0, d2, d3)>
// CHECK-DAG:   #[[SUM:.*]] = affine_map<(d0, d1, d2, d3) -> (d0, d1, d3)>
// CHECK-LABEL: func @keeps_the_order_of_loops
// CHECK:         linalg.generic {indexing_maps = [#[[READ]], #[[SUM]]]
// CHECK-SAME:      iterator_types = ["parallel", "parallel", "reduction", "parallel"]}
// CHECK:         } -> tensor<2x1x4xf32>
#read = affine_map<(d0, d1, d2) -> (d0, d1, d2)>
#sum = affine_map<(d0, d1, d2) -> (d0, d2)>
func.func @keeps_the_order_of_loops(%x: tensor<2x3x4xf32>) -> tensor<2x1x4xf32> {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<2x4xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%e : tensor<2x4xf32>) -> tensor<2x4xf32>
  %s = linalg.generic {indexing_maps = [#read, #sum], iterator_types = ["parallel", "reduction", "parallel"]}
      ins(%x : tensor<2x3x4xf32>) outs(%zeros : tensor<2x4xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.addf %o, %in : f32
    linalg.yield %0 : f32
  } -> tensor<2x4xf32>
  %k = tensor.expand_shape %s [[0, 1], [2]] output_shape [2, 1, 4] : tensor<2x4xf32> into tensor<2x1x4xf32>
  return %k : tensor<2x1x4xf32>
}

// -----

// A product keeps its shape, for its kernel; so does a sum that starts with an
// argument, one that somebody else reads, and a dim that is cut in two.

// CHECK-LABEL: func @keeps_others
// CHECK-COUNT-4: tensor.expand_shape
#lhs = affine_map<(d0, d1, d2) -> (d0, d2)>
#rhs = affine_map<(d0, d1, d2) -> (d1, d2)>
#out = affine_map<(d0, d1, d2) -> (d0, d1)>
#read = affine_map<(d0, d1) -> (d0, d1)>
#sum = affine_map<(d0, d1) -> (d0)>
func.func @keeps_others(%x: tensor<4x8xf32>, %w: tensor<2x8xf32>, %start: tensor<4xf32>)
    -> (tensor<4x1x2xf32>, tensor<4x1xf32>, tensor<4x1xf32>, tensor<4xf32>, tensor<2x2xf32>) {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<4x2xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%e : tensor<4x2xf32>) -> tensor<4x2xf32>
  %p = linalg.generic {indexing_maps = [#lhs, #rhs, #out], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<4x8xf32>, tensor<2x8xf32>) outs(%zeros : tensor<4x2xf32>) {
  ^bb0(%a: f32, %b: f32, %o: f32):
    %0 = arith.mulf %a, %b : f32
    %1 = arith.addf %o, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<4x2xf32>
  %0 = tensor.expand_shape %p [[0, 1], [2]] output_shape [4, 1, 2] : tensor<4x2xf32> into tensor<4x1x2xf32>
  %s = linalg.generic {indexing_maps = [#read, #sum], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<4x8xf32>) outs(%start : tensor<4xf32>) {
  ^bb0(%in: f32, %o: f32):
    %a = arith.addf %o, %in : f32
    linalg.yield %a : f32
  } -> tensor<4xf32>
  %1 = tensor.expand_shape %s [[0, 1]] output_shape [4, 1] : tensor<4xf32> into tensor<4x1xf32>
  %e1 = tensor.empty() : tensor<4xf32>
  %z1 = linalg.fill ins(%zero : f32) outs(%e1 : tensor<4xf32>) -> tensor<4xf32>
  %t = linalg.generic {indexing_maps = [#read, #sum], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<4x8xf32>) outs(%z1 : tensor<4xf32>) {
  ^bb0(%in: f32, %o: f32):
    %a = arith.addf %o, %in : f32
    linalg.yield %a : f32
  } -> tensor<4xf32>
  %2 = tensor.expand_shape %t [[0, 1]] output_shape [4, 1] : tensor<4xf32> into tensor<4x1xf32>
  %u = linalg.generic {indexing_maps = [#read, #sum], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<4x8xf32>) outs(%z1 : tensor<4xf32>) {
  ^bb0(%in: f32, %o: f32):
    %a = arith.maximumf %o, %in : f32
    linalg.yield %a : f32
  } -> tensor<4xf32>
  %3 = tensor.expand_shape %u [[0, 1]] output_shape [2, 2] : tensor<4xf32> into tensor<2x2xf32>
  return %0, %1, %2, %t, %3 : tensor<4x1x2xf32>, tensor<4x1xf32>, tensor<4x1xf32>, tensor<4xf32>, tensor<2x2xf32>
}

// -----

// A sum of all elements has dims of size 1 only.

// CHECK-DAG:   #[[READ:.*]] = affine_map<(d0, d1, d2, d3) -> (d2, d3)>
// CHECK-DAG:   #[[SUM:.*]] = affine_map<(d0, d1, d2, d3) -> (d0, d1)>
// CHECK-LABEL: func @keeps_the_dims_of_a_scalar
// CHECK:         linalg.generic {indexing_maps = [#[[READ]], #[[SUM]]]
// CHECK-SAME:      iterator_types = ["parallel", "parallel", "reduction", "reduction"]}
// CHECK-NOT:     tensor.expand_shape
#read = affine_map<(d0, d1) -> (d0, d1)>
#sum = affine_map<(d0, d1) -> ()>
func.func @keeps_the_dims_of_a_scalar(%x: tensor<4x8xf32>) -> tensor<1x1xf32> {
  %zero = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<f32>
  %zeros = linalg.fill ins(%zero : f32) outs(%e : tensor<f32>) -> tensor<f32>
  %s = linalg.generic {indexing_maps = [#read, #sum], iterator_types = ["reduction", "reduction"]}
      ins(%x : tensor<4x8xf32>) outs(%zeros : tensor<f32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.addf %o, %in : f32
    linalg.yield %0 : f32
  } -> tensor<f32>
  %k = tensor.expand_shape %s [] output_shape [1, 1] : tensor<f32> into tensor<1x1xf32>
  return %k : tensor<1x1xf32>
}

// -----

// A check stays where it is, in front of what is written behind it.

// CHECK-LABEL: func @keeps_checks
// CHECK:         linalg.generic
// CHECK:           cf.assert
// CHECK:         tensor.expand_shape
#id = affine_map<(d0) -> (d0)>
#read = affine_map<(d0, d1) -> (d0, d1)>
#sum = affine_map<(d0, d1) -> (d0)>
func.func @keeps_checks(%x: tensor<4x8xi64>) -> tensor<4x1xi64> {
  %zero = arith.constant 0 : i64
  %e = tensor.empty() : tensor<4xi64>
  %zeros = linalg.fill ins(%zero : i64) outs(%e : tensor<4xi64>) -> tensor<4xi64>
  %s = linalg.generic {indexing_maps = [#read, #sum], iterator_types = ["parallel", "reduction"]}
      ins(%x : tensor<4x8xi64>) outs(%zeros : tensor<4xi64>) {
  ^bb0(%in: i64, %o: i64):
    %0 = arith.addi %o, %in : i64
    linalg.yield %0 : i64
  } -> tensor<4xi64>
  %c = linalg.generic {indexing_maps = [#id, #id], iterator_types = ["parallel"]}
      ins(%s : tensor<4xi64>) outs(%e : tensor<4xi64>) {
  ^bb0(%in: i64, %o: i64):
    %ok = arith.cmpi sge, %in, %zero : i64
    cf.assert %ok, "expected no negative sum"
    linalg.yield %in : i64
  } -> tensor<4xi64>
  %k = tensor.expand_shape %c [[0, 1]] output_shape [4, 1] : tensor<4xi64> into tensor<4x1xi64>
  return %k : tensor<4x1xi64>
}
