//===- ThreadLowerings.cpp - What lowerings of block-level ops share ------===//

#include "ThreadLowerings.h"
#include "Emit/ThreadBuilder.h"

#include "MoE/Conversion/Chips.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Blocks
//===----------------------------------------------------------------------===//

BlockShape mlir::moe::getBlockShape(Operation *op, int64_t numThreads) {
  Chip chip = getChip(op);
  return {numThreads, chip.sharedBytes, chip.clusterBlocks, chip.hasWgmma,
          chip.fillsRegistersSooner};
}

LogicalResult mlir::moe::verifyBlockSize(Operation *op, int64_t blockSize) {
  constexpr int64_t most = 1024;
  if (blockSize >= kWarpSize && blockSize <= most && blockSize % kWarpSize == 0)
    return success();
  return op->emitError() << "expected block-size to be a multiple of "
                         << kWarpSize << " up to " << most << ", found "
                         << blockSize;
}

//===----------------------------------------------------------------------===//
// Rows
//===----------------------------------------------------------------------===//

Value mlir::moe::getNumRows(ThreadBuilder &b, Value memref, int64_t numInner) {
  int64_t numLeading = cast<MemRefType>(memref.getType()).getRank() - numInner;
  Value rows;
  for (int64_t dim = 0; dim < numLeading; ++dim) {
    Value size = memref::DimOp::create(b, memref, b.index(dim));
    rows = rows ? b.mul(rows, size) : size;
  }
  return rows ? rows : b.index(1);
}

std::optional<int64_t> mlir::moe::getMaxRows(Value numRows) {
  FailureOr<int64_t> maxRows = ValueBoundsConstraintSet::computeConstantBound(
      presburger::BoundType::UB, numRows, /*stopCondition=*/nullptr,
      /*closedUB=*/true);
  if (failed(maxRows) || *maxRows < 1)
    return std::nullopt;
  return *maxRows;
}

SmallVector<Value> mlir::moe::getRowIndices(ThreadBuilder &b, Value memref,
                                            int64_t numInner, Value row) {
  int64_t numLeading = cast<MemRefType>(memref.getType()).getRank() - numInner;
  SmallVector<Value> indices(numLeading);
  for (int64_t dim = numLeading - 1; dim > 0; --dim) {
    Value size = memref::DimOp::create(b, memref, b.index(dim));
    indices[dim] = b.op<arith::RemUIOp>(row, size);
    row = b.op<arith::DivUIOp>(row, size);
  }
  if (numLeading > 0)
    indices[0] = row;
  return indices;
}

std::pair<Value, Value> mlir::moe::getPart(ThreadBuilder &b, Value count,
                                           Value number, Value numParts,
                                           int64_t multiple) {
  Value step = b.mul(b.toI32(numParts), b.i32(multiple));
  Value rounded = b.add(b.toI32(count), b.sub(step, b.i32(1)));
  Value length =
      b.toIndex(b.mul(b.op<arith::DivUIOp>(rounded, step), b.i32(multiple)));
  Value begin = b.op<arith::MinUIOp>(b.mul(number, length), count);
  return {begin, b.op<arith::MinUIOp>(b.add(begin, length), count)};
}

//===----------------------------------------------------------------------===//
// Copies
//===----------------------------------------------------------------------===//

/// The threads take the elements in turns.
void mlir::moe::emitCopyForThreads(ThreadBuilder &b, memref::CopyOp op,
                                   Workers workers) {
  Value count = getNumRows(b, op.getSource(), /*numInner=*/0);
  auto loop =
      scf::ForOp::create(b, workers.thread, count, b.index(workers.count));
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPointToStart(loop.getBody());
  SmallVector<Value> place =
      getRowIndices(b, op.getSource(), /*numInner=*/0, loop.getInductionVar());
  Value element = memref::LoadOp::create(b, op.getSource(), place);
  memref::StoreOp::create(b, element, op.getTarget(), place);
}

namespace {
struct CopyToThreads : OpRewritePattern<memref::CopyOp> {
  CopyToThreads(MLIRContext *context, BlockShape block)
      : OpRewritePattern(context), block(block) {}

  LogicalResult matchAndRewrite(memref::CopyOp op,
                                PatternRewriter &rewriter) const override {
    ThreadBuilder b(op.getLoc(), rewriter);
    emitCopyForThreads(b, op, Workers::ofBlock(b, block));
    rewriter.eraseOp(op);
    return success();
  }

  BlockShape block;
};
} // namespace

void mlir::moe::populateCopyToThreadsPatterns(RewritePatternSet &patterns,
                                              BlockShape block) {
  patterns.add<CopyToThreads>(patterns.getContext(), block);
}
