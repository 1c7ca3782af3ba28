//===- HostCode.h - LLVM dialect to code for a CPU --------------*- C++ -*-===//

#ifndef MOE_TARGET_HOSTCODE_H
#define MOE_TARGET_HOSTCODE_H

#include "MoE/Target/Signature.h"

namespace mlir::moe {

enum class HostCodeForm { Object, Assembly, LLVMIR };

struct HostCodeOptions {
  /// "native" is the CPU of this machine with every extension that it has; any
  /// other name is one that LLVM knows for this machine's architecture.
  std::string cpu = "native";
  /// The functions to make callable without knowing their types at compile
  /// time. When empty, only the module's own symbols are in the code.
  ArrayRef<FunctionSignature> signatures;
};

/// Translates a module in the LLVM dialect to position-independent code, all in
/// memory. Every failure, LLVM's own included, is a diagnostic on the module.
FailureOr<std::string> translateToHostCode(ModuleOp module, HostCodeForm form,
                                           const HostCodeOptions &options);

/// The name and the features of this machine's CPU, as LLVM spells them. Code
/// for "native" runs where both are the same.
std::string hostCPUName();
std::string hostCPUFeatures();

/// The features that code for `cpu`, as in HostCodeOptions, relies on, each
/// with a plus: extensions of the instruction set that the code generator
/// chooses by itself. None for an unknown name, see isKnownCPU.
std::string codeFeatures(StringRef cpu);
bool isKnownCPU(StringRef cpu);

/// The functions that an object calls and that no runtime of ours defines, by
/// commas.
std::string findForeignSymbols(StringRef object);

} // namespace mlir::moe

#endif // MOE_TARGET_HOSTCODE_H
