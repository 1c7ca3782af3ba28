// RUN: %moe-opt %s --moe-tile-and-fuse --canonicalize --cse --split-input-file | FileCheck %s

// Rows of tokens are cut; what indices point into stays whole.

// CHECK-LABEL: func @combine
// CHECK-SAME:    %[[X:[^:]*]]: tensor<256x32xf32>, %[[G:[^:]*]]: tensor<128x2xf32>, %[[S:[^:]*]]: tensor<128x2xi32>
// CHECK:         scf.forall (%[[ROW:.*]]) = (0) to (128) step (64)
// CHECK-DAG:       %[[GATES:.*]] = tensor.extract_slice %[[G]][%[[ROW]], 0] [64, 2]
// CHECK-DAG:       %[[SLOTS:.*]] = tensor.extract_slice %[[S]][%[[ROW]], 0] [64, 2]
// CHECK:           moe.combine ins(%[[X]], %[[GATES]], %[[SLOTS]] :
func.func @combine(%x: tensor<256x32xf32>, %g: tensor<128x2xf32>, %s: tensor<128x2xi32>,
                   %y: tensor<128x32xf32>) -> tensor<128x32xf32> {
  %r = moe.combine ins(%x, %g, %s : tensor<256x32xf32>, tensor<128x2xf32>, tensor<128x2xi32>)
      outs(%y : tensor<128x32xf32>) -> tensor<128x32xf32>
  return %r : tensor<128x32xf32>
}

// -----

// CHECK-LABEL: func @threshold_renorm_and_densify
// CHECK:         scf.forall
// CHECK:           moe.threshold_renorm ins(%{{.*}} : tensor<64x16xf32>) mask(%{{.*}} : tensor<64xi1>)
// CHECK:         scf.forall
// CHECK:           moe.densify ins(%{{.*}} : tensor<64x2xf32>, tensor<64x2xi64>)
func.func @threshold_renorm_and_densify(
    %p: tensor<128x16xf32>, %mask: tensor<128xi1>, %g: tensor<128x16xf32>, %c: tensor<128xi32>,
    %gates: tensor<128x2xf32>, %i: tensor<128x2xi64>, %d: tensor<128x16xf32>)
    -> (tensor<128x16xf32>, tensor<128xi32>, tensor<128x16xf32>) {
  %r:2 = moe.threshold_renorm ins(%p : tensor<128x16xf32>) mask(%mask : tensor<128xi1>)
      outs(%g, %c : tensor<128x16xf32>, tensor<128xi32>) -> tensor<128x16xf32>, tensor<128xi32>
  %dense = moe.densify ins(%gates, %i : tensor<128x2xf32>, tensor<128x2xi64>)
      outs(%d : tensor<128x16xf32>) -> tensor<128x16xf32>
  return %r#0, %r#1, %dense : tensor<128x16xf32>, tensor<128xi32>, tensor<128x16xf32>
}

// -----

// The least finite score of the tensor needs all rows, that of a row does not.

// CHECK-LABEL: func @make_finite
// CHECK:         scf.forall
// CHECK:           moe.make_finite ins(%{{.*}} : tensor<64x16xf32>)
// CHECK:         moe.make_finite ins(%{{.*}} : tensor<128x16xf32>) outs(%{{.*}}) {scope = #moe.finite_scope<tensor>}
func.func @make_finite(%z: tensor<128x16xf32>, %a: tensor<128x16xf32>, %b: tensor<128x16xf32>)
    -> (tensor<128x16xf32>, tensor<128x16xf32>) {
  %row = moe.make_finite ins(%z : tensor<128x16xf32>) outs(%a : tensor<128x16xf32>)
      -> tensor<128x16xf32>
  %all = moe.make_finite ins(%z : tensor<128x16xf32>) outs(%b : tensor<128x16xf32>)
      {scope = #moe.finite_scope<tensor>} -> tensor<128x16xf32>
  return %row, %all : tensor<128x16xf32>, tensor<128x16xf32>
}

// -----

// Sequences are independent, tokens of one are not.

// CHECK-LABEL: func @soft_dispatch
// CHECK:         scf.forall (%[[B:.*]]) = (0) to (%{{.*}}) step (64)
func.func @soft_dispatch(%x: tensor<?x9x8xf32>, %phi: tensor<8x4x2xf32>, %a: tensor<?x9x4x2xf32>,
                         %b: tensor<?x9x4x2xf32>) -> (tensor<?x9x4x2xf32>, tensor<?x9x4x2xf32>) {
  %r:2 = moe.soft_dispatch ins(%x, %phi : tensor<?x9x8xf32>, tensor<8x4x2xf32>)
      outs(%a, %b : tensor<?x9x4x2xf32>, tensor<?x9x4x2xf32>)
      -> tensor<?x9x4x2xf32>, tensor<?x9x4x2xf32>
  return %r#0, %r#1 : tensor<?x9x4x2xf32>, tensor<?x9x4x2xf32>
}

// -----

// Every row depends on every assignment.

// CHECK-LABEL: func @dispatch
// CHECK-NOT:     scf.forall
// CHECK:         moe.dispatch
func.func @dispatch(%i: tensor<128x2xi32>, %s: tensor<128x2xi32>, %o: tensor<9xi32>,
                    %c: tensor<8xi32>) -> tensor<128x2xi32> {
  %r:3 = moe.dispatch ins(%i : tensor<128x2xi32>)
      outs(%s, %o, %c : tensor<128x2xi32>, tensor<9xi32>, tensor<8xi32>)
      -> tensor<128x2xi32>, tensor<9xi32>, tensor<8xi32>
  return %r#0 : tensor<128x2xi32>
}
