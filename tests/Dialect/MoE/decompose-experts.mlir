// RUN: %moe-opt %s --moe-decompose --canonicalize --cse | FileCheck %s

// What is checked are the points where a paraphrase would differ; the numbers
// are compared elsewhere.

// CHECK-DAG:   #[[X:.*]] = affine_map<(d0, d1, d2) -> (d0, d2)>
// CHECK-DAG:   #[[W:.*]] = affine_map<(d0, d1, d2) -> (d2, d1)>
// CHECK-NOT: moe.

// A slot without a row writes no element, at a legal place.

// CHECK-LABEL: func @token_rows
// CHECK-SAME:    %[[S:[^:]*]]: tensor<?x2xi32>
// CHECK:         %[[ZEROS:.*]] = linalg.fill
// CHECK:         scf.forall (%[[N:.*]], %[[K:.*]]) in (%{{.*}}, 2) shared_outs(%[[ROWS:.*]] = %[[ZEROS]])
// CHECK:           %[[SLOT:.*]] = arith.index_cast
// CHECK:           %[[AT:.*]] = arith.select %[[IS_ROW:.*]], %[[SLOT]], %{{.*}} : index
// CHECK:           %[[COUNT:.*]] = arith.select %[[IS_ROW]], %{{.*}} : index
// CHECK:           %[[TOKEN:.*]] = arith.index_cast %[[N]] : index to i64
// CHECK:           tensor.parallel_insert_slice %{{.*}} into %[[ROWS]][%[[AT]]] [%[[COUNT]]] [1]
func.func @token_rows(%s: tensor<?x2xi32>, %r: tensor<?xi64>) -> tensor<?xi64> {
  %rows = moe.token_rows ins(%s : tensor<?x2xi32>) outs(%r : tensor<?xi64>) -> tensor<?xi64>
  return %rows : tensor<?xi64>
}

// One product an expert on its rows, which begins with the bias; a transposed
// weight is read where it lies.

// CHECK-LABEL: func @a_product_an_expert
// CHECK-SAME:    %{{[^:]*}}: tensor<?x16xbf16>, %[[WEIGHT:[^:]*]]: tensor<8x16x4xbf16>
// CHECK:         scf.forall (%[[E:.*]]) in (8)
// CHECK:           %[[BEGIN:.*]] = arith.minsi
// CHECK:           %[[END:.*]] = arith.minsi
// CHECK:           %[[SIZE:.*]] = arith.subi %[[END]], %[[BEGIN]] : index
// CHECK-DAG:       tensor.extract_slice %{{.*}}[%[[BEGIN]], 0] [%[[SIZE]], 16] [1, 1] : tensor<?x16xbf16>
// CHECK-DAG:       tensor.extract_slice %[[WEIGHT]][%[[E]], 0, 0] [1, 16, 4] [1, 1, 1] : tensor<8x16x4xbf16> to tensor<16x4xbf16>
// CHECK:           %[[BIAS:.*]] = linalg.generic {{.*}} outs(%{{.*}} : tensor<?x4xf32>)
// CHECK:           linalg.generic {indexing_maps = [#[[X]], #[[W]], {{.*}}iterator_types = ["parallel", "parallel", "reduction"]{{.*}} outs(%[[BIAS]] : tensor<?x4xf32>)
// CHECK:         arith.truncf
func.func @a_product_an_expert(
    %x: tensor<?x16xbf16>, %w: tensor<8x16x4xbf16>, %o: tensor<9xi32>, %rows: tensor<?xi64>,
    %b: tensor<8x4xbf16>, %y: tensor<?x4xbf16>) -> tensor<?x4xbf16> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x16xbf16>, tensor<8x16x4xbf16>, tensor<9xi32>)
      rows(%rows : tensor<?xi64>) bias(%b : tensor<8x4xbf16>)
      outs(%y : tensor<?x4xbf16>) {transposed} -> tensor<?x4xbf16>
  return %r : tensor<?x4xbf16>
}

// A row without a token is read nowhere.

// CHECK-LABEL: func @rows_are_gathered
// CHECK-SAME:    %[[X:[^:]*]]: tensor<?x16xf32>
// CHECK:         scf.if
// CHECK-NEXT:      tensor.extract %[[X]]
func.func @rows_are_gathered(%x: tensor<?x16xf32>, %w: tensor<8x4x16xf32>, %o: tensor<9xi32>,
                             %rows: tensor<?xi64>, %y: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %r = moe.grouped_linear ins(%x, %w, %o : tensor<?x16xf32>, tensor<8x4x16xf32>, tensor<9xi32>)
      rows(%rows : tensor<?xi64>) outs(%y : tensor<?x4xf32>) -> tensor<?x4xf32>
  return %r : tensor<?x4xf32>
}

// Features of interleaved gates are every second one.

// CHECK-LABEL: func @gates
// CHECK-DAG:     tensor.extract_slice %[[Z:.*]][0, 0] [%{{.*}}, 2] [1, 2] : tensor<?x4xf32> to tensor<?x2xf32>
// CHECK-DAG:     tensor.extract_slice %[[Z]][0, 1] [%{{.*}}, 2] [1, 2] : tensor<?x4xf32> to tensor<?x2xf32>
// CHECK-DAG:     tensor.extract_slice %[[V:.*]][0, 0] [%{{.*}}, 2] [1, 1] : tensor<?x4xf32> to tensor<?x2xf32>
// CHECK-DAG:     tensor.extract_slice %[[V]][0, 2] [%{{.*}}, 2] [1, 1] : tensor<?x4xf32> to tensor<?x2xf32>
func.func @gates(%x: tensor<?x16xf32>, %w: tensor<8x4x16xf32>, %v: tensor<8x4x16xf32>,
                 %o: tensor<9xi32>, %y: tensor<?x2xf32>) -> (tensor<?x2xf32>, tensor<?x2xf32>) {
  %a = moe.grouped_linear ins(%x, %w, %o : tensor<?x16xf32>, tensor<8x4x16xf32>, tensor<9xi32>)
      outs(%y : tensor<?x2xf32>)
      {activation = #moe.activation<silu>, gate = #moe.gate<interleaved>} -> tensor<?x2xf32>
  %b = moe.grouped_linear ins(%x, %v, %o : tensor<?x16xf32>, tensor<8x4x16xf32>, tensor<9xi32>)
      outs(%y : tensor<?x2xf32>)
      {activation = #moe.activation<silu>, gate = #moe.gate<concatenated>} -> tensor<?x2xf32>
  return %a, %b : tensor<?x2xf32>, tensor<?x2xf32>
}

// The gradient of a 16-bit weight is summed in f32, one expert at a time.

// CHECK-LABEL: func @grouped_outer
// CHECK:         scf.forall (%[[E:.*]]) in (8)
// CHECK:           %[[SUM:.*]] = linalg.generic {{.*}} outs(%{{.*}} : tensor<4x16xf32>)
// CHECK:           %[[ROUNDED:.*]] = linalg.generic {{.*}} ins(%[[SUM]] : tensor<4x16xf32>)
// CHECK:           tensor.parallel_insert_slice %[[ROUNDED]] into %{{.*}}[%[[E]], 0, 0] [1, 4, 16] [1, 1, 1]
func.func @grouped_outer(%dy: tensor<?x4xbf16>, %x: tensor<?x16xbf16>, %o: tensor<9xi32>,
                         %dw: tensor<8x4x16xbf16>) -> tensor<8x4x16xbf16> {
  %r = moe.grouped_outer ins(%dy, %x, %o : tensor<?x4xbf16>, tensor<?x16xbf16>, tensor<9xi32>)
      outs(%dw : tensor<8x4x16xbf16>) -> tensor<8x4x16xbf16>
  return %r : tensor<8x4x16xbf16>
}
