// RUN: %moe-opt %s --moe-to-cpu --mlir-print-ir-after=convert-bufferization-to-memref -o %t 2>&1 | FileCheck %s

// Two layers of a model write a row each into their caches: the caches are the
// arguments themselves, in the layers, too, and nothing of them is copied.

// CHECK-LABEL: func.func private @layer
// CHECK-SAME:    (%[[CACHE:.*]]: memref<8x64xf32>, %[[ROW:.*]]: memref<1x64xf32>, %[[AT:.*]]: index) attributes
// CHECK-NOT:     memref.alloc
// CHECK:         %[[PLACE:.*]] = memref.subview %[[CACHE]][%{{.*}}, 0] [1, 64] [1, 1]
// CHECK:         memref.copy %[[ROW]], %[[PLACE]]
// CHECK-NOT:     memref.copy
func.func private @layer(%cache: tensor<8x64xf32>, %row: tensor<1x64xf32>, %at: index)
    -> tensor<8x64xf32> attributes {passthrough = ["noinline"]} {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %size = arith.constant 8 : index
  %new = scf.for %i = %zero to %one step %one iter_args(%old = %cache) -> (tensor<8x64xf32>) {
    %place = arith.addi %at, %i : index
    %inside = arith.cmpi ult, %place, %size : index
    %kept = scf.if %inside -> (tensor<8x64xf32>) {
      %written = tensor.insert_slice %row into %old[%place, 0] [1, 64] [1, 1]
          : tensor<1x64xf32> into tensor<8x64xf32>
      scf.yield %written : tensor<8x64xf32>
    } else {
      scf.yield %old : tensor<8x64xf32>
    }
    scf.yield %kept : tensor<8x64xf32>
  }
  return %new : tensor<8x64xf32>
}

// CHECK-LABEL: func.func @main
// CHECK-SAME:    (%[[A:.*]]: memref<8x64xf32>, %[[B:.*]]: memref<8x64xf32>, %[[ROW:.*]]: memref<1x64xf32>, %[[AT:.*]]: index, %[[OUT:.*]]: memref<64xf32>)
// CHECK-NOT:     memref.alloc
// CHECK-NOT:     memref.copy
// CHECK:         call @layer(%[[A]], %[[ROW]], %[[AT]])
// CHECK:         call @layer(%[[B]], %[[ROW]], %[[AT]])
// CHECK-NOT:     memref.copy
// CHECK:         return
func.func @main(%a: tensor<8x64xf32>, %b: tensor<8x64xf32>, %row: tensor<1x64xf32>, %at: index)
    -> (tensor<8x64xf32> {moe.updates = 0 : i64}, tensor<8x64xf32> {moe.updates = 1 : i64},
        tensor<64xf32>) {
  %first = func.call @layer(%a, %row, %at)
      : (tensor<8x64xf32>, tensor<1x64xf32>, index) -> tensor<8x64xf32>
  %second = func.call @layer(%b, %row, %at)
      : (tensor<8x64xf32>, tensor<1x64xf32>, index) -> tensor<8x64xf32>
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<64xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<64xf32>) -> tensor<64xf32>
  %sums = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>,
                                           affine_map<(d0, d1) -> (d1, d0)>,
                                           affine_map<(d0, d1) -> (d0)>],
                          iterator_types = ["parallel", "reduction"]}
      ins(%first, %second : tensor<8x64xf32>, tensor<8x64xf32>) outs(%zeros : tensor<64xf32>) {
  ^bb0(%x: f32, %y: f32, %total: f32):
    %product = arith.mulf %x, %y : f32
    %sum = arith.addf %total, %product : f32
    linalg.yield %sum : f32
  } -> tensor<64xf32>
  return %first, %second, %sums : tensor<8x64xf32>, tensor<8x64xf32>, tensor<64xf32>
}
