//===- SoftmaxMixBackwardPairs.cpp - The weights of pairs in gradients ----===//
//
// The first stage of the gradient on tensor cores: the products of rows and
// columns, what they weigh in the mixture, and their gradients.
//
//===----------------------------------------------------------------------===//

#include "SoftmaxMixBackwardTensor.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;

//===----------------------------------------------------------------------===//
// Products of rows
//===----------------------------------------------------------------------===//

/// rows columns^T of the warp's rows, by fragment of 8 columns.
Fragment TensorGradient::multiplyFeatures() {
  Value rowPlace = b.add(b.mul(rowWarp, b.i32(16)), leftRow());
  Value columnPlace = b.add(b.mul(b.div(lane, 16), b.i32(8)), b.rem(lane, 8));
  columnPlace = b.add(columnPlace, b.mul(sharer, b.i32(16 * plan.pieces)));
  Value rowUnit = b.div(lane, 16), columnUnit = b.rem(b.div(lane, 8), 2);
  SmallVector<Value> totals = b.loop(
      b.index(0), b.index(plan.numChunks), 1,
      SmallVector<Value>(8 * plan.pieces, b.f32(0.0)),
      [&](Value iteration, ValueRange old) -> SmallVector<Value> {
        Value chunk = b.toI32(iteration);
        Value left =
            b.at(rowFeatures, b.mul(chunk, b.i32(plan.tileRows * kChunkBytes)));
        Value right = b.at(columnFeatures,
                           b.mul(chunk, b.i32(plan.tileColumns * kChunkBytes)));
        Fragment sums(2 * plan.pieces, SmallVector<Value>(4, b.f32(0.0)));
        for (int64_t step = 0; step < kChunk / 16; ++step) {
          auto load = [&](Value base, Value row, Value unit) {
            unit = b.add(unit, b.i32(2 * step));
            return b.loadMatrices(b.at(base, b.swizzle(row, unit, kChunkBytes)),
                                  /*transpose=*/false);
          };
          SmallVector<Value> a = load(left, rowPlace, rowUnit);
          for (int64_t piece = 0; piece < plan.pieces; ++piece) {
            SmallVector<Value> rows =
                load(right, b.add(columnPlace, b.i32(16 * piece)), columnUnit);
            for (int64_t i = 0; i < 2; ++i)
              sums[2 * piece + i] =
                  b.multiplyAdd(a, ArrayRef(rows).slice(2 * i, 2),
                                sums[2 * piece + i], element);
          }
        }
        SmallVector<Value> next(old);
        for (auto [i, value] : llvm::enumerate(next))
          value = b.add(value, sums[i / 4][i % 4]);
        return next;
      });
  Fragment products;
  for (int64_t i = 0; i < 2 * plan.pieces; ++i)
    products.emplace_back(ArrayRef(totals).slice(4 * i, 4));
  return products;
}

/// The products of the values' rows: dmixed v^T, or its transpose.
Fragment TensorGradient::multiplyValues() {
  Fragment sums(2 * plan.pieces, SmallVector<Value>(4, b.f32(0.0)));
  if (!mix.v)
    return sums;
  int64_t rowBytes = 2 * plan.valueWidth;
  Value rowPlace = b.add(b.mul(rowWarp, b.i32(16)), leftRow());
  Value columnPlace = b.add(b.mul(b.div(lane, 16), b.i32(8)), b.rem(lane, 8));
  columnPlace = b.add(columnPlace, b.mul(sharer, b.i32(16 * plan.pieces)));
  SmallVector<Value> carried(8 * plan.pieces, b.f32(0.0));
  SmallVector<Value> totals = b.loop(
      b.index(0), b.index(plan.valueWidth / 16), 1, carried,
      [&](Value iteration, ValueRange old) -> SmallVector<Value> {
        Value firstUnit = b.mul(b.toI32(iteration), b.i32(2));
        auto load = [&](Value base, int64_t offset, Value row, Value unit) {
          unit = b.add(firstUnit, unit);
          return b.loadMatrices(
              b.at(b.at(base, b.swizzle(row, unit, rowBytes)), offset),
              /*transpose=*/false);
        };
        SmallVector<SmallVector<Value>> left;
        for (int64_t term = 0; term < plan.rowTerms; ++term)
          left.push_back(load(rowValues, term * plan.getRowValueBytes(),
                              rowPlace, b.div(lane, 16)));
        SmallVector<Value> next(old);
        for (int64_t piece = 0; piece < plan.pieces; ++piece) {
          SmallVector<SmallVector<Value>> right;
          for (int64_t term = 0; term < plan.columnTerms; ++term)
            right.push_back(load(columnValues,
                                 term * plan.getColumnValueBytes(),
                                 b.add(columnPlace, b.i32(16 * piece)),
                                 b.rem(b.div(lane, 8), 2)));
          addTermProducts(left, right,
                          MutableArrayRef(next).slice(8 * piece, 8));
        }
        return next;
      });
  for (auto [i, value] : llvm::enumerate(totals))
    sums[i / 4][i % 4] = value;
  return sums;
}

//===----------------------------------------------------------------------===//
// Pairs
//===----------------------------------------------------------------------===//

TokenFacts TensorGradient::getFacts(bool isQuery, Value row) {
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
PairTerms TensorGradient::getTerms(Value product, const TokenFacts &rowToken,
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
void TensorGradient::storePair(Value low, Value high, int64_t row,
                               int64_t fragment, Value base) {
  Value place =
      b.add(b.mul(rowWarp, b.i32(16)), b.add(b.div(lane, 4), b.i32(8 * row)));
  Value unit = b.add(b.mul(sharer, b.i32(2 * plan.pieces)), b.i32(fragment));
  Value at = b.at(base, b.swizzle(place, unit, 2 * plan.tileColumns));
  at = b.at(at, b.mul(b.rem(lane, 4), b.i32(4)));
  for (auto [term, packed] : llvm::enumerate(b.splitBF16(low, high, kF32Terms)))
    b.store(packed, b.at(at, term * plan.getPairBytes()), /*alignment=*/4);
}

/// Computes A and dx of the warp's pairs, brings them to shared memory, and
/// adds dx to the totals of the thread's two rows.
void TensorGradient::weigh(Value firstColumn, MutableArrayRef<Value> totals) {
  Fragment products = multiplyFeatures(), values = multiplyValues();
  Value zero = b.f32(0.0);
  for (int64_t fragment = 0; fragment < 2 * plan.pieces; ++fragment) {
    SmallVector<TokenFacts> facts;
    for (int64_t i = 0; i < 2; ++i) {
      Value place = b.add(b.mul(sharer, b.i32(16 * plan.pieces)),
                          b.mul(b.rem(lane, 4), b.i32(2)));
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
        PairTerms pair =
            getTerms(products[fragment][2 * row + i], rowToken, columnToken);
        Value x = logits.getLogit(b, pair);
        Value a = b.select(logits.isVisible(b, pair),
                           b.exp(b.sub(x, query.lse)), zero);
        Value dx = b.mul(a, b.sub(values[fragment][2 * row + i], query.delta));
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
