// RUN: %moe-opt %s | %moe-opt | FileCheck %s
// RUN: %moe-opt %s --mlir-print-op-generic | %moe-opt | FileCheck %s
// RUN: %moe-opt %s --emit-bytecode | %moe-opt | FileCheck %s

// The smallest form of an op prints no attribute and no optional operand.

// CHECK-LABEL: func @threshold_renorm
// CHECK:         moe.threshold_renorm ins(%{{[^ ]*}} : tensor<?x16xf32>)
// CHECK-SAME:      outs(%{{[^ ]*}}, %{{[^ ]*}} : tensor<?x16xf32>, tensor<?xi32>) -> tensor<?x16xf32>, tensor<?xi32>
func.func @threshold_renorm(%p: tensor<?x16xf32>, %c: tensor<?xi32>) -> tensor<?xi32> {
  %r:2 = moe.threshold_renorm ins(%p : tensor<?x16xf32>)
      outs(%p, %c : tensor<?x16xf32>, tensor<?xi32>) -> tensor<?x16xf32>, tensor<?xi32>
  return %r#1 : tensor<?xi32>
}

// CHECK-LABEL: func @threshold_renorm_with_everything
// CHECK:         moe.threshold_renorm ins(%{{[^ ]*}} : tensor<2x?x16xf32>) theta(%{{[^ ]*}} : f32)
// CHECK-SAME:      mask(%{{[^ ]*}} : tensor<2x?xi1>)
// CHECK-SAME:      {renorm = false, theta = 1.000000e-01 : f64}
func.func @threshold_renorm_with_everything(
    %p: tensor<2x?x16xf32>, %theta: f32, %mask: tensor<2x?xi1>,
    %c: tensor<2x?xi32>) -> tensor<2x?xi32> {
  %r:2 = moe.threshold_renorm ins(%p : tensor<2x?x16xf32>) theta(%theta : f32)
      mask(%mask : tensor<2x?xi1>)
      outs(%p, %c : tensor<2x?x16xf32>, tensor<2x?xi32>)
      {renorm = false, theta = 0.1 : f64} -> tensor<2x?x16xf32>, tensor<2x?xi32>
  return %r#1 : tensor<2x?xi32>
}

// CHECK-LABEL: func @densify
// CHECK:         moe.densify ins(%{{[^ ]*}}, %{{[^ ]*}} : memref<?x2xf32>, memref<?x2xi64>) outs(%{{[^ ]*}} : memref<?x16xf32>){{$}}
func.func @densify(%g: memref<?x2xf32>, %i: memref<?x2xi64>, %d: memref<?x16xf32>) {
  moe.densify ins(%g, %i : memref<?x2xf32>, memref<?x2xi64>) outs(%d : memref<?x16xf32>)
  return
}

// CHECK-LABEL: func @make_finite
// CHECK:         moe.make_finite ins(%{{[^ ]*}} : tensor<?x16xbf16>) outs(%{{[^ ]*}} : tensor<?x16xf32>) ->
// CHECK:         moe.make_finite {{.*}} {scope = #moe.finite_scope<tensor>}
func.func @make_finite(%z: tensor<?x16xbf16>, %y: tensor<?x16xf32>) -> tensor<?x16xf32> {
  %a = moe.make_finite ins(%z : tensor<?x16xbf16>) outs(%y : tensor<?x16xf32>)
      -> tensor<?x16xf32>
  %b = moe.make_finite ins(%a : tensor<?x16xf32>) outs(%y : tensor<?x16xf32>)
      {scope = #moe.finite_scope<tensor>} -> tensor<?x16xf32>
  return %b : tensor<?x16xf32>
}

// CHECK-LABEL: func @dispatch
// CHECK:         moe.dispatch ins(%{{[^ ]*}} : tensor<?x2xi64>)
// CHECK-SAME:      outs(%{{[^ ]*}}, %{{[^ ]*}}, %{{[^ ]*}} : tensor<?x2xi64>, tensor<9xi32>, tensor<8xi32>) ->
func.func @dispatch(%i: tensor<?x2xi64>, %o: tensor<9xi32>, %c: tensor<8xi32>) -> tensor<8xi32> {
  %r:3 = moe.dispatch ins(%i : tensor<?x2xi64>)
      outs(%i, %o, %c : tensor<?x2xi64>, tensor<9xi32>, tensor<8xi32>)
      -> tensor<?x2xi64>, tensor<9xi32>, tensor<8xi32>
  return %r#2 : tensor<8xi32>
}

// CHECK-LABEL: func @dispatch_with_everything
// CHECK:         moe.dispatch ins(%{{[^ ]*}} : tensor<?x2xi32>) priority(%{{[^ ]*}} : tensor<?xf32>)
// CHECK-SAME:      expert_map(%{{[^ ]*}} : tensor<64xi32>) capacity(%{{[^ ]*}} : i32) mask(%{{[^ ]*}} : tensor<?xi1>)
// CHECK-SAME:      {alignment = 16 : i64, drop = #moe.drop<priority>}
// CHECK:         moe.dispatch ins(%{{[^ ]*}} : tensor<?x2xi32>) gates(%{{[^ ]*}} : tensor<?x2xf32>)
// CHECK-SAME:      {capacity_factor = 1.250000e+00 : f64, drop = #moe.drop<probs>}
func.func @dispatch_with_everything(
    %i: tensor<?x2xi32>, %p: tensor<?xf32>, %g: tensor<?x2xf32>,
    %map: tensor<64xi32>, %capacity: i32, %mask: tensor<?xi1>,
    %o: tensor<9xi32>, %c: tensor<8xi32>) -> (tensor<8xi32>, tensor<8xi32>) {
  %a:3 = moe.dispatch ins(%i : tensor<?x2xi32>) priority(%p : tensor<?xf32>)
      expert_map(%map : tensor<64xi32>) capacity(%capacity : i32)
      mask(%mask : tensor<?xi1>)
      outs(%i, %o, %c : tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>)
      {drop = #moe.drop<priority>, alignment = 16 : i64}
      -> tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>
  %b:3 = moe.dispatch ins(%i : tensor<?x2xi32>) gates(%g : tensor<?x2xf32>)
      outs(%i, %o, %c : tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>)
      {drop = #moe.drop<probs>, capacity_factor = 1.25 : f64}
      -> tensor<?x2xi32>, tensor<9xi32>, tensor<8xi32>
  return %a#2, %b#2 : tensor<8xi32>, tensor<8xi32>
}

// CHECK-LABEL: func @combine
// CHECK:         moe.combine ins(%{{[^ ]*}}, %{{[^ ]*}}, %{{[^ ]*}} : tensor<?x64xbf16>, tensor<2x?x2xf32>, tensor<2x?x2xi64>)
// CHECK-SAME:      shared(%{{[^ ]*}} : tensor<2x?x64xf32>) outs(%{{[^ ]*}} : tensor<2x?x64xbf16>)
func.func @combine(%x: tensor<?x64xbf16>, %g: tensor<2x?x2xf32>, %s: tensor<2x?x2xi64>,
                   %shared: tensor<2x?x64xf32>, %y: tensor<2x?x64xbf16>) -> tensor<2x?x64xbf16> {
  %r = moe.combine ins(%x, %g, %s : tensor<?x64xbf16>, tensor<2x?x2xf32>, tensor<2x?x2xi64>)
      shared(%shared : tensor<2x?x64xf32>) outs(%y : tensor<2x?x64xbf16>)
      -> tensor<2x?x64xbf16>
  return %r : tensor<2x?x64xbf16>
}

// CHECK-LABEL: func @soft_dispatch
// CHECK:         moe.soft_dispatch ins(%{{[^ ]*}}, %{{[^ ]*}} : tensor<2x?x64xf16>, tensor<64x8x2xf32>)
// CHECK-SAME:      metric(%{{[^ ]*}} : tensor<2x?x64xf32>) scale(%{{[^ ]*}} : f32) mask(%{{[^ ]*}} : tensor<2x?xi1>)
// CHECK-SAME:      {eps = 1.000000e-04 : f64}
func.func @soft_dispatch(%x: tensor<2x?x64xf16>, %phi: tensor<64x8x2xf32>,
                         %m: tensor<2x?x64xf32>, %scale: f32, %mask: tensor<2x?xi1>,
                         %w: tensor<2x?x8x2xf32>) -> tensor<2x?x8x2xf32> {
  %r:2 = moe.soft_dispatch ins(%x, %phi : tensor<2x?x64xf16>, tensor<64x8x2xf32>)
      metric(%m : tensor<2x?x64xf32>) scale(%scale : f32) mask(%mask : tensor<2x?xi1>)
      outs(%w, %w : tensor<2x?x8x2xf32>, tensor<2x?x8x2xf32>) {eps = 1.0e-4 : f64}
      -> tensor<2x?x8x2xf32>, tensor<2x?x8x2xf32>
  return %r#1 : tensor<2x?x8x2xf32>
}

// CHECK-LABEL: func @losses
// CHECK:         moe.balance_loss ins(%{{.*}} : tensor<?x16xf32>, tensor<?x2xi32>) mask(%{{.*}} : tensor<?xi1>)
// CHECK-SAME:      outs(%{{.*}} : tensor<f32>, tensor<16xi32>) {divisor = #moe.loss_divisor<assignments>}
// CHECK:         moe.z_loss ins(%{{.*}} : tensor<?x16xf32>) outs(%{{.*}} : tensor<f32>, tensor<?xf32>) ->
// CHECK:         moe.bias_update ins(%{{.*}} : tensor<16xf32>, tensor<16xi32>) outs(%{{.*}} : tensor<16xf32>) {gamma = 1.000000e-02 : f64}
func.func @losses(%p: tensor<?x16xf32>, %i: tensor<?x2xi32>, %mask: tensor<?xi1>,
                  %loss: tensor<f32>, %load: tensor<16xi32>, %lse: tensor<?xf32>,
                  %bias: tensor<16xf32>) -> (tensor<f32>, tensor<f32>, tensor<16xf32>) {
  %a:2 = moe.balance_loss ins(%p, %i : tensor<?x16xf32>, tensor<?x2xi32>)
      mask(%mask : tensor<?xi1>) outs(%loss, %load : tensor<f32>, tensor<16xi32>)
      {divisor = #moe.loss_divisor<assignments>} -> tensor<f32>, tensor<16xi32>
  %b:2 = moe.z_loss ins(%p : tensor<?x16xf32>)
      outs(%loss, %lse : tensor<f32>, tensor<?xf32>) -> tensor<f32>, tensor<?xf32>
  %c = moe.bias_update ins(%bias, %a#1 : tensor<16xf32>, tensor<16xi32>)
      outs(%bias : tensor<16xf32>) {gamma = 0.01 : f64} -> tensor<16xf32>
  return %a#0, %b#0, %c : tensor<f32>, tensor<f32>, tensor<16xf32>
}
