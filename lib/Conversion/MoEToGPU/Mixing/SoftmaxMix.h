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

/// The columns of the values; 0 if there are none.
inline int64_t getNumColumns(SoftmaxMixOp op) {
  Value v = op.getV();
  return v ? cast<ShapedType>(v.getType()).getShape().back() : 0;
}

/// The shapes in which a kernel runs the op, on tensors or buffers, with at
/// most `sharedBytes` of shared memory, best first.
SmallVector<MixShape> getWarpgroupShapes(SoftmaxMixOp op, int64_t sharedBytes);
/// Of the op with `numColumns` of its columns of values.
SmallVector<MixShape> getTensorShapes(SoftmaxMixOp op, int64_t numColumns,
                                      int64_t sharedBytes);
MixShape getFloatShape(SoftmaxMixOp op);

/// Emits the kernel in its best shape of at most `maxRows` queries and
/// `sharedBytes` of shared memory; on tensor cores in its first one of such
/// memory where all have more queries.
void emitMixOnWarpgroups(OpBuilder &builder, SoftmaxMixOp op, int64_t maxRows,
                         int64_t sharedBytes);
void emitMixOnTensorCores(WarpBuilder &b, SoftmaxMixOp op, int64_t maxRows,
                          int64_t sharedBytes);
void emitMixOnFloatUnits(WarpBuilder &b, SoftmaxMixOp op);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIX_H
