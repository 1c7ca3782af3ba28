// RUN: %moe-opt %s --moe-join-rows --canonicalize --cse --split-input-file | FileCheck %s
// RUN: %moe-opt %s --moe-join-rows --moe-join-rows --canonicalize --cse --split-input-file | FileCheck %s

// All rows meet the same weight: the kernel sees them as those of one matrix.

#x = affine_map<(b, t, n, k) -> (b, t, k)>
#w = affine_map<(b, t, n, k) -> (n, k)>
#y = affine_map<(b, t, n, k) -> (b, t, n)>

// CHECK-LABEL: func @joins_batch_and_tokens
// CHECK-SAME:    %[[X:[^:]*]]: tensor<?x?x64xbf16>, %[[W:[^:]*]]: tensor<512x64xbf16>, %[[B:[^:]*]]: index, %[[T:[^:]*]]: index
// CHECK-DAG:     %[[ROWS:.*]] = tensor.collapse_shape %[[X]] {{\[}}[0, 1], [2]]
// CHECK-DAG:     %[[ZEROS:.*]] = linalg.fill ins(%{{.*}}) outs(%{{.*}} : tensor<?x512xf32>)
// CHECK:         %[[Y:.*]] = linalg.generic {{.*}} iterator_types = ["parallel", "parallel", "reduction"]
// CHECK-SAME:      ins(%[[ROWS]], %[[W]] : tensor<?x64xbf16>, tensor<512x64xbf16>) outs(%[[ZEROS]] : tensor<?x512xf32>)
// CHECK-SAME:      moe.kernel_config = #moe.kernel_config<loop = kernel>
// CHECK:         %[[BACK:.*]] = tensor.expand_shape %[[Y]] {{\[}}[0, 1], [2]]
// CHECK:         return %[[BACK]]
func.func @joins_batch_and_tokens(%x: tensor<?x?x64xbf16>,
    %w: tensor<512x64xbf16>, %b: index, %t: index) -> tensor<?x?x512xf32> {
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty(%b, %t) : tensor<?x?x512xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x?x512xf32>)
      -> tensor<?x?x512xf32>
  %y = linalg.generic
      {indexing_maps = [#x, #w, #y],
       iterator_types = ["parallel", "parallel", "parallel", "reduction"],
       moe.kernel_config = #moe.kernel_config<loop = kernel>}
      ins(%x, %w : tensor<?x?x64xbf16>, tensor<512x64xbf16>)
      outs(%zeros : tensor<?x?x512xf32>) {
  ^bb0(%in: bf16, %weight: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    %1 = arith.extf %weight : bf16 to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %out, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<?x?x512xf32>
  return %y : tensor<?x?x512xf32>
}

// -----

// Without a kernel of all rows, loops over them stay: what is fused with them
// has the same rows.

#x = affine_map<(b, t, n, k) -> (b, t, k)>
#w = affine_map<(b, t, n, k) -> (n, k)>
#y = affine_map<(b, t, n, k) -> (b, t, n)>

// CHECK-LABEL: func @keeps_rows_that_are_tiled
// CHECK-NOT:     tensor.collapse_shape
// CHECK:         iterator_types = ["parallel", "parallel", "parallel", "reduction"]
func.func @keeps_rows_that_are_tiled(%x: tensor<2x?x64xf32>,
    %w: tensor<8x64xf32>, %y: tensor<2x?x8xf32>) -> tensor<2x?x8xf32> {
  %r = linalg.generic
      {indexing_maps = [#x, #w, #y],
       iterator_types = ["parallel", "parallel", "parallel", "reduction"]}
      ins(%x, %w : tensor<2x?x64xf32>, tensor<8x64xf32>)
      outs(%y : tensor<2x?x8xf32>) {
  ^bb0(%in: f32, %weight: f32, %out: f32):
    %0 = arith.mulf %in, %weight : f32
    %1 = arith.addf %out, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<2x?x8xf32>
  return %r : tensor<2x?x8xf32>
}

// -----

// Rows that lie otherwise in the input are no rows of one matrix.

#x = affine_map<(b, t, n, k) -> (t, b, k)>
#w = affine_map<(b, t, n, k) -> (n, k)>
#y = affine_map<(b, t, n, k) -> (b, t, n)>

// CHECK-LABEL: func @keeps_rows_that_are_transposed
// CHECK-NOT:     tensor.collapse_shape
// CHECK:         iterator_types = ["parallel", "parallel", "parallel", "reduction"]
func.func @keeps_rows_that_are_transposed(%x: tensor<?x2x64xf32>,
    %w: tensor<512x64xf32>, %y: tensor<2x?x512xf32>) -> tensor<2x?x512xf32> {
  %r = linalg.generic
      {indexing_maps = [#x, #w, #y],
       iterator_types = ["parallel", "parallel", "parallel", "reduction"],
       moe.kernel_config = #moe.kernel_config<loop = kernel>}
      ins(%x, %w : tensor<?x2x64xf32>, tensor<512x64xf32>)
      outs(%y : tensor<2x?x512xf32>) {
  ^bb0(%in: f32, %weight: f32, %out: f32):
    %0 = arith.mulf %in, %weight : f32
    %1 = arith.addf %out, %0 : f32
    linalg.yield %1 : f32
  } -> tensor<2x?x512xf32>
  return %r : tensor<2x?x512xf32>
}

// -----

// An input that is read at one place of a dim stays as it is.

#x = affine_map<(b, t, n, k) -> (b, t, 0, k)>
#w = affine_map<(b, t, n, k) -> (n, k)>
#y = affine_map<(b, t, n, k) -> (b, t, n)>

// CHECK-LABEL: func @keeps_rows_at_one_place_of_a_dim
// CHECK-NOT:     tensor.collapse_shape
// CHECK:         iterator_types = ["parallel", "parallel", "parallel", "reduction"]
func.func @keeps_rows_at_one_place_of_a_dim(%x: tensor<2x?x1x64xbf16>,
    %w: tensor<512x64xbf16>, %y: tensor<2x?x512xf32>) -> tensor<2x?x512xf32> {
  %r = linalg.generic
      {indexing_maps = [#x, #w, #y],
       iterator_types = ["parallel", "parallel", "parallel", "reduction"],
       moe.kernel_config = #moe.kernel_config<loop = kernel>}
      ins(%x, %w : tensor<2x?x1x64xbf16>, tensor<512x64xbf16>)
      outs(%y : tensor<2x?x512xf32>) {
  ^bb0(%in: bf16, %weight: bf16, %out: f32):
    %0 = arith.extf %in : bf16 to f32
    %1 = arith.extf %weight : bf16 to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %out, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<2x?x512xf32>
  return %r : tensor<2x?x512xf32>
}
