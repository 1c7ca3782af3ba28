//===- TokenRows.cpp - moe.token_rows to a grid ---------------------------===//
//
//   loop 1   rows[r] = 0
//   loop 2   rows[slots[n, k]] = n, where that is a row
//
// No row is written twice in a loop, so that no order matters. Where there are
// few, loop 1 has no block, which makes it no launch, and the only block of
// loop 2 clears the rows first.
//
//===----------------------------------------------------------------------===//

#include "Emit/ThreadBuilder.h"
#include "ThreadLowerings.h"

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// Rows and assignments of a thread, together, where there are many.
static constexpr int64_t kItems = 8;
/// The grids grow by so many blocks: below them, one block is enough.
static constexpr int64_t kBlockStep = 4;
/// Slots whose loads are in flight together.
static constexpr int64_t kSlotsAtATime = 4;

namespace {
class RowsOfBlock {
public:
  RowsOfBlock(ThreadBuilder &b, TokenRowsOp op, BlockShape block, Value number,
              Value numBlocks)
      : b(b), block(block), slots(op.getSlots()), rows(op.getOuts()[0]),
        number(number), numBlocks(numBlocks) {
    thread = gpu::ThreadIdOp::create(b, gpu::Dimension::x);
  }

  /// Sets the block's part of the rows to 0.
  void clear();
  /// Writes the tokens of the block's part of the assignments.
  void place();

private:
  struct Assignment {
    Value token, row, hasRow;
  };
  /// Assignment `number`, if it lies before `end`.
  Assignment read(Value number, Value end);
  std::pair<Value, Value> getOwn(Value count) {
    return getPart(b, count, number, numBlocks, kWarpSize);
  }
  void write(Value token, Value row) {
    Type element = cast<MemRefType>(rows.getType()).getElementType();
    memref::StoreOp::create(b, b.castInt(token, element), rows, row);
  }

  ThreadBuilder &b;
  BlockShape block;
  Value slots, rows, number, numBlocks, thread;
};
} // namespace

void RowsOfBlock::clear() {
  auto [begin, end] = getOwn(memref::DimOp::create(b, rows, b.index(0)));
  b.loop(b.add(begin, thread), end, block.numThreads,
         [&](Value row) { write(b.index(0), row); });
}

RowsOfBlock::Assignment RowsOfBlock::read(Value number, Value end) {
  Value isReal = b.compare(CmpIPredicate::ult, number, end);
  // What lies behind the end reads the last one; there is one.
  number = b.toI32(b.op<arith::MinUIOp>(number, b.sub(end, b.index(1))));
  Value choices = b.toI32(memref::DimOp::create(b, slots, b.index(1)));
  Value token = b.op<arith::DivUIOp>(number, choices);
  Value place = b.sub(number, b.mul(token, choices));
  token = b.toIndex(token);
  Value row = b.toIndex(
      memref::LoadOp::create(b, slots, ValueRange{token, b.toIndex(place)}));
  // As an unsigned number a negative one is large.
  Value numRows = memref::DimOp::create(b, rows, b.index(0));
  return {token, row,
          b.both(isReal, b.compare(CmpIPredicate::ult, row, numRows))};
}

void RowsOfBlock::place() {
  auto [begin, end] = getOwn(getNumRows(b, slots, /*numInner=*/0));
  auto placeSome = [&, end = end](Value first) {
    SmallVector<Assignment> assignments;
    for (int64_t i = 0; i < kSlotsAtATime; ++i)
      assignments.push_back(
          read(b.add(first, b.index(i * block.numThreads)), end));
    for (const Assignment &a : assignments)
      b.ifThen(a.hasRow, [&] { write(a.token, a.row); });
  };
  b.loop(begin, end, kSlotsAtATime * block.numThreads,
         [&](Value first) { placeSome(b.add(first, thread)); });
}

namespace {
struct TokenRowsToGrid : OpRewritePattern<TokenRowsOp> {
  TokenRowsToGrid(MLIRContext *context, BlockShape block)
      : OpRewritePattern(context), block(block) {}

  LogicalResult matchAndRewrite(TokenRowsOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics())
      return rewriter.notifyMatchFailure(op, "expected buffers");
    ThreadBuilder b(op.getLoc(), rewriter);
    OpFoldResult numBlocks = getNumBlocks(b, op);
    Value blocks = getValueOrCreateConstantIndexOp(b, b.getLoc(), numBlocks);
    if (getConstantIntValue(numBlocks) != 0) {
      OpBuilder::InsertionGuard guard(b);
      Value number = createGrid(b, numBlocks);
      RowsOfBlock(b, op, block, number, blocks).clear();
    }
    {
      OpBuilder::InsertionGuard guard(b);
      OpFoldResult oneMore = affine::makeComposedFoldedAffineApply(
          b, b.getLoc(), b.getAffineSymbolExpr(0) + 1, {numBlocks});
      Value number = createGrid(b, oneMore);
      Value isOnly = b.compare(CmpIPredicate::eq, blocks, b.index(0));
      RowsOfBlock own(b, op, block, number, b.add(blocks, b.index(1)));
      b.ifThen(isOnly, [&] {
        own.clear();
        gpu::BarrierOp::create(b);
      });
      own.place();
    }
    rewriter.eraseOp(op);
    return success();
  }

private:
  /// The blocks of loop 1.
  OpFoldResult getNumBlocks(ThreadBuilder &b, TokenRowsOp op) const {
    Location loc = b.getLoc();
    SmallVector<OpFoldResult> sizes{
        memref::getMixedSize(b, loc, op.getSlots(), 0),
        memref::getMixedSize(b, loc, op.getSlots(), 1),
        memref::getMixedSize(b, loc, op.getOuts()[0], 0)};
    AffineExpr items = b.getAffineSymbolExpr(0) * b.getAffineSymbolExpr(1) +
                       b.getAffineSymbolExpr(2);
    int64_t perStep = kBlockStep * kItems * block.numThreads;
    return affine::makeComposedFoldedAffineApply(
        b, loc, items.floorDiv(perStep) * kBlockStep, sizes);
  }

  BlockShape block;
};
} // namespace

void mlir::moe::populateTokenRowsToGridPatterns(RewritePatternSet &patterns,
                                                BlockShape block) {
  patterns.add<TokenRowsToGrid>(patterns.getContext(), block);
}
