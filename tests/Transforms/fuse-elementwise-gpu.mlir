// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_90 --moe-fuse-elementwise --split-input-file | FileCheck %s
// RUN: %moe-opt %s --moe-attach-nvvm-target=chip=sm_90 --moe-fuse-elementwise --moe-fuse-elementwise --split-input-file | FileCheck %s

// Between ops lie launches: a cast is computed for each of its readers, and an
// input may be read in any order.

// CHECK-LABEL: func @cast_of_two_readers
// CHECK:         linalg.generic {{.*}} ins(%arg0 : tensor<4x?xbf16>)
// CHECK-NEXT:    ^bb0
// CHECK-NEXT:      arith.extf
// CHECK-NEXT:      arith.mulf
// CHECK:         linalg.generic {{.*}} ins(%arg0 : tensor<4x?xbf16>)
// CHECK-NEXT:    ^bb0
// CHECK-NEXT:      arith.extf
// CHECK-NEXT:      math.exp
// CHECK-NOT:     linalg.generic
func.func @cast_of_two_readers(%x: tensor<4x?xbf16>, %out: tensor<?x4xf32>)
    -> (tensor<?x4xf32>, tensor<?x4xf32>) {
  %c1 = arith.constant 1 : index
  %n = tensor.dim %x, %c1 : tensor<4x?xbf16>
  %e = tensor.empty(%n) : tensor<4x?xf32>
  %wide = linalg.generic {
      indexing_maps = [affine_map<(a, b) -> (a, b)>, affine_map<(a, b) -> (a, b)>],
      iterator_types = ["parallel", "parallel"]}
      ins(%x : tensor<4x?xbf16>) outs(%e : tensor<4x?xf32>) {
  ^bb0(%in: bf16, %o: f32):
    %0 = arith.extf %in : bf16 to f32
    linalg.yield %0 : f32
  } -> tensor<4x?xf32>
  %y = linalg.generic {
      indexing_maps = [affine_map<(a, b) -> (b, a)>, affine_map<(a, b) -> (a, b)>],
      iterator_types = ["parallel", "parallel"]}
      ins(%wide : tensor<4x?xf32>) outs(%out : tensor<?x4xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.mulf %in, %in : f32
    linalg.yield %0 : f32
  } -> tensor<?x4xf32>
  %z = linalg.generic {
      indexing_maps = [affine_map<(a, b) -> (b, a)>, affine_map<(a, b) -> (a, b)>],
      iterator_types = ["parallel", "parallel"]}
      ins(%wide : tensor<4x?xf32>) outs(%out : tensor<?x4xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = math.exp %in : f32
    linalg.yield %0 : f32
  } -> tensor<?x4xf32>
  return %y, %z : tensor<?x4xf32>, tensor<?x4xf32>
}

// -----

// What costs more than to read it is computed once.

// CHECK-LABEL: func @exponential_of_two_readers
// CHECK-COUNT-1: math.exp
// CHECK-NOT:     math.exp
func.func @exponential_of_two_readers(%x: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>) {
  %e = tensor.empty() : tensor<8xf32>
  %a = linalg.generic {
      indexing_maps = [affine_map<(a) -> (a)>, affine_map<(a) -> (a)>], iterator_types = ["parallel"]}
      ins(%x : tensor<8xf32>) outs(%e : tensor<8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = math.exp %in : f32
    linalg.yield %0 : f32
  } -> tensor<8xf32>
  %y = linalg.generic {
      indexing_maps = [affine_map<(a) -> (a)>, affine_map<(a) -> (a)>], iterator_types = ["parallel"]}
      ins(%a : tensor<8xf32>) outs(%e : tensor<8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = arith.negf %in : f32
    linalg.yield %0 : f32
  } -> tensor<8xf32>
  %z = linalg.generic {
      indexing_maps = [affine_map<(a) -> (a)>, affine_map<(a) -> (a)>], iterator_types = ["parallel"]}
      ins(%a : tensor<8xf32>) outs(%e : tensor<8xf32>) {
  ^bb0(%in: f32, %o: f32):
    %0 = math.sqrt %in : f32
    linalg.yield %0 : f32
  } -> tensor<8xf32>
  return %y, %z : tensor<8xf32>, tensor<8xf32>
}
