//===- SoftmaxMix.h - The schedules of softmax_mix --------------*- C++ -*-===//
//
// Each is a kernel of a file of its own; SoftmaxMix.cpp lists and calls them.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIX_H
#define MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIX_H

#include "Emit/WarpBuilder.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// A way in which a block runs an op.
struct MixShape {
  /// Threads of the block, queries that it takes at a time, and its own shared
  /// memory.
  int64_t numThreads, tileRows, sharedBytes;
};

/// A shape, and what emits the op on buffers in it.
struct MixPlan {
  MixShape shape;
  std::function<void(WarpBuilder &b, SoftmaxMixOp op)> emit;
};

/// The columns of the values; 0 if there are none.
inline int64_t getNumColumns(SoftmaxMixOp op) {
  Value v = op.getV();
  return v ? cast<ShapedType>(v.getType()).getShape().back() : 0;
}

/// The plans by which a kernel runs the op, on tensors or buffers, with at most
/// `sharedBytes` of shared memory, best first.
SmallVector<MixPlan> planMixOnWarpgroups(SoftmaxMixOp op, int64_t sharedBytes);
/// Of the op with `numColumns` of its columns of values.
SmallVector<MixPlan> planMixOnTensorCores(SoftmaxMixOp op, int64_t numColumns,
                                          int64_t sharedBytes);
MixPlan planMixOnFloatUnits(SoftmaxMixOp op);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIX_H
