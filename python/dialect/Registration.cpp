//===- Registration.cpp - The dialect for MLIR's Python package -----------===//
//
// C functions, which moe.py calls with the pointers of Python's objects: no
// module of its own for each version of Python.
//
//===----------------------------------------------------------------------===//

#include "MoE/InitAll.h"

#include "mlir/CAPI/IR.h"

#define MOE_DIALECT_EXPORT __attribute__((visibility("default")))

extern "C" {

/// The dialect with all its interface models.
MOE_DIALECT_EXPORT void moeRegisterDialect(MlirDialectRegistry registry) {
  mlir::moe::registerDialect(*unwrap(registry));
}

/// The passes and pipelines; once a process, as a second time ends it.
MOE_DIALECT_EXPORT void moeRegisterPasses() {
  mlir::moe::registerPassesAndPipelines();
}
}
