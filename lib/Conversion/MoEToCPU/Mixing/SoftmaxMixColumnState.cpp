//===- SoftmaxMixColumnState.cpp - The online softmax of columns ----------===//

#include "SoftmaxMixColumnState.h"

#include "Product/RegisterTile.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Buffers
//===----------------------------------------------------------------------===//

void ColumnState::allocate(OpFoldResult paddedValues) {
  allMax = splits.allocate({}, /*perSplit=*/true);
  allSums = splits.allocate({}, /*perSplit=*/true);
  allMixed =
      splits.allocate({paddedValues}, /*perSplit=*/true, /*inBlocks=*/true);
}

void ColumnState::takeViews(Value slot, Value split) {
  max = splits.slice(allMax, slot, true, split);
  sum = splits.slice(allSums, slot, true, split);
  mixed = splits.slice(allMixed, slot, true, split, /*inBlocks=*/true);
}

void ColumnState::clear() const {
  Value zero = e.index(0);
  e.loop(zero, splits.paddedTokens, e.width, [&](Value column) {
    e.storeVector(e.negInfinity(), max, {column});
    e.storeVector(e.f32(0.0), sum, {column});
  });
  e.loop(zero, e.dim(mixed, 0), 1, [&](Value block) {
    e.loop(zero, e.dim(mixed, 1), 1, [&](Value value) {
      for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
        e.storeVector(e.f32(0.0), mixed,
                      {block, value, e.index(vector * e.width)});
    });
  });
}

/// The number of the block of columns that a token is in.
Value ColumnState::getBlock(Value token) const {
  return arith::DivSIOp::create(e, token, e.index(splits.blockColumns));
}

/// Where a token is among those of all splits.
Value ColumnState::inSplit(Value split, Value token) const {
  return e.add(e.mul(split, splits.paddedTokens), token);
}

Value ColumnState::loadMax(Value split, Value first) const {
  return e.loadVector(max, {inSplit(split, first)});
}

Value ColumnState::loadSum(Value split, Value first) const {
  return e.loadVector(sum, {inSplit(split, first)});
}

Value ColumnState::getBlock(Value split, Value first) const {
  return getBlock(inSplit(split, first));
}

Value ColumnState::getOffset(Value first) const {
  return e.rest(first, splits.blockColumns);
}

Value ColumnState::loadMixed(Value block, Value value, Value offset) const {
  return e.loadVector(mixed, {block, value, offset});
}

//===----------------------------------------------------------------------===//
// A block of rows
//===----------------------------------------------------------------------===//

/// The maxima of the logits over the rows.
Values ColumnState::findMax(const ColumnUpdate &rows) const {
  int64_t numVectors = getColumnVectors(e);
  Values none(numVectors, e.negInfinity());
  return e.loop(
      e.index(0), rows.numRows, 1, none,
      [&](Value row, ValueRange old) -> Values {
        Values next;
        for (int64_t vector = 0; vector < numVectors; ++vector)
          next.push_back(softmax.updateMax(
              e.loadVector(rows.logits, {row, e.index(vector * e.width)}),
              old[vector]));
        return next;
      });
}

/// Turns logits into p = exp(x - shift) and returns its sums over the rows.
Values ColumnState::sumWeights(ArrayRef<Value> shifts,
                               const ColumnUpdate &rows) const {
  Values zeros(shifts.size(), e.f32(0.0));
  return e.loop(e.index(0), rows.numRows, 1, zeros,
                [&](Value row, ValueRange sums) -> Values {
                  Values next;
                  for (auto [vector, shift] : llvm::enumerate(shifts)) {
                    Values place{row, e.index(vector * e.width)};
                    Value weight =
                        softmax.weigh(e.loadVector(rows.logits, place), shift);
                    e.storeVector(weight, rows.logits, place);
                    next.push_back(e.add(sums[vector], weight));
                  }
                  return next;
                });
}

/// o' = a o + sum_i p_i v_i for `numValues` values from `firstValue` on.
void ColumnState::mixValues(Value firstColumn, ArrayRef<Value> decays,
                            const ColumnUpdate &rows, Value firstValue,
                            int64_t numValues) const {
  RegisterTile tile(e, numValues, decays.size());
  Values sums = loopOverK(
      e, e.index(0), rows.numRows, tile.getZeros(),
      [&](Value row, ValueRange old) {
        Values columns;
        for (int64_t vector = 0; vector < tile.numVectors; ++vector)
          columns.push_back(
              e.loadVector(rows.logits, {row, e.index(vector * e.width)}));
        auto splatValue = [&](int64_t i) {
          return e.splat(
              e.load(rows.values, {row, e.add(firstValue, e.index(i))}));
        };
        return tile.multiplyAdd(splatValue, columns, old);
      });
  tile.forEachSum(sums, [&](int64_t i, int64_t vector, Value sum) {
    Values place{getBlock(firstColumn), e.add(firstValue, e.index(i)),
                 e.index(vector * e.width)};
    Value old = e.loadVector(mixed, place);
    e.storeVector(e.fma(old, decays[vector], sum), mixed, place);
  });
}

void ColumnState::update(Value firstColumn, const ColumnUpdate &rows) const {
  Values blockMax = findMax(rows), shifts, decays;
  for (int64_t vector = 0; vector < getColumnVectors(e); ++vector) {
    Value place = at(firstColumn, vector);
    Value oldMax = e.loadVector(max, {place});
    Value newMax = softmax.updateMax(blockMax[vector], oldMax);
    e.storeVector(newMax, max, {place});
    SoftmaxStep step = softmax.start(oldMax, newMax);
    shifts.push_back(step.shift);
    decays.push_back(step.decay);
  }
  for (auto [vector, added] : llvm::enumerate(sumWeights(shifts, rows))) {
    Value place = at(firstColumn, vector);
    Value old = e.loadVector(sum, {place});
    e.storeVector(e.fma(old, decays[vector], added), sum, {place});
  }
  auto mix = [&](Value firstValue, int64_t numValues) {
    mixValues(firstColumn, decays, rows, firstValue, numValues);
  };
  std::optional<int64_t> numValues = getConstantIntValue(rows.numValues);
  if (!numValues)
    return e.loop(e.index(0), cast<Value>(rows.numValues), 1,
                  [&](Value value) { mix(value, 1); });
  int64_t rest = *numValues % kGroupRows, whole = *numValues - rest;
  if (whole)
    e.loop(e.index(0), e.index(whole), kGroupRows,
           [&](Value value) { mix(value, kGroupRows); });
  if (rest)
    mix(e.index(whole), rest);
}
