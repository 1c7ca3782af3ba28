// RUN: %moe-opt %s --moe-to-cpu | FileCheck %s
// RUN: %moe-opt %s --moe-to-cpu=threads=false | FileCheck %s --check-prefix=SERIAL

// Nothing but the LLVM dialect is left, results are trailing buffers, and a
// router allocates nothing.

// CHECK-NOT: {{(affine|arith|bufferization|builtin|cf|func|index|linalg|math|memref|moe|scf|tensor|ub|vector)\.[a-z]}}
// CHECK-NOT: {{@malloc|_mlir_memref_to_llvm_alloc}}
// CHECK:     llvm.func @_mlir_ciface_route(%arg0: !llvm.ptr, %arg1: !llvm.ptr, %arg2: !llvm.ptr, %arg3: !llvm.ptr)
// CHECK-NOT: {{@malloc|_mlir_memref_to_llvm_alloc}}
// CHECK:     llvm.func @moe_parallel_for(i64, !llvm.ptr, !llvm.ptr)

// SERIAL-NOT: moe_parallel_for
func.func @route(%h: tensor<?x64xf32>, %w: tensor<16x64xf32>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %h, %c0 : tensor<?x64xf32>
  %z0 = tensor.empty(%n) : tensor<?x16xf32>
  %z = moe.router_logits ins(%h, %w : tensor<?x64xf32>, tensor<16x64xf32>)
      outs(%z0 : tensor<?x16xf32>) -> tensor<?x16xf32>
  %g0 = tensor.empty(%n) : tensor<?x2xf32>
  %i0 = tensor.empty(%n) : tensor<?x2xi32>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>) -> tensor<?x2xf32>, tensor<?x2xi32>
  return %g, %i : tensor<?x2xf32>, tensor<?x2xi32>
}
