//===- NarrowFloats.h - half and bfloat on every CPU ------------*- C++ -*-===//

#ifndef MOE_LIB_TARGET_NARROWFLOATS_H
#define MOE_LIB_TARGET_NARROWFLOATS_H

#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/IntrinsicInst.h"

namespace llvm {
class Module;
class TargetMachine;
} // namespace llvm

namespace mlir::moe {

/// Rewrites what `machine` cannot do with half and bfloat by an instruction to
/// arithmetic on float and integers; LLVM would call functions of a compiler's
/// own library, which no process has to have.
void expandNarrowFloats(llvm::Module &code, const llvm::TargetMachine &machine);

/// Moves vectors of half and bfloat, where `machine` has no instructions for
/// them, as 16-bit integers. From one block to the next, and element by element
/// under a mask, the code generator takes the others by way of float, which it
/// rounds back by a call. To be run last: vectorizers make such moves, too.
void moveNarrowFloatsAsBits(llvm::Module &code,
                            const llvm::TargetMachine &machine);

/// The intrinsic of `call` on arguments of other types, with a result of
/// `type`; null if it has no such form.
llvm::CallInst *createIntrinsicLike(const llvm::IntrinsicInst &call,
                                    llvm::Type *type,
                                    llvm::ArrayRef<llvm::Value *> arguments,
                                    llvm::IRBuilderBase &builder);

} // namespace mlir::moe

#endif // MOE_LIB_TARGET_NARROWFLOATS_H
