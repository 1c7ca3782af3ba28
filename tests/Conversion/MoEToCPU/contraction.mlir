// RUN: %moe-opt %s --convert-moe-to-cpu --split-input-file | FileCheck %s

// Columns side by side: a panel of a chain of ks by four vectors, which few
// rows are multiplied with, one tile of 1 to 6, or many, tiles of 3 to 6; then
// the vector of the columns behind the last whole panel, masked.

// CHECK-LABEL: func @multiplies_by_rows_of_b
// CHECK:         scf.forall
// CHECK:           memref.alloca() {alignment = 64 : i64} : memref<1x32x64xf32>
// CHECK:           scf.if
// CHECK-COUNT-4:     vector.store {{.*}} : memref<1x32x64xf32>, vector<16xf32>
// CHECK:             scf.index_switch
// CHECK:             case 3
// CHECK:               math.fma
// CHECK:             default
// CHECK:               scf.for {{.*}} -> ({{(vector<16xf32>(, )?)+}})
// CHECK-COUNT-4:         vector.load %{{.*}} : memref<1x32x64xf32>, vector<16xf32>
// CHECK-COUNT-24:        math.fma
// CHECK:           else
// CHECK:             case 1
// CHECK:           vector.maskedload {{.*}} : memref<32x70xf32>
// CHECK:           vector.maskedstore {{.*}} : memref<?x70xf32>
// CHECK-NOT:     linalg.
func.func @multiplies_by_rows_of_b(%a: memref<?x32xf32>, %b: memref<32x70xf32>, %c: memref<?x70xf32>) {
  linalg.matmul ins(%a, %b : memref<?x32xf32>, memref<32x70xf32>) outs(%c : memref<?x70xf32>)
  return
}

// -----

// ks side by side, as in a linear layer: blocks of columns by ks are
// transposed in registers. bf16 ks are transposed in pairs and then taken
// apart. Of few rows the first is multiplied straight from registers.

// CHECK-LABEL: func @multiplies_by_columns_of_b
// CHECK:         scf.if
// CHECK-COUNT-16:  vector.load {{.*}} : memref<8x32xbf16>, vector<32xbf16>
// CHECK:           vector.shuffle
// CHECK:           arith.shli
// CHECK:           arith.andi
// CHECK:           scf.index_switch
// CHECK:         else
// CHECK-COUNT-16:  vector.load {{.*}} : memref<8x32xbf16>, vector<32xbf16>
// CHECK-COUNT-32:  math.fma
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

// Steps behind the last whole vector are masked, 16 whole and 4 masked.

// CHECK-LABEL: func @turns_a_small_b
// CHECK-COUNT-16: vector.load %{{.*}} : memref<64x20xf32>, vector<16xf32>
// CHECK-COUNT-16: vector.store {{.*}} : memref<1x32x64xf32>, vector<16xf32>
// CHECK-COUNT-16: vector.maskedload {{.*}} : memref<64x20xf32>
// CHECK-COUNT-4:  vector.store {{.*}} : memref<1x32x64xf32>, vector<16xf32>
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
