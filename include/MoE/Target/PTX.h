//===- PTX.h - GPU binaries to PTX and cubin --------------------*- C++ -*-===//

#ifndef MOE_TARGET_PTX_H
#define MOE_TARGET_PTX_H

#include "MoE/Conversion/Chips.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/Support/LLVM.h"
#include <string>

namespace mlir::moe {

/// The PTX of every gpu.binary of the module as one text with one header; a
/// gpu.module that has a target but is not yet a binary is serialised first.
FailureOr<std::string> translateToPTX(ModuleOp module);

/// The absolute path of ptxas: MOE_MLIR_PTXAS where it is set, else in PATH,
/// beside LLVM in a Python environment (the nvidia-cuda-nvcc wheel), or in
/// CUDA_ROOT, CUDA_HOME or CUDA_PATH. Empty when there is none.
std::string findPtxas();

/// What to tell a user without ptxas.
inline constexpr StringLiteral kNoPtxas =
    "expected ptxas for a cubin, found none in MOE_MLIR_PTXAS, PATH, beside "
    "LLVM or in CUDA_ROOT; install the nvidia-cuda-nvcc wheel, or emit ptx, "
    "which the driver compiles";

/// Assembles PTX for `chip`. Errors are reported at `location`.
FailureOr<std::string> assembleCubin(StringRef ptx, StringRef chip,
                                     Location location);

} // namespace mlir::moe

#endif // MOE_TARGET_PTX_H
