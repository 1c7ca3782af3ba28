// RUN: %moe-opt %s --moe-decompose --canonicalize --cse | FileCheck %s

// What is checked are the points where a paraphrase would differ; the numbers
// are compared with the reference elsewhere.

// CHECK-NOT: moe.

// Strictly above; without any, the first of the largest.

// CHECK-LABEL: func @threshold_renorm_e20
// CHECK-SAME:    %[[P:[^:]*]]: tensor<?x8xf32>
// CHECK:         %[[SELECTED:.*]] = linalg.generic {{.*}} ins(%[[P]], %{{.*}}, %{{.*}} : tensor<?x8xf32>, tensor<?xi1>, tensor<?xindex>) outs(%{{.*}} : tensor<?x8xi1>)
// CHECK-NEXT:    ^bb0(%[[X:.*]]: f32, %[[ANY:.*]]: i1, %[[BEST:.*]]: index, %{{.*}}: i1):
// CHECK-DAG:       %[[ABOVE:.*]] = arith.cmpf olt, %[[THETA:.*]], %[[X]]
// CHECK-DAG:       %[[E:.*]] = linalg.index 1
// CHECK-DAG:       %[[IS_BEST:.*]] = arith.cmpi eq, %[[E]], %[[BEST]]
// CHECK:           arith.select %[[ANY]], %[[ABOVE]], %[[IS_BEST]]
func.func @threshold_renorm_e20(%p: tensor<?x8xf32>, %g: tensor<?x8xf32>, %c: tensor<?xi32>)
    -> (tensor<?x8xf32>, tensor<?xi32>) {
  %r:2 = moe.threshold_renorm ins(%p : tensor<?x8xf32>)
      outs(%g, %c : tensor<?x8xf32>, tensor<?xi32>) -> tensor<?x8xf32>, tensor<?xi32>
  return %r#0, %r#1 : tensor<?x8xf32>, tensor<?xi32>
}

// The least finite score of a row is one number a row, that of the tensor one
// number.

// CHECK-LABEL: func @make_finite_scopes
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<?xf32>)
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<f32>)
func.func @make_finite_scopes(%z: tensor<?x8xf32>, %a: tensor<?x8xf32>, %b: tensor<?x8xf32>)
    -> (tensor<?x8xf32>, tensor<?x8xf32>) {
  %0 = moe.make_finite ins(%z : tensor<?x8xf32>) outs(%a : tensor<?x8xf32>) -> tensor<?x8xf32>
  %1 = moe.make_finite ins(%z : tensor<?x8xf32>) outs(%b : tensor<?x8xf32>)
      {scope = #moe.finite_scope<tensor>} -> tensor<?x8xf32>
  return %0, %1 : tensor<?x8xf32>, tensor<?x8xf32>
}

// The rank inside an expert counts the assignments that come before: earlier
// choices, and among equal choices earlier tokens. No sort, no scatter.

// CHECK-LABEL: func @dispatch_ranks_by_counting
// CHECK-SAME:    %[[I:[^:]*]]: tensor<?x2xi32>
// CHECK:         %[[EXPERTS:.*]] = linalg.generic {{.*}} ins(%[[I]] : tensor<?x2xi32>) outs(%{{.*}} : tensor<?x2xi32>)
// CHECK:         linalg.generic {{.*}} iterator_types = ["parallel", "parallel", "reduction", "reduction"]
// CHECK-SAME:      ins(%[[EXPERTS]], %[[EXPERTS]] : tensor<?x2xi32>, tensor<?x2xi32>)
// CHECK-NEXT:    ^bb0(%[[SELF:.*]]: i32, %[[OTHER:.*]]: i32, %{{.*}}: i32):
// CHECK-DAG:       arith.cmpi eq, %[[SELF]], %[[OTHER]]
// CHECK-DAG:       %[[N:.*]] = linalg.index 0
// CHECK-DAG:       %[[K:.*]] = linalg.index 1
// CHECK-DAG:       %[[N2:.*]] = linalg.index 2
// CHECK-DAG:       %[[K2:.*]] = linalg.index 3
// CHECK-DAG:       arith.cmpi slt, %[[K2]], %[[K]]
// CHECK-DAG:       arith.cmpi eq, %[[K2]], %[[K]]
// CHECK-DAG:       arith.cmpi slt, %[[N2]], %[[N]]
func.func @dispatch_ranks_by_counting(%i: tensor<?x2xi32>, %s: tensor<?x2xi32>,
                                      %o: tensor<9xi32>, %c: tensor<8xi32>)
    -> (tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>) {
  %r:3 = moe.dispatch ins(%i : tensor<?x2xi32>)
      outs(%s, %o, %c : tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>)
      -> tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>
  return %r#0, %r#1, %r#2 : tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>
}

// A row is read only where there is one.

// CHECK-LABEL: func @combine_reads_no_row_without_a_slot
// CHECK-SAME:    %[[X:[^:]*]]: tensor<?x8xbf16>
// CHECK:         linalg.generic
// CHECK:           %[[ROW:.*]] = arith.index_cast %{{.*}} : i32 to index
// CHECK:           %[[D:.*]] = linalg.index 1
// CHECK:           scf.if
// CHECK-NEXT:        tensor.extract %[[X]][%[[ROW]], %[[D]]]
func.func @combine_reads_no_row_without_a_slot(
    %x: tensor<?x8xbf16>, %g: tensor<?x2xf32>, %s: tensor<?x2xi32>, %y: tensor<?x8xbf16>)
    -> tensor<?x8xbf16> {
  %r = moe.combine ins(%x, %g, %s : tensor<?x8xbf16>, tensor<?x2xf32>, tensor<?x2xi32>)
      outs(%y : tensor<?x8xbf16>) -> tensor<?x8xbf16>
  return %r : tensor<?x8xbf16>
}

// One matrix of logits, two softmaxes.

// CHECK-LABEL: func @soft_dispatch
// CHECK:         %[[L:.*]] = linalg.generic {{.*}} iterator_types = ["parallel", "parallel", "parallel", "reduction"]
// CHECK-SAME:      outs(%{{.*}} : tensor<?x8x2xf32>)
// CHECK-DAG:     linalg.generic {{.*}} ins(%[[L]] : tensor<?x8x2xf32>) outs(%{{.*}} : tensor<8x2xf32>)
// CHECK-DAG:     linalg.generic {{.*}} ins(%[[L]] : tensor<?x8x2xf32>) outs(%{{.*}} : tensor<?xf32>)
func.func @soft_dispatch(%x: tensor<?x64xf32>, %phi: tensor<64x8x2xf32>,
                         %a: tensor<?x8x2xf32>, %b: tensor<?x8x2xf32>)
    -> (tensor<?x8x2xf32>, tensor<?x8x2xf32>) {
  %r:2 = moe.soft_dispatch ins(%x, %phi : tensor<?x64xf32>, tensor<64x8x2xf32>)
      outs(%a, %b : tensor<?x8x2xf32>, tensor<?x8x2xf32>)
      -> tensor<?x8x2xf32>, tensor<?x8x2xf32>
  return %r#0, %r#1 : tensor<?x8x2xf32>, tensor<?x8x2xf32>
}

// Sums over tokens are f64, counts are integers.

// CHECK-LABEL: func @losses_sum_in_f64
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<8xi32>)
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<8xf64>)
// CHECK:         linalg.generic {{.*}} outs(%{{.*}} : tensor<f64>)
func.func @losses_sum_in_f64(%p: tensor<?x8xf32>, %i: tensor<?x2xi32>, %l: tensor<f32>,
                             %load: tensor<8xi32>) -> (tensor<f32>, tensor<8xi32>) {
  %r:2 = moe.balance_loss ins(%p, %i : tensor<?x8xf32>, tensor<?x2xi32>)
      outs(%l, %load : tensor<f32>, tensor<8xi32>) -> tensor<f32>, tensor<8xi32>
  return %r#0, %r#1 : tensor<f32>, tensor<8xi32>
}

// Numbers are counted in i32, and cast to what the results hold.

// CHECK-LABEL: func @dispatch_to_i64
// CHECK:         %[[COUNTS:.*]] = linalg.generic {{.*}} outs(%{{.*}} : tensor<4xi32>)
// CHECK:         linalg.generic {{.*}} ins(%{{.*}} : tensor<5xi32>) outs(%{{.*}} : tensor<5xi64>)
// CHECK:           arith.extsi %{{.*}} : i32 to i64
// CHECK:         linalg.generic {{.*}} ins(%[[COUNTS]] : tensor<4xi32>) outs(%{{.*}} : tensor<4xi64>)
// CHECK:           arith.extsi %{{.*}} : i32 to i64
func.func @dispatch_to_i64(%i: tensor<?x2xi64>, %s: tensor<?x2xi64>, %o: tensor<5xi64>,
                           %c: tensor<4xi64>) -> (tensor<?x2xi64>, tensor<5xi64>, tensor<4xi64>) {
  %r:3 = moe.dispatch ins(%i : tensor<?x2xi64>) outs(%s, %o, %c : tensor<?x2xi64>, tensor<5xi64>, tensor<4xi64>)
      -> tensor<?x2xi64>, tensor<5xi64>, tensor<4xi64>
  return %r#0, %r#1, %r#2 : tensor<?x2xi64>, tensor<5xi64>, tensor<4xi64>
}
