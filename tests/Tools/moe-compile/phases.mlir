// RUN: rm -rf %t && moe-compile %s -o %t.moe --dump-phases-to=%t
// RUN: ls %t | FileCheck %s
// RUN: FileCheck %s --check-prefix=INPUT --input-file=%t/00-input.mlir

// CHECK: 00-input.mlir
// CHECK: 01-{{.*}}.mlir
// CHECK: 90-optimised.ll
// CHECK: 91-code.s

// INPUT: linalg.fill
func.func @ones() -> tensor<4xf32> {
  %one = arith.constant 1.0 : f32
  %e = tensor.empty() : tensor<4xf32>
  %r = linalg.fill ins(%one : f32) outs(%e : tensor<4xf32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}
