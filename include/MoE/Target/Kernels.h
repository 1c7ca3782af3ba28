//===- Kernels.h - How to launch the kernels of a module --------*- C++ -*-===//
//
// What a host without a compiler needs beside the PTX: which kernels stand for
// a function, their grids, and the workspace, as functions of the sizes of its
// arguments. MoE/Conversion/MoEToGPU.h documents the parameters.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_TARGET_KERNELS_H
#define MOE_TARGET_KERNELS_H

#include "MoE/Target/Signature.h"

namespace mlir::moe {

/// The functions of a module that `moe-to-nvvm` lowered, one object each:
///
///   {"name", "arguments", "results",       the signature before lowering
///    "kernels": [{"name", "grid": [x, y, z], "block_size",
///                 "dynamic_smem"}, ..],    in the order of launches
///    "workspace": bytes}
///
/// A size is written as those of results (Signature.h); ["arg", i, d] counts
/// the arguments and behind them the results.
/// "workspace" is absent where a function needs none.
FailureOr<llvm::json::Array>
describeKernels(ModuleOp module, ArrayRef<FunctionSignature> signatures);

} // namespace mlir::moe

#endif // MOE_TARGET_KERNELS_H
