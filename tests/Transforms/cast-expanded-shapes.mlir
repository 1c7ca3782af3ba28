// RUN: %moe-opt %s --moe-cast-expanded-shapes | FileCheck %s
// RUN: %moe-opt %s --moe-cast-expanded-shapes --expand-strided-metadata | FileCheck %s --check-prefix=LOWERED

// CHECK-LABEL: func @two_dynamic_sizes_of_a_group
// CHECK-SAME:      %[[A:.*]]: memref<?x64xf32>, %[[B:.*]]: index, %[[N:.*]]: index
// CHECK:         %[[STRIDE:.*]] = affine.apply {{.*}}%[[N]]
// CHECK:         memref.reinterpret_cast %[[A]] to offset: [0], sizes: [%[[B]], %[[N]], 4, 16], strides: [%[[STRIDE]], 64, 16, 1] : memref<?x64xf32> to memref<?x?x4x16xf32>
// LOWERED-LABEL: func @two_dynamic_sizes_of_a_group
// LOWERED-NOT:     memref.expand_shape
func.func @two_dynamic_sizes_of_a_group(%a: memref<?x64xf32>, %b: index, %n: index)
    -> memref<?x?x4x16xf32> {
  %0 = memref.expand_shape %a [[0, 1], [2, 3]] output_shape [%b, %n, 4, 16]
      : memref<?x64xf32> into memref<?x?x4x16xf32>
  return %0 : memref<?x?x4x16xf32>
}

// CHECK-LABEL: func @keeps_one_dynamic_size_of_each_group
// CHECK-NOT:     memref.reinterpret_cast
// CHECK:         memref.expand_shape
func.func @keeps_one_dynamic_size_of_each_group(%a: memref<?x?xf32>, %b: index, %n: index)
    -> memref<?x4x?x16xf32> {
  %0 = memref.expand_shape %a [[0, 1], [2, 3]] output_shape [%b, 4, %n, 16]
      : memref<?x?xf32> into memref<?x4x?x16xf32>
  return %0 : memref<?x4x?x16xf32>
}
