//===- WantedKernelConfigs.h - Kernels that users ask for -------*- C++ -*-===//

#ifndef MOE_TRANSFORMS_WANTEDKERNELCONFIGS_H
#define MOE_TRANSFORMS_WANTEDKERNELCONFIGS_H

#include "MoE/Dialect/MoE/IR/KernelConfig.h"

#include "mlir/IR/BuiltinOps.h"

namespace mlir::moe {

/// The attribute of a module with what is asked for all ops of a name:
/// {softmax_mix = #moe.kernel_config<schedule = mma>}.
inline constexpr llvm::StringLiteral kKernelConfigsAttrName =
    "moe.kernel_configs";

/// What is asked for `op`: by its own attribute, else by that of its module;
/// null for nothing. The attributes are valid.
KernelConfigAttr getWantedKernelConfig(Operation *op);

/// Errors for attributes of `root`, a module, and the ops in it that are no
/// configuration, or one for an op that the dialect does not have.
LogicalResult verifyWantedKernelConfigs(Operation *root);

/// Asks for `config`, "<schedule = mma>" say, for the ops of `module` named
/// moe.`opName`. Errors are at `location`.
LogicalResult setWantedKernelConfig(ModuleOp module, StringRef opName,
                                    StringRef config, Location location);

} // namespace mlir::moe

#endif // MOE_TRANSFORMS_WANTEDKERNELCONFIGS_H
