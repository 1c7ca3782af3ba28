//===- MoEToLLVM.h - What convert-to-llvm asks of the dialect ---*- C++ -*-===//

#ifndef MOE_CONVERSION_MOETOLLVM_H
#define MOE_CONVERSION_MOETOLLVM_H

namespace mlir {
class DialectRegistry;
} // namespace mlir

namespace mlir::moe {

/// Lets convert-to-llvm lower moe.assert.
void registerMoEToLLVMInterface(DialectRegistry &registry);

} // namespace mlir::moe

#endif // MOE_CONVERSION_MOETOLLVM_H
