//===- ThreadLowerings.h - Block-level ops to threads -----------*- C++ -*-===//
//
// A block-level op is an op on buffers that the threads of one block execute
// together. Each has a pattern of its own that knows nothing of its
// neighbours: it reads its operands from global or workgroup memory, writes
// its destinations there, and starts and ends with the whole block converged.
// The pass that composes them puts barriers where one reads what another
// wrote.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_THREADLOWERINGS_H
#define MOE_LIB_CONVERSION_MOETOGPU_THREADLOWERINGS_H

#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "mlir/IR/PatternMatch.h"

namespace mlir::moe {
class ThreadBuilder;

/// What a lowering knows about the block that runs it: blocks are
/// one-dimensional and consist of whole warps.
struct BlockShape {
  int64_t numThreads;
  /// Shared memory that a block may have on the chip.
  int64_t sharedBytes = kMaxStaticWorkgroupBytes;
};

/// Queries that a block takes at a time.
int64_t getMixTileRows(SoftmaxMixOp op, int64_t sharedBytes);

/// The flat number of rows that `memref` holds: the product of all dims but
/// the last `numInner` ones.
Value getNumRows(ThreadBuilder &b, Value memref, int64_t numInner);
/// The indices of row `row` along the leading dims of `memref`.
SmallVector<Value> getRowIndices(ThreadBuilder &b, Value memref,
                                 int64_t numInner, Value row);

void populateCopyToThreadsPatterns(RewritePatternSet &patterns,
                                   BlockShape block);
void populateRouterLogitsToThreadsPatterns(RewritePatternSet &patterns,
                                           BlockShape block);
void populateSoftmaxMixToThreadsPatterns(RewritePatternSet &patterns,
                                         BlockShape block);
void populateTopKRenormToThreadsPatterns(RewritePatternSet &patterns,
                                         BlockShape block);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_THREADLOWERINGS_H
