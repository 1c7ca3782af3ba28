//===- Compile.h - A module to code in one call -----------------*- C++ -*-===//

#ifndef MOE_TARGET_COMPILE_H
#define MOE_TARGET_COMPILE_H

#include "MoE/Target/HostCode.h"
#include "mlir/IR/BuiltinOps.h"

namespace mlir::moe {

/// How a module becomes code for a CPU.
struct CompileOptions {
  /// The pipeline from the input to the LLVM dialect; "moe-to-cpu" gets the
  /// options that suit `cpu` (MoE/Target/CPUModels.h).
  std::string pipeline = "moe-to-cpu";
  std::string cpu = "native";
  /// The text of a table of measured numbers; empty: none.
  std::string tuning;
  /// A folder for the IR after every pass and the code at the end; empty: none.
  std::string dumpDir;
};

/// Code for a CPU, in the form that was asked for.
struct HostCode {
  std::string code;
  std::vector<FunctionSignature> signatures;
};

/// Runs the pipeline on `module`, in place, and emits code whose public
/// functions can be called by name and checked by signature.
FailureOr<HostCode> compileForHost(ModuleOp module, HostCodeForm form,
                                   const CompileOptions &options);

/// Kernels for a GPU.
struct DeviceCode {
  /// All kernels as one text.
  std::string ptx;
  /// How to launch them (MoE/Target/Kernels.h).
  llvm::json::Array functions;
};

/// Runs `moe-to-nvvm` for `chip` on `module`, in place, and returns the kernels
/// of its public functions.
FailureOr<DeviceCode> compileForDevice(ModuleOp module, StringRef chip,
                                       StringRef dumpDir = "");

} // namespace mlir::moe

#endif // MOE_TARGET_COMPILE_H
