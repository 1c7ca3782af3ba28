//===- Passes.h - Passes that stay in the moe dialect -----------*- C++ -*-===//

#ifndef MOE_TRANSFORMS_PASSES_H
#define MOE_TRANSFORMS_PASSES_H

#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/Pass/Pass.h"

namespace mlir::moe {

/// The runtime's function that says how many threads a loop may use.
inline constexpr llvm::StringLiteral kThreadCountName = "moe_get_num_threads";

#define GEN_PASS_DECL
#include "MoE/Transforms/Passes.h.inc"

#define GEN_PASS_REGISTRATION
#include "MoE/Transforms/Passes.h.inc"

} // namespace mlir::moe

#endif // MOE_TRANSFORMS_PASSES_H
