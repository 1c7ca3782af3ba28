//===- SoftmaxMixBackwardPairs.cpp - The weights of pairs in gradients ----===//
//
// The first stage of the gradient on tensor cores: the products of rows and
// columns, what they weigh in the mixture, and their gradients.
//
//===----------------------------------------------------------------------===//

#include "SoftmaxMixBackwardPairs.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;

GradientPairs::GradientPairs(WarpBuilder &b, MixGradient mix,
                             const GradientPlan &plan)
    : b(b), mix(mix), op(mix.op),
      logits(mix.op, /*isTransposed=*/!mix.ofQueries), plan(plan),
      element(getElementTypeOrSelf(mix.getRows())), thread(b.thread()),
      lane(b.lane()) {
  Value warp = b.div(thread, kWarpSize);
  sharer = b.rem(warp, plan.sharing);
  warpRow = b.mul(b.div(warp, plan.sharing), b.i32(16));
  warpColumn = b.mul(sharer, b.i32(16 * plan.pieces));
  rowFeatures = b.reserveShared(plan.getBytes());
  columnFeatures = b.at(rowFeatures, plan.getRowBytes());
  rowValues = b.at(columnFeatures, plan.getColumnBytes());
  columnValues = b.at(rowValues, plan.rowValues.getBytes());
  gradients = b.at(columnValues, plan.columnValues.getBytes());
  weights = b.at(gradients, kF32Terms * plan.getPairBytes());
  partSums =
      b.at(gradients, kF32Terms * (plan.hasDv ? 2 : 1) * plan.getPairBytes());
  auto getNumTokens = [&](Value rows) -> Value {
    return memref::DimOp::create(b, rows, b.index(2));
  };
  numRows = getNumTokens(mix.getRows());
  numColumns = getNumTokens(mix.getColumns());
  origin = mix.origin ? mix.origin : b.sub(numColumns, numRows);
}

void GradientPairs::startTile(Value batchIndex, Value headIndex, Value row) {
  batch = batchIndex;
  head = headIndex;
  firstRow = row;
}

void GradientPairs::loadRowFacts() {
  rowFacts.clear();
  for (int64_t row = 0; row < 2; ++row) {
    Value place = b.add(warpRow, b.add(b.div(lane, 4), b.i32(8 * row)));
    rowFacts.push_back(
        getFacts(mix.ofQueries, b.add(firstRow, b.toIndex(place))));
  }
}

Value GradientPairs::isReal(Value row, Value count, Value mask) {
  Value exists = b.less(row, count);
  if (!mask)
    return exists;
  Value last = b.sub(count, b.index(1));
  Value unmasked = memref::LoadOp::create(
      b, mask, ValueRange{batch, b.minSigned(row, last)});
  return b.both(exists, unmasked);
}

//===----------------------------------------------------------------------===//
// Products of rows
//===----------------------------------------------------------------------===//

void mlir::moe::addTermProducts(WarpBuilder &b,
                                ArrayRef<SmallVector<Value>> left,
                                ArrayRef<SmallVector<Value>> right,
                                MutableArrayRef<Value> sums) {
  for (int64_t term = right.size() - 1; term >= 0; --term) {
    int64_t most = std::min<int64_t>(left.size(), kF32Terms - term);
    for (int64_t part = most - 1; part >= 0; --part)
      for (int64_t i = 0; i < 2; ++i) {
        MutableArrayRef<Value> sum = sums.slice(4 * i, 4);
        llvm::copy(b.multiplyAdd(left[part],
                                 ArrayRef(right[term]).slice(2 * i, 2),
                                 ValueRange(sum), b.getBF16Type()),
                   sum.begin());
      }
  }
}

/// rows columns^T of the warp's rows, by fragment of 8 columns.
SmallVector<Value> GradientPairs::multiplyFeatures() {
  return b.loop(
      b.index(0), b.index(plan.numChunks), 1,
      SmallVector<Value>(8 * plan.pieces, b.f32(0.0)),
      [&](Value iteration, ValueRange old) {
        Value chunk = b.toI32(iteration);
        Value rows =
            b.at(rowFeatures, b.mul(chunk, b.i32(plan.tileRows * kChunkBytes)));
        Value columns =
            b.at(columnFeatures,
                 b.mul(chunk, b.i32(plan.tileColumns * kChunkBytes)));
        auto loadLeft = [&](int64_t, int64_t step) {
          return b.loadLeft(rows, warpRow, b.i32(2 * step), kChunkBytes);
        };
        auto loadRight = [&](int64_t piece, int64_t step) {
          return b.loadRight(columns, warpColumn, b.i32(2 * step), kChunkBytes,
                             piece * 16 * kChunkBytes);
        };
        return addChunkProducts(b, element, /*numLeft=*/1, loadLeft,
                                plan.pieces, loadRight, old);
      });
}

/// The products of the values' rows, likewise: dmixed v^T, or its transpose.
SmallVector<Value> GradientPairs::multiplyValues() {
  SmallVector<Value> zeros(8 * plan.pieces, b.f32(0.0));
  if (!mix.v)
    return zeros;
  return b.loop(
      b.index(0), b.index(plan.rowValues.width / 16), 1, zeros,
      [&](Value iteration, ValueRange old) -> SmallVector<Value> {
        Value unit = b.mul(b.toI32(iteration), b.i32(2));
        Fragment left;
        for (int64_t term = 0; term < plan.rowValues.terms; ++term)
          left.push_back(b.loadLeft(rowValues, warpRow, unit,
                                    plan.rowValues.getRowBytes(),
                                    term * plan.rowValues.getTermBytes()));
        SmallVector<Value> next(old);
        for (int64_t piece = 0; piece < plan.pieces; ++piece) {
          Fragment right;
          for (int64_t term = 0; term < plan.columnValues.terms; ++term)
            right.push_back(b.loadRight(
                columnValues, warpColumn, unit, plan.columnValues.getRowBytes(),
                term * plan.columnValues.getTermBytes() +
                    piece * 16 * plan.columnValues.getRowBytes()));
          addTermProducts(b, left, right,
                          MutableArrayRef(next).slice(8 * piece, 8));
        }
        return next;
      });
}

//===----------------------------------------------------------------------===//
// Pairs
//===----------------------------------------------------------------------===//

TokenFacts GradientPairs::getFacts(bool isQuery, Value row) {
  TokenFacts facts;
  bool isRow = isQuery == mix.ofQueries;
  Value count = isRow ? numRows : numColumns;
  facts.place = b.minSigned(row, b.sub(count, b.index(1)));
  facts.position = isRow ? b.add(row, origin) : row;
  facts.exists = b.less(row, count);
  facts.isReal =
      isReal(row, count, isQuery ? op.getQueryMask() : op.getKeyMask());
  if (Value level = isQuery ? op.getQueryLevel() : op.getKeyLevel())
    facts.level = b.loadF32(level, {batch, facts.place});
  if (!isQuery) {
    if (op.getKeyBias())
      facts.bias = b.loadF32(op.getKeyBias(), {batch, head, facts.place});
    return facts;
  }
  facts.lse = b.loadF32(mix.lse, {batch, head, facts.place});
  facts.delta = b.loadF32(mix.delta, {batch, head, facts.place});
  // A query that sees nothing.
  facts.isReal = b.both(
      facts.isReal, b.compare(CmpFPredicate::UNE, facts.lse, b.negInfinity()));
  return facts;
}

/// What the pair of a row and a column is made of.
PairTerms GradientPairs::getTerms(Value product, const TokenFacts &rowToken,
                                  const TokenFacts &columnToken) {
  const TokenFacts &query = mix.ofQueries ? rowToken : columnToken;
  const TokenFacts &key = mix.ofQueries ? columnToken : rowToken;
  PairTerms pair;
  pair.product = product;
  pair.biases = {key.bias};
  if (Value bias = op.getBias())
    pair.biases.push_back(
        loadPairBias(b, bias, batch, head, query.place, key.place));
  pair.row = rowToken.position;
  pair.column = columnToken.position;
  pair.rowLevel = rowToken.level;
  pair.columnLevel = columnToken.level;
  pair.isReal = b.both(query.isReal, key.isReal);
  return pair;
}

/// Writes two neighbouring pairs of the thread as terms.
void GradientPairs::storePair(Value low, Value high, int64_t row,
                              int64_t fragment, Value base) {
  Value place = b.add(warpRow, b.add(b.div(lane, 4), b.i32(8 * row)));
  Value unit = b.add(b.mul(sharer, b.i32(2 * plan.pieces)), b.i32(fragment));
  Value at = b.at(base, b.swizzle(place, unit, 2 * plan.tileColumns));
  at = b.at(at, b.mul(b.rem(lane, 4), b.i32(4)));
  for (auto [term, packed] : llvm::enumerate(b.splitBF16(low, high, kF32Terms)))
    b.store(packed, b.at(at, term * plan.getPairBytes()), /*alignment=*/4);
}

void GradientPairs::weigh(Value firstColumn, MutableArrayRef<Value> totals) {
  SmallVector<Value> products = multiplyFeatures(), values = multiplyValues();
  Value zero = b.f32(0.0);
  for (int64_t fragment = 0; fragment < 2 * plan.pieces; ++fragment) {
    SmallVector<TokenFacts> facts;
    for (int64_t i = 0; i < 2; ++i) {
      Value place = b.add(warpColumn, b.mul(b.rem(lane, 4), b.i32(2)));
      place = b.add(place, b.i32(8 * fragment + i));
      facts.push_back(
          getFacts(!mix.ofQueries, b.add(firstColumn, b.toIndex(place))));
    }
    for (int64_t row = 0; row < 2; ++row) {
      SmallVector<Value> as, dxs;
      for (int64_t i = 0; i < 2; ++i) {
        const TokenFacts &rowToken = rowFacts[row], &columnToken = facts[i];
        const TokenFacts &query = mix.ofQueries ? rowToken : columnToken;
        const TokenFacts &key = mix.ofQueries ? columnToken : rowToken;
        int64_t number = 4 * fragment + 2 * row + i;
        PairTerms pair = getTerms(products[number], rowToken, columnToken);
        Value x = logits.getLogit(b, pair);
        Value a = b.select(logits.isVisible(b, pair),
                           b.exp(b.sub(x, query.lse)), zero);
        Value dx = b.mul(a, b.sub(values[number], query.delta));
        dx = b.select(b.compare(CmpFPredicate::OEQ, a, zero), zero, dx);
        if (mix.dbias)
          storeBiasGradient(b, mix.dbias, {batch, head, query.place, key.place},
                            b.both(query.exists, key.exists), dx);
        totals[row] = b.add(totals[row], dx);
        as.push_back(a);
        dxs.push_back(dx);
      }
      storePair(dxs[0], dxs[1], row, fragment, gradients);
      if (plan.hasDv)
        storePair(as[0], as[1], row, fragment, weights);
    }
  }
}
