// RUN: softcap-opt %s --split-input-file --verify-diagnostics --convert-softcap-to-linalg | FileCheck %s

// CHECK-LABEL: @narrow(
// CHECK: linalg.generic
// CHECK: %[[WIDE:.*]] = arith.extf
// CHECK: %[[RATIO:.*]] = arith.divf %[[WIDE]]
// CHECK: %[[TANH:.*]] = math.tanh %[[RATIO]] : f32
// CHECK: %[[PRODUCT:.*]] = arith.mulf %[[TANH]]
// CHECK: arith.truncf %[[PRODUCT]] : f32 to bf16
func.func @narrow(%x: tensor<?x4xbf16>) -> tensor<?x4xbf16> {
  %y = softcap.cap %x by 30.0 : tensor<?x4xbf16>
  return %y : tensor<?x4xbf16>
}

// -----

func.func @zero(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{expected cap to be positive and finite, found 0.000000e+00}}
  %y = softcap.cap %x by 0.0 : tensor<4xf32>
  return %y : tensor<4xf32>
}
