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
#include "MoE/Support/Chips.h"
#include "MoE/Transforms/KernelFacts.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/IR/PatternMatch.h"

namespace mlir::moe {
class ThreadBuilder;

/// What a lowering knows about the block that runs it: blocks are
/// one-dimensional and consist of whole warps.
struct BlockShape {
  int64_t numThreads = 128;
  /// Shared memory that a block may have on the chip.
  int64_t sharedBytes = ::moe::kMaxStaticSharedBytes;
  /// Blocks of a cluster; 1 where the chip has no clusters.
  int64_t clusterBlocks = 1;
  /// Whether the chip has wgmma.
  bool hasWgmma = false;
  /// Whether kernels that keep queries in shared memory fill its registers
  /// sooner.
  bool fillsRegistersSooner = false;
};

/// A block of `numThreads` threads on the chip that `op` is compiled for.
BlockShape getBlockShape(Operation *op, int64_t numThreads = 128);

/// Emits an error at `op` where no block has `blockSize` threads.
LogicalResult verifyBlockSize(Operation *op, int64_t blockSize);

/// The flat number of rows that `memref` holds: the product of all dims but
/// the last `numInner` ones.
Value getNumRows(ThreadBuilder &b, Value memref, int64_t numInner);
/// The most that `numRows` may be; nullopt if it has no bound.
std::optional<int64_t> getMaxRows(Value numRows);
/// The indices of row `row` along the leading dims of `memref`.
SmallVector<Value> getRowIndices(ThreadBuilder &b, Value memref,
                                 int64_t numInner, Value row);

/// Where part `number` of `numParts` parts of 0 .. count begins and ends: parts
/// in the order of their numbers and of one size, a multiple of `multiple`, but
/// for the last ones. In 32 bits.
std::pair<Value, Value> getPart(ThreadBuilder &b, Value count, Value number,
                                Value numParts, int64_t multiple);

/// The threads that divide the iterations of an op among themselves: those of
/// one block, or of all blocks of a grid.
struct Workers {
  static Workers ofBlock(ThreadBuilder &b, BlockShape block);
  /// `blockId` of `numBlocks` blocks.
  static Workers ofGrid(ThreadBuilder &b, BlockShape block, Value blockId,
                        int64_t numBlocks);

  /// The number of this thread among `count` ones, as an index. The threads of
  /// a warp are neighbours.
  Value thread;
  int64_t count;
};

/// Emits what a thread of `workers` does for `op` on buffers.
void emitLinalgForThreads(ThreadBuilder &b, linalg::LinalgOp op,
                          Workers workers);
/// Whether a reduction of `op` may be cut into parts that are combined later:
/// all of its outputs are folded by an associative op with a neutral element.
bool hasCombinableReduction(linalg::LinalgOp op);
/// Emits part `part` of `numParts` parts of the reduction of `op` for one
/// block: the terms of the part folded into partials[0][part, ...], one buffer
/// an output.
void emitPartialReduction(ThreadBuilder &b, linalg::LinalgOp op,
                          BlockShape block, Value part, int64_t numParts,
                          ValueRange partials);
/// Emits the combination of the parts, in their order, with what the outputs
/// held.
void emitCombineParts(ThreadBuilder &b, linalg::LinalgOp op, Workers workers,
                      int64_t numParts, ValueRange partials);

/// Replaces math ops and conversions that this target would turn into calls of
/// a library, or that some chips lack, by instructions. Emits an error and
/// fails on one that it does not know.
LogicalResult expandMathForThreads(Operation *kernel);

/// Emits a copy, element by element.
void emitCopyForThreads(ThreadBuilder &b, memref::CopyOp op, Workers workers);

/// 1 where `lhs` is more than `rhs`, else 0, of sizes below 2^31: grids are
/// expressions without branches.
AffineExpr isMore(AffineExpr lhs, AffineExpr rhs);
/// Blocks of a grid whose threads take the iterations of an op in turns, at
/// most: one for each multiprocessor of the largest chip or so. More would only
/// shorten the loops of the threads.
inline constexpr int64_t kGridBlocks = 128;
/// Opens a loop over the blocks of a grid of up to three dims, the last along
/// x; `b` continues in its body. Returns the numbers of the block.
SmallVector<Value> createGrid(ThreadBuilder &b,
                              ArrayRef<OpFoldResult> numBlocks);
inline Value createGrid(ThreadBuilder &b, OpFoldResult numBlocks) {
  return createGrid(b, ArrayRef<OpFoldResult>(numBlocks))[0];
}
/// Whether `op` reduces many terms into few points.
bool isLongReduction(linalg::LinalgOp op);

/// The patterns of ops that work on a whole problem: they become loops over
/// blocks.
void populateToGridPatterns(RewritePatternSet &patterns, BlockShape block);
void populateAdjacencyToGridPatterns(RewritePatternSet &patterns,
                                     BlockShape block);
void populateCombineToGridPatterns(RewritePatternSet &patterns,
                                   BlockShape block);
void populateDispatchToGridPatterns(RewritePatternSet &patterns,
                                    BlockShape block);
void populateDispersionToGridPatterns(RewritePatternSet &patterns,
                                      BlockShape block);
void populateGroupedLinearToGridPatterns(RewritePatternSet &patterns,
                                         BlockShape block);
void populateTokenRowsToGridPatterns(RewritePatternSet &patterns,
                                     BlockShape block);

/// Makes reshapes by a buffer of sizes views of what they reshape.
void castReshapes(func::FuncOp function);
/// The patterns of all block-level ops.
void populateToThreadsPatterns(RewritePatternSet &patterns, BlockShape block);

void populateCopyToThreadsPatterns(RewritePatternSet &patterns,
                                   BlockShape block);
void populateLinalgToThreadsPatterns(RewritePatternSet &patterns,
                                     BlockShape block);
/// The patterns of linalg ops that multiply rows on tensor cores.
void populateLinalgProductToThreadsPatterns(RewritePatternSet &patterns,
                                            BlockShape block);
void populateRouterLogitsToThreadsPatterns(RewritePatternSet &patterns,
                                           BlockShape block);
void populateSoftmaxMixBackwardToThreadsPatterns(RewritePatternSet &patterns,
                                                 BlockShape block);
void populateSoftmaxMixToThreadsPatterns(RewritePatternSet &patterns,
                                         BlockShape block);
void populateTopKRenormToThreadsPatterns(RewritePatternSet &patterns,
                                         BlockShape block);

// One function a family, beside its patterns.
void addAdjacencyFacts(KernelFacts &facts);
void addCombineFacts(KernelFacts &facts, BlockShape block);
void addDispatchFacts(KernelFacts &facts, BlockShape block);
void addDispersionFacts(KernelFacts &facts);
void addGroupedLinearGridFacts(KernelFacts &facts, BlockShape block);
void addRouterLogitsFacts(KernelFacts &facts, BlockShape block);
void addSoftmaxMixBackwardFacts(KernelFacts &facts, BlockShape block);
void addSoftmaxMixFacts(KernelFacts &facts, BlockShape block);
void addTopKRenormFacts(KernelFacts &facts, BlockShape block);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_THREADLOWERINGS_H
