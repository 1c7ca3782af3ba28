// A cubin needs ptxas; the tool says so before it compiles anything.

// RUN: not env MOE_MLIR_PTXAS=/nonexistent moe-compile %s -o %t --target=sm_90 --emit=cubin 2>&1 | FileCheck %s
// CHECK: error: expected ptxas for a cubin, found none in MOE_MLIR_PTXAS
module {}
