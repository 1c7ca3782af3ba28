//===- NarrowFloats.h - half and bfloat on every CPU ------------*- C++ -*-===//

#ifndef MOE_LIB_TARGET_NARROWFLOATS_H
#define MOE_LIB_TARGET_NARROWFLOATS_H

namespace llvm {
class Module;
class TargetMachine;
} // namespace llvm

namespace mlir::moe {

/// Rewrites what `machine` cannot do with half and bfloat by an instruction to
/// arithmetic on float and integers; LLVM would call functions of a compiler's
/// own library, which no process has to have.
void expandNarrowFloats(llvm::Module &code, const llvm::TargetMachine &machine);

} // namespace mlir::moe

#endif // MOE_LIB_TARGET_NARROWFLOATS_H
