//===- SoftmaxMixBackwardPairs.cpp - The weights of pairs in gradients ----===//
//
// The first stage of the gradient on tensor cores: the products of own and
// other rows, what they weigh in the mixture, and their gradients.
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

/// own other^T of the warp's rows, by fragment of 8 other rows.
Fragment TensorSweep::multiplyFeatures() {
  Value ownRow = b.add(b.mul(rowWarp, b.i32(16)), leftRow());
  Value otherRow = b.add(b.mul(b.div(lane, 16), b.i32(8)), b.rem(lane, 8));
  otherRow = b.add(otherRow, b.mul(sharer, b.i32(16 * plan.pieces)));
  Value ownUnit = b.div(lane, 16), otherUnit = b.rem(b.div(lane, 8), 2);
  SmallVector<Value> totals = b.loop(
      b.index(0), b.index(plan.numChunks), 1,
      SmallVector<Value>(8 * plan.pieces, b.f32(0.0)),
      [&](Value iteration, ValueRange old) -> SmallVector<Value> {
        Value chunk = b.toI32(iteration);
        Value left =
            b.at(own, b.mul(chunk, b.i32(plan.ownRows * kSweepChunkBytes)));
        Value right = b.at(
            others, b.mul(chunk, b.i32(plan.otherRows * kSweepChunkBytes)));
        Fragment sums(2 * plan.pieces, SmallVector<Value>(4, b.f32(0.0)));
        for (int64_t step = 0; step < kSweepChunk / 16; ++step) {
          auto load = [&](Value base, Value row, Value unit) {
            unit = b.add(unit, b.i32(2 * step));
            return b.loadMatrices(
                b.at(base, b.swizzle(row, unit, kSweepChunkBytes)),
                /*transpose=*/false);
          };
          SmallVector<Value> a = load(left, ownRow, ownUnit);
          for (int64_t piece = 0; piece < plan.pieces; ++piece) {
            SmallVector<Value> rows =
                load(right, b.add(otherRow, b.i32(16 * piece)), otherUnit);
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
Fragment TensorSweep::multiplyValues() {
  Fragment sums(2 * plan.pieces, SmallVector<Value>(4, b.f32(0.0)));
  if (!sweep.v)
    return sums;
  int64_t rowBytes = 2 * plan.valueWidth;
  Value ownRow = b.add(b.mul(rowWarp, b.i32(16)), leftRow());
  Value otherRow = b.add(b.mul(b.div(lane, 16), b.i32(8)), b.rem(lane, 8));
  otherRow = b.add(otherRow, b.mul(sharer, b.i32(16 * plan.pieces)));
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
        for (int64_t plane = 0; plane < plan.ownPlanes; ++plane)
          left.push_back(load(ownValues, plane * plan.getOwnValueBytes(),
                              ownRow, b.div(lane, 16)));
        SmallVector<Value> next(old);
        for (int64_t piece = 0; piece < plan.pieces; ++piece) {
          SmallVector<SmallVector<Value>> right;
          for (int64_t plane = 0; plane < plan.otherPlanes; ++plane)
            right.push_back(load(otherValues, plane * plan.getOtherValueBytes(),
                                 b.add(otherRow, b.i32(16 * piece)),
                                 b.rem(b.div(lane, 8), 2)));
          addPlanes(left, right, MutableArrayRef(next).slice(8 * piece, 8));
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

RowFacts TensorSweep::getFacts(bool isQuery, Value row) {
  RowFacts facts;
  bool isOwn = isQuery == sweep.ofQueries;
  Value count = isOwn ? numOwn : numOthers;
  facts.place = b.minSigned(row, b.sub(count, b.index(1)));
  facts.position = isOwn ? b.add(row, origin) : row;
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
  facts.lse = b.loadF32(sweep.lse, {batch, head, facts.place});
  facts.delta = b.loadF32(sweep.delta, {batch, head, facts.place});
  // A query that sees nothing.
  facts.isReal = b.both(
      facts.isReal, b.compare(CmpFPredicate::UNE, facts.lse, b.negInfinity()));
  return facts;
}

/// What the pair of an own row and another one is made of.
PairTerms TensorSweep::getTerms(Value product, const RowFacts &mine,
                                const RowFacts &theirs) {
  const RowFacts &query = sweep.ofQueries ? mine : theirs;
  const RowFacts &key = sweep.ofQueries ? theirs : mine;
  PairTerms pair;
  pair.product = product;
  pair.biases = {key.bias};
  if (Value bias = op.getBias())
    pair.biases.push_back(
        loadPairBias(b, bias, batch, head, query.place, key.place));
  pair.row = mine.position;
  pair.column = theirs.position;
  pair.rowLevel = mine.level;
  pair.columnLevel = theirs.level;
  pair.isReal = b.both(query.isReal, key.isReal);
  return pair;
}

/// Writes two neighbouring pairs of the thread as planes.
void TensorSweep::storePair(Value low, Value high, int64_t row,
                            int64_t fragment, Value base) {
  Value place =
      b.add(b.mul(rowWarp, b.i32(16)), b.add(b.div(lane, 4), b.i32(8 * row)));
  Value unit = b.add(b.mul(sharer, b.i32(2 * plan.pieces)), b.i32(fragment));
  Value at = b.at(base, b.swizzle(place, unit, 2 * plan.otherRows));
  at = b.at(at, b.mul(b.rem(lane, 4), b.i32(4)));
  for (auto [plane, packed] : llvm::enumerate(b.splitBF16(low, high, kPlanes)))
    b.store(packed, b.at(at, plane * plan.getPairBytes()), /*alignment=*/4);
}

/// Computes A and dx of the warp's pairs, brings them to shared memory, and
/// adds dx to the totals of the thread's two rows.
void TensorSweep::weigh(Value firstOther, MutableArrayRef<Value> totals) {
  Fragment products = multiplyFeatures(), values = multiplyValues();
  Value zero = b.f32(0.0);
  for (int64_t fragment = 0; fragment < 2 * plan.pieces; ++fragment) {
    SmallVector<RowFacts> facts;
    for (int64_t i = 0; i < 2; ++i) {
      Value place = b.add(b.mul(sharer, b.i32(16 * plan.pieces)),
                          b.mul(b.rem(lane, 4), b.i32(2)));
      place = b.add(place, b.i32(8 * fragment + i));
      facts.push_back(
          getFacts(!sweep.ofQueries, b.add(firstOther, b.toIndex(place))));
    }
    for (int64_t row = 0; row < 2; ++row) {
      SmallVector<Value> as, dxs;
      for (int64_t i = 0; i < 2; ++i) {
        const RowFacts &mine = ownFacts[row], &theirs = facts[i];
        const RowFacts &query = sweep.ofQueries ? mine : theirs;
        const RowFacts &key = sweep.ofQueries ? theirs : mine;
        PairTerms pair =
            getTerms(products[fragment][2 * row + i], mine, theirs);
        Value x = logits.getLogit(b, pair);
        Value a = b.select(logits.isVisible(b, pair),
                           b.exp(b.sub(x, query.lse)), zero);
        Value dx = b.mul(a, b.sub(values[fragment][2 * row + i], query.delta));
        dx = b.select(b.compare(CmpFPredicate::OEQ, a, zero), zero, dx);
        if (sweep.dbias)
          storeBiasGradient(b, sweep.dbias,
                            {batch, head, query.place, key.place},
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
