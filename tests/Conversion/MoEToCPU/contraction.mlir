// RUN: %moe-opt %s --convert-moe-to-cpu --split-input-file | FileCheck %s

// Columns side by side: 6 rows x 4 vectors, one step of k at a time.

// CHECK-LABEL: func @multiplies_by_rows_of_b
// CHECK:         scf.for {{.*}} -> ({{(vector<16xf32>(, )?)+}})
// CHECK-COUNT-4: vector.load %{{.*}} : memref<32x70xf32>, vector<16xf32>
// CHECK-COUNT-24: math.fma
// CHECK:         vector.maskedload
// CHECK-NOT:     linalg.
func.func @multiplies_by_rows_of_b(%a: memref<?x32xf32>, %b: memref<32x70xf32>, %c: memref<?x70xf32>) {
  linalg.matmul ins(%a, %b : memref<?x32xf32>, memref<32x70xf32>) outs(%c : memref<?x70xf32>)
  return
}

// -----

// Both rows along k, as in a linear layer: 6 x 4 dot products, 16-bit inputs
// extended, lanes added at the end.

// CHECK-LABEL: func @multiplies_by_columns_of_b
// CHECK-COUNT-10: arith.extf %{{.*}} : vector<16xbf16> to vector<16xf32>
// CHECK-COUNT-24: math.fma
// CHECK:         vector.shuffle
// CHECK-NOT:     linalg.
func.func @multiplies_by_columns_of_b(%a: memref<?x32xbf16>, %b: memref<8x32xbf16>, %c: memref<?x8xf32>) {
  linalg.generic {
      indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>,
                       affine_map<(m, n, k) -> (m, n)>],
      iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a, %b : memref<?x32xbf16>, memref<8x32xbf16>) outs(%c : memref<?x8xf32>) {
  ^bb0(%x: bf16, %y: bf16, %sum: f32):
    %xw = arith.extf %x : bf16 to f32
    %yw = arith.extf %y : bf16 to f32
    %p = arith.mulf %xw, %yw : f32
    %s = arith.addf %sum, %p : f32
    linalg.yield %s : f32
  }
  return
}

// -----

// With few steps of k and columns for a whole tile, a copy of b is transposed first:
// 16 steps whole, 4 masked.

// CHECK-LABEL: func @turns_a_small_b
// CHECK:         %[[TURNED:.*]] = memref.alloca() {alignment = 64 : i64} : memref<20x64xf32>
// CHECK-COUNT-16: vector.load %{{.*}} : memref<64x20xf32>, vector<16xf32>
// CHECK-COUNT-16: vector.store %{{.*}}, %[[TURNED]]
// CHECK-COUNT-16: vector.maskedload
// CHECK-COUNT-4: vector.store %{{.*}}, %[[TURNED]]
// CHECK-COUNT-4: vector.load %[[TURNED]]
// CHECK-COUNT-24: math.fma
// CHECK-NOT:     linalg.
func.func @turns_a_small_b(%a: memref<?x20xf32>, %b: memref<64x20xf32>, %c: memref<?x64xf32>) {
  linalg.generic {
      indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>,
                       affine_map<(m, n, k) -> (m, n)>],
      iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a, %b : memref<?x20xf32>, memref<64x20xf32>) outs(%c : memref<?x64xf32>) {
  ^bb0(%x: f32, %y: f32, %sum: f32):
    %p = arith.mulf %x, %y : f32
    %s = arith.addf %sum, %p : f32
    linalg.yield %s : f32
  }
  return
}

// -----

// CHECK-LABEL: func @loops_over_batches
// CHECK:         scf.for
// CHECK:           memref.subview
// CHECK:           math.fma
// CHECK-NOT:     linalg.
func.func @loops_over_batches(%a: memref<3x8x32xf32>, %b: memref<3x32x16xf32>, %c: memref<3x8x16xf32>) {
  linalg.batch_matmul ins(%a, %b : memref<3x8x32xf32>, memref<3x32x16xf32>) outs(%c : memref<3x8x16xf32>)
  return
}

// -----

// Something that is not a sum of products is left to linalg's own lowering:
// the sigmoid of each product would be lost.

// CHECK-LABEL: func @leaves_other_bodies
// CHECK:         linalg.generic
func.func @leaves_other_bodies(%a: memref<4x32xf32>, %b: memref<32x16xf32>, %c: memref<4x16xf32>) {
  linalg.generic {
      indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (k, n)>,
                       affine_map<(m, n, k) -> (m, n)>],
      iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a, %b : memref<4x32xf32>, memref<32x16xf32>) outs(%c : memref<4x16xf32>) {
  ^bb0(%x: f32, %y: f32, %sum: f32):
    %p = arith.mulf %x, %y : f32
    %t = math.tanh %p : f32
    %s = arith.addf %sum, %t : f32
    linalg.yield %s : f32
  }
  return
}
