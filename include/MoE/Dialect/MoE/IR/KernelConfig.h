//===- KernelConfig.h - How a kernel runs an op -----------------*- C++ -*-===//

#ifndef MOE_DIALECT_MOE_IR_KERNELCONFIG_H
#define MOE_DIALECT_MOE_IR_KERNELCONFIG_H

#include "MoE/Dialect/MoE/IR/MoE.h"

#include "MoE/Dialect/MoE/IR/MoEKernelEnums.h.inc"

#define GET_ATTRDEF_CLASSES
#include "MoE/Dialect/MoE/IR/MoEKernelConfig.h.inc"

namespace mlir::moe {

/// The attribute of an op that holds its #moe.kernel_config.
inline constexpr llvm::StringLiteral kKernelConfigAttrName =
    "moe.kernel_config";

/// The configuration of `op`; null where none was chosen.
inline KernelConfigAttr getKernelConfig(Operation *op) {
  return op->getAttrOfType<KernelConfigAttr>(kKernelConfigAttrName);
}

/// Whether the kernel of `op` was chosen to follow `schedule`.
inline bool hasSchedule(Operation *op, KernelSchedule schedule) {
  KernelConfigAttr config = getKernelConfig(op);
  return config && config.getSchedule() == schedule;
}

/// Whether the kernel of `op` shares the loop over its tiles with no other op.
inline bool hasOwnLoop(Operation *op) {
  KernelConfigAttr config = getKernelConfig(op);
  return config && config.getLoop() == KernelLoop::Own;
}

/// Whether the kernel of `op` makes its loop itself, so that nothing cuts `op`.
inline bool isLoopOfKernel(Operation *op) {
  KernelConfigAttr config = getKernelConfig(op);
  return config && config.getLoop() == KernelLoop::Kernel;
}

/// Whether the queries of `op` are its keys, so that one pass over pairs of
/// tokens can take each pair in both roles.
template <typename OpTy>
bool canTakePairsOnce(OpTy op) {
  // Under a causal mask a pair has one role only: a mix shares nothing.
  bool isShared = !op.getVisibility().getCausal() ||
                  isa<SimilarityInformBackwardOp>(op.getOperation());
  return isShared && !op.getUk() && !op.getWs() && !op.getTauValue() &&
         !op.getQueryMask() && !op.getOrigin();
}

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_IR_KERNELCONFIG_H
