// RUN: %moe-opt %s --moe-to-cpu | FileCheck %s

// A shape that is known when the function runs: nothing but the LLVM dialect is
// left of it either.

// CHECK-NOT: {{(builtin\.unrealized|memref|tensor)}}
// CHECK:     llvm.func @_mlir_ciface_reshaped
// CHECK-NOT: {{(builtin\.unrealized|memref|tensor)}}
func.func @reshaped(%a: tensor<?x96xf32>, %shape: tensor<3xindex>) -> tensor<?x?x96xf32> {
  %r = tensor.reshape %a(%shape) : (tensor<?x96xf32>, tensor<3xindex>) -> tensor<?x?x96xf32>
  return %r : tensor<?x?x96xf32>
}
