//===- MaskedStores.h - Stores of a single lane -----------------*- C++ -*-===//

#ifndef MOE_LIB_TARGET_MASKEDSTORES_H
#define MOE_LIB_TARGET_MASKEDSTORES_H

namespace llvm {
class Module;
} // namespace llvm

namespace mlir::moe {

/// Stores of vectors whose mask is a constant with one lane become those of an
/// element. LLVM 22 stores all bits of a lane that is cut, such as 32 of one of
/// 16 or 64 of one of 32, over what lies behind it, where the CPU has AVX-512.
/// To be run last: optimisations find masks to be constants.
void storeSingleLanesAsElements(llvm::Module &code);

} // namespace mlir::moe

#endif // MOE_LIB_TARGET_MASKEDSTORES_H
