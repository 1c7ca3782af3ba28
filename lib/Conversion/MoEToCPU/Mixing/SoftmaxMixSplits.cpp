//===- SoftmaxMixSplits.cpp - Pairs of tokens, each taken once ------------===//

#include "SoftmaxMixSplits.h"

using namespace mlir;
using namespace mlir::moe;

/// Splits that run at once, over batches and heads: their sums are what a
/// kernel needs of memory.
static constexpr int64_t kSplitsAtOnce = 32;

/// Buffers have multiples of this, whole blocks of rows and of columns.
static constexpr int64_t kPaddedRows = 192;

static Value ceilDiv(Emitter &e, Value a, Value b) {
  return arith::CeilDivSIOp::create(e, a, b);
}

//===----------------------------------------------------------------------===//
// Set-up
//===----------------------------------------------------------------------===//

PairSplits::PairSplits(Emitter &e, Value tokens, int64_t blockRows,
                       int64_t splitRows, int64_t maxSplits)
    : blockColumns(getColumnVectors(e) * e.width), blockRows(blockRows), e(e) {
  assert(splitRows % blockRows == 0 && blockRows % kGroupRows == 0 &&
         kPaddedRows % blockRows == 0 && kPaddedRows % blockColumns == 0 &&
         "expected blocks that fill what they are parts of");
  numTokens = e.dim(tokens, 2);
  numHeads = e.dim(tokens, 1);
  numPairs = e.mul(e.dim(tokens, 0), numHeads);
  numBlocks = ceilDiv(e, numTokens, e.index(blockRows));
  numSplits = e.minSigned(ceilDiv(e, numTokens, e.index(splitRows)),
                          e.index(maxSplits));
  // Without a token there is no split.
  Value divisor = e.maxSigned(numSplits, e.index(1));
  numTurns = ceilDiv(e, numBlocks, divisor);
  numSlots = e.minSigned(numPairs, ceilDiv(e, e.index(kSplitsAtOnce), divisor));
  Value unit = e.index(kPaddedRows);
  paddedTokens = e.mul(ceilDiv(e, numTokens, unit), unit);
}

/// The outer size of a buffer for one batch and head.
Value PairSplits::getSize(bool perSplit, bool inBlocks) {
  Value size = paddedTokens;
  if (inBlocks)
    size = arith::DivSIOp::create(e, size, e.index(blockColumns));
  return perSplit ? e.mul(size, numSplits) : size;
}

Value PairSplits::allocate(ArrayRef<OpFoldResult> inner, bool perSplit,
                           bool inBlocks) {
  SmallVector<OpFoldResult> shape{e.mul(numSlots, getSize(perSplit, inBlocks))};
  llvm::append_range(shape, inner);
  if (inBlocks)
    shape.push_back(e.getIndexAttr(blockColumns));
  SmallVector<int64_t> sizes;
  Values dynamicSizes;
  dispatchIndexOpFoldResults(shape, dynamicSizes, sizes);
  auto type = MemRefType::get(sizes, e.getF32Type());
  buffers.push_back(
      memref::AllocOp::create(e, type, dynamicSizes, e.getI64IntegerAttr(64)));
  return buffers.back();
}

Value PairSplits::slice(Value buffer, Value slot, bool perSplit, Value split,
                        bool inBlocks) {
  Value size = getSize(perSplit, inBlocks);
  Value offset = e.mul(slot, size);
  if (split) {
    size = getSize(/*perSplit=*/false, inBlocks);
    offset = e.add(offset, e.mul(split, size));
  }
  int64_t rank = cast<MemRefType>(buffer.getType()).getRank();
  SmallVector<OpFoldResult> offsets(rank, e.getIndexAttr(0)), sizes{size};
  SmallVector<OpFoldResult> strides(rank, e.getIndexAttr(1));
  offsets.front() = offset;
  for (int64_t position = 1; position < rank; ++position)
    sizes.push_back(mlir::moe::getSize(e, buffer, position));
  return memref::SubViewOp::create(e, buffer, offsets, sizes, strides);
}

Value mlir::moe::sliceFrom(Emitter &e, Value rows, Value first) {
  SmallVector<OpFoldResult> offsets{first, e.getIndexAttr(0)};
  SmallVector<OpFoldResult> sizes{e.sub(e.dim(rows, 0), first),
                                  mlir::moe::getSize(e, rows, 1)};
  SmallVector<OpFoldResult> strides(2, e.getIndexAttr(1));
  return memref::SubViewOp::create(e, rows, offsets, sizes, strides);
}

void PairSplits::run(TaskBody split, TaskBody finish) {
  auto loop = scf::ForOp::create(e, e.index(0), numPairs, numSlots);
  {
    OpBuilder::InsertionGuard guard(e);
    e.setInsertionPoint(loop.getBody()->getTerminator());
    Value firstPair = loop.getInductionVar();
    Value count = e.minSigned(numSlots, e.sub(numPairs, firstPair));
    auto inParallel = [&](Value perPair, TaskBody body) {
      e.parallel(e.mul(count, perPair), [&](Value task) {
        Value slot = arith::DivSIOp::create(e, task, perPair);
        Value pair = e.add(firstPair, slot);
        body({arith::DivSIOp::create(e, pair, numHeads),
              arith::RemSIOp::create(e, pair, numHeads), slot,
              arith::RemSIOp::create(e, task, perPair)});
      });
    };
    inParallel(numSplits, split);
    inParallel(numBlocks, finish);
  }
  for (Value buffer : buffers)
    memref::DeallocOp::create(e, buffer);
}

//===----------------------------------------------------------------------===//
// Dealing out
//===----------------------------------------------------------------------===//

/// In every other turn blocks are dealt out in reverse order, because later
/// ones have fewer columns.
Value PairSplits::getFirstRow(Value split, Value turn) {
  Value isOdd =
      e.compare(arith::CmpIPredicate::ne, e.rest(turn, 2), e.index(0));
  Value reversed = e.sub(e.sub(numSplits, e.index(1)), split);
  Value block = e.add(e.mul(turn, numSplits), e.select(isOdd, reversed, split));
  return e.mul(block, e.index(blockRows));
}

void PairSplits::forEachBlock(Value split, function_ref<void(Value)> body) {
  e.loop(e.index(0), numTurns, 1, [&](Value turn) {
    Value first = getFirstRow(split, turn);
    e.ifThen(e.compare(arith::CmpIPredicate::slt, first, numTokens),
             [&] { body(first); });
  });
}

Value PairSplits::getEnd(Value firstColumn) {
  return e.minSigned(e.add(firstColumn, e.index(blockColumns)), numTokens);
}

void PairSplits::forEachBlockPair(Value split, function_ref<void(Value)> pack,
                                  function_ref<void(Value, Value)> multiply) {
  // Columns before the first row have taken the split's rows, as rows.
  Value firstRow = getFirstRow(split, e.index(0));
  Value begin = e.sub(firstRow, e.rest(firstRow, blockColumns));
  e.loop(begin, numTokens, blockColumns, [&](Value firstColumn) {
    pack(firstColumn);
    Value end = getEnd(firstColumn);
    e.loop(e.index(0), numTurns, 1, [&](Value turn) {
      Value first = getFirstRow(split, turn);
      e.ifThen(e.compare(arith::CmpIPredicate::slt, first, end),
               [&] { multiply(first, firstColumn); });
    });
  });
}

Value PairSplits::getNumRows(Value firstRow, Value firstColumn) {
  return e.minSigned(e.sub(getEnd(firstColumn), firstRow), e.index(blockRows));
}

void PairSplits::forEachGroup(Value firstRow, Value firstColumn,
                              function_ref<void(Value)> body) {
  e.loop(e.index(0), getNumRows(firstRow, firstColumn), kGroupRows, body);
}

void PairSplits::ifBefore(Value firstRow, Value firstColumn,
                          function_ref<void(Value)> body) {
  Value count = e.minSigned(e.sub(firstColumn, firstRow), e.index(blockRows));
  e.ifThen(e.compare(arith::CmpIPredicate::sgt, count, e.index(0)),
           [&] { body(count); });
}

Value PairSplits::isNotBehind(Value row, Value firstColumn) {
  return e.compare(arith::CmpIPredicate::slt, row,
                   e.add(firstColumn, e.index(blockColumns)));
}
