// RUN: %moe-opt %s --convert-moe-to-cpu --split-input-file | FileCheck %s

// Parts of experts in parallel. A block of 128 rows of sums of a group of panels
// begins with the bias; its rows are gathered, gate and factor are halves of a
// panel, and y is written once, rounded.

// CHECK-LABEL: func @swiglu
// CHECK:         scf.forall
// CHECK-DAG:       memref.alloca() {alignment = 64 : i64} : memref<128x128xf32>
// CHECK-DAG:       memref.alloca() {alignment = 64 : i64} : memref<2x64x64xf32>
// CHECK:           vector.load {{.*}} : memref<8x128xbf16>
// CHECK:           vector.store {{.*}} : memref<128x128xf32>
// CHECK:           scf.index_switch
// CHECK:           memref.load {{.*}} : memref<?xi64>
// CHECK:           math.fma
// CHECK:           math.exp
// CHECK:           arith.truncf {{.*}} : vector<16xf32> to vector<16xbf16>
// CHECK-NEXT:      vector.store {{.*}} : memref<?x64xbf16>
// CHECK-NOT:     moe.
func.func @swiglu(%x: memref<?x64xbf16>, %w: memref<8x128x64xbf16>, %offsets: memref<9xi32>,
                  %rows: memref<?xi64>, %bias: memref<8x128xbf16>, %y: memref<?x64xbf16>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x64xbf16>, memref<8x128x64xbf16>, memref<9xi32>)
      rows(%rows : memref<?xi64>) bias(%bias : memref<8x128xbf16>)
      outs(%y : memref<?x64xbf16>)
      {activation = #moe.activation<silu>, gate = #moe.gate<concatenated>}
  return
}

// -----

// Without anything behind the sums they are formed in y. Panels are read where
// they lie.

// CHECK-LABEL: func @packed
// CHECK:         scf.forall
// CHECK-NOT:       memref.alloca
// CHECK:           vector.load {{.*}} : memref<8x2x100x64xf32>, vector<16xf32>
// CHECK:           math.fma
// CHECK:           vector.store {{.*}} : memref<?x128xf32>
// CHECK-NOT:     moe.
func.func @packed(%x: memref<?x100xf32>, %w: memref<8x2x100x64xf32>, %offsets: memref<9xi64>,
                  %y: memref<?x128xf32>) {
  moe.grouped_linear ins(%x, %w, %offsets
      : memref<?x100xf32>, memref<8x2x100x64xf32>, memref<9xi64>)
      outs(%y : memref<?x128xf32>) {packed = 64 : i64}
  return
}

// -----

// The gradient of a weight: rows of dy are read along the features.

// CHECK-LABEL: func @outer
// CHECK:         scf.forall
// CHECK:           memref.load {{.*}} : memref<?x48xf32>
// CHECK:           math.fma
// CHECK:           vector.store {{.*}} : memref<8x48x64xf32>
// CHECK-NOT:     moe.
func.func @outer(%dy: memref<?x48xf32>, %x: memref<?x64xf32>, %offsets: memref<9xi32>,
                 %dw: memref<8x48x64xf32>) {
  moe.grouped_outer ins(%dy, %x, %offsets
      : memref<?x48xf32>, memref<?x64xf32>, memref<9xi32>)
      outs(%dw : memref<8x48x64xf32>)
  return
}
