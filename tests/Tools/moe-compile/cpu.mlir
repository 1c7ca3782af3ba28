// Each form of CPU output, and that an artifact is complete.

// RUN: rm -rf %t && mkdir %t
// RUN: moe-compile %s -o %t/route.moe
// RUN: FileCheck %s --check-prefix=MANIFEST --input-file=%t/route.moe/manifest.json
// RUN: FileCheck %s --check-prefix=HEADER --input-file=%t/route.moe/kernel.h
// RUN: llvm-nm %t/route.moe/kernel.o | FileCheck %s --check-prefix=SYMBOLS

// RUN: moe-compile %s -o - --emit=mlir | FileCheck %s --check-prefix=MLIR
// RUN: moe-compile %s -o - --emit=llvm | FileCheck %s --check-prefix=LLVM
// RUN: moe-compile %s -o - --emit=asm | FileCheck %s --check-prefix=ASM
// RUN: moe-compile %s -o %t/v3.s --emit=asm --cpu=x86-64-v3
// RUN: not grep zmm %t/v3.s

// MANIFEST: "format": "moe-mlir-artifact"
// MANIFEST: "name": "route"
// MANIFEST: "name": "cpu"

// HEADER: typedef struct MoETensor2 {
// HEADER: route
// HEADER: arg0: tensor<?x8xf32>
// HEADER: result0: tensor<?x2xf32>
// HEADER: result1: tensor<?x2xi32>
// HEADER: void _mlir_ciface_route(MoETensor2 *arg0, MoETensor2 *result0, MoETensor2 *result1);

// SYMBOLS-DAG: T _mlir_ciface_route
// SYMBOLS-DAG: T __moe_call_route
// SYMBOLS-DAG: R __moe_signatures
// SYMBOLS-NOT: {{^[0-9a-f]+}} T route

// MLIR: moe.topk_renorm
// LLVM: define {{.*}}@_mlir_ciface_route
// ASM: _mlir_ciface_route:

func.func @route(%scores: tensor<?x8xf32>) -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %scores, %c0 : tensor<?x8xf32>
  %g = tensor.empty(%n) : tensor<?x2xf32>
  %i = tensor.empty(%n) : tensor<?x2xi32>
  %r:2 = moe.topk_renorm ins(%scores : tensor<?x8xf32>)
    outs(%g, %i : tensor<?x2xf32>, tensor<?x2xi32>) -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0, %r#1 : tensor<?x2xf32>, tensor<?x2xi32>
}
