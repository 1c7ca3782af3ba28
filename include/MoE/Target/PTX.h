//===- PTX.h - GPU binaries to PTX and cubin --------------------*- C++ -*-===//

#ifndef MOE_TARGET_PTX_H
#define MOE_TARGET_PTX_H

#include "mlir/IR/BuiltinOps.h"
#include "mlir/Support/LLVM.h"
#include <string>

namespace mlir::moe {

/// A chip that the compiler makes kernels for, with the lowest PTX version that
/// has all its instructions: old drivers load the result too, and LLVM's own
/// default can be a version that no assembler knows yet.
struct Chip {
  StringRef name;
  /// In tenths: 80 is PTX 8.0.
  unsigned ptxVersion;

  /// "+ptx80", the form that nvvm.target takes.
  std::string features() const { return "+ptx" + std::to_string(ptxVersion); }
};

ArrayRef<Chip> knownChips();

/// The chip of that name, or an error at `location` that lists the known ones.
FailureOr<Chip> lookupChip(StringRef name, Location location);

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
