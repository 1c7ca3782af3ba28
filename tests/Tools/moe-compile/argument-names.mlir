// The importer's notes on arguments end before LLVM IR, without a warning.

// RUN: moe-compile %s -o - --emit=llvm 2>&1 | FileCheck %s
// CHECK-NOT: warning
// CHECK: define {{.*}}@_mlir_ciface_f
func.func @f(%x: tensor<4xf32> {moe.name = "x"}) -> tensor<4xf32> {
  %e = tensor.empty() : tensor<4xf32>
  %r = linalg.exp ins(%x : tensor<4xf32>) outs(%e : tensor<4xf32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}
