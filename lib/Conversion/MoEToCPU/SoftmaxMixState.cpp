//===- SoftmaxMixState.cpp - The online softmax of a group of rows --------===//

#include "SoftmaxMixState.h"

#include "llvm/Support/MathExtras.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

static constexpr double kInfinity = std::numeric_limits<double>::infinity();

//===----------------------------------------------------------------------===//
// Keys
//===----------------------------------------------------------------------===//

KeyBlock::KeyBlock(Emitter &e, Value queries, const MixKeys &all) {
  Type f32 = e.getF32Type();
  OpFoldResult size = e.getIndexAttr(getColumnVectors(e) * e.width);
  PackedShape packed =
      getPackedShape(e, queries, all.features, getSize(e, all.features, 3));
  features = e.scratch(packed.sizes, packed.element);
  bias = e.scratch({size}, f32);
  if (all.level)
    level = e.scratch({size}, f32);
  if (all.values)
    values =
        e.scratch({size, padToVectors(e, getLastSize(e, all.values))}, f32);
}

void KeyBlock::pack(Emitter &e, const MixKeys &keys, Value firstKey) const {
  Value numKeys = e.dim(keys.features, 0);
  Value size = e.index(getColumnVectors(e) * e.width);
  e.loop(e.index(0), size, e.width, [&](Value slot) {
    Value first = e.add(firstKey, slot);
    Values rows = clampRows(e, first, e.width, numKeys);
    Value exists = e.firstLanes(e.sub(numKeys, first));
    Value isReal = keys.mask ? loadLanes(e, keys.mask, rows) : Value();
    Value term = e.f32(0.0);
    if (keys.bias)
      term = e.loadFloats(keys.bias, {first}, exists);
    term = e.select(e.both(exists, isReal), term, e.negInfinity());
    e.storeVector(term, bias, {slot});
    if (level)
      e.storeVector(e.loadFloats(keys.level, {first}, exists), level, {slot});
    packTransposed(e, keys.features, rows, isReal, features, slot);
  });
  if (values)
    packRows(e, keys.values, firstKey, getColumnVectors(e) * e.width, bias,
             values);
}

//===----------------------------------------------------------------------===//
// Rows
//===----------------------------------------------------------------------===//

void RowState::clear(Emitter &e, Value first, Value end) const {
  Value zero = e.index(0);
  e.loop(first, end, 1, [&](Value slot) {
    e.store(e.constant(e.getF32Type(), -kInfinity), max, {slot});
    e.storeVector(e.f32(0.0), sum, {slot, zero});
    if (moment)
      e.storeVector(e.f32(0.0), moment, {slot, zero});
    if (mixed)
      e.loop(zero, e.dim(mixed, 1), e.width, [&](Value column) {
        e.storeVector(e.f32(0.0), mixed, {slot, column});
      });
  });
}

/// The maxima of at most `width` vectors, lane r that of vector r. Two vectors
/// are folded at once: what is left of both fills one.
static Value reduceMaxima(Emitter &e, ArrayRef<Value> vectors) {
  Values left(vectors);
  while (!llvm::isPowerOf2_64(left.size()))
    left.push_back(left.back());
  for (int64_t segment = e.width; segment > 1; segment /= 2) {
    // Each vector is a row of segments of lanes whose maximum is wanted.
    bool isPaired = left.size() > 1;
    SmallVector<int64_t> low, high;
    for (int64_t source : {int64_t(0), e.width})
      for (int64_t first = 0; first < e.width; first += segment)
        for (int64_t lane = 0; lane < segment / 2; ++lane) {
          int64_t from = first + lane + (isPaired ? source : 0);
          low.push_back(from);
          high.push_back(from + segment / 2);
        }
    Values next;
    for (size_t i = 0; i < left.size(); i += 2) {
      Value a = left[i], b = isPaired ? left[i + 1] : a;
      next.push_back(e.maxOrRhs(vector::ShuffleOp::create(e, a, b, low),
                                vector::ShuffleOp::create(e, a, b, high)));
    }
    left = next;
  }
  return left.front();
}

/// A lane as a vector.
static Value splatLane(Emitter &e, Value vector, int64_t lane) {
  return e.splat(vector::ExtractOp::create(e, vector, ArrayRef<int64_t>{lane}));
}

Values RowState::update(Emitter &e, Value slot, ArrayRef<Values> logits,
                        Value weights) const {
  Values decays;
  for (int64_t row = 0, end = logits.size(); row < end; row += e.width)
    llvm::append_range(
        decays, updateVector(e, e.add(slot, e.index(row)),
                             logits.slice(row, std::min(e.width, end - row)),
                             weights, row));
  return decays;
}

/// Rows are lanes, as far as they are numbers a row.
Values RowState::updateVector(Emitter &e, Value slot, ArrayRef<Values> logits,
                              Value weights, int64_t firstRow) const {
  int64_t numRows = logits.size();
  Value lanes = numRows < e.width ? e.firstLanes(e.index(numRows)) : Value();
  Value hidden = e.negInfinity(), zero = e.f32(0.0);
  Value oldMax = e.loadFloats(max, {slot}, lanes);
  Values blockMaxima;
  for (ArrayRef<Value> row : logits) {
    Value blockMax = row.front();
    for (Value x : row.drop_front())
      blockMax = e.maxOrRhs(x, blockMax);
    blockMaxima.push_back(blockMax);
  }
  Value newMax = e.maxOrRhs(reduceMaxima(e, blockMaxima), oldMax);
  e.storeVector(newMax, max, {slot}, lanes);
  // Before the first visible key there is nothing to be relative to.
  Value isEmpty = e.compare(arith::CmpFPredicate::OEQ, newMax, hidden);
  Value shift = e.select(isEmpty, zero, newMax);
  Value drop = e.sub(oldMax, shift);
  Value decay = e.exp(drop);
  Value wasEmpty = e.compare(arith::CmpFPredicate::OEQ, oldMax, hidden);
  Value finiteDrop = e.select(wasEmpty, zero, drop);

  Values decays;
  Value origin = e.index(0);
  for (auto [row, x] : llvm::enumerate(logits)) {
    Values place{e.add(slot, e.index(row)), origin}, moments;
    Value own = splatLane(e, decay, row);
    Value added = addRow(e, x, splatLane(e, shift, row), weights,
                         firstRow + row, moments);
    Value oldSum = e.loadVector(sum, place);
    e.storeVector(e.fma(oldSum, own, added), sum, place);
    if (moment) {
      Value old = e.loadVector(moment, place);
      Value moved = e.fma(oldSum, splatLane(e, finiteDrop, row), old);
      e.storeVector(e.add(e.mul(moved, own), sumVectors(e, moments)), moment,
                    place);
    }
    decays.push_back(own);
  }
  return decays;
}

/// Writes the weights of one row and returns their sum, one a lane; `moments`
/// are the terms of t where it is kept.
Value RowState::addRow(Emitter &e, ArrayRef<Value> logits, Value shift,
                       Value weights, int64_t row,
                       SmallVectorImpl<Value> &moments) const {
  Values sums;
  for (auto [vector, x] : llvm::enumerate(logits)) {
    Value relative = e.sub(x, shift);
    Value weight = e.exp(relative);
    sums.push_back(weight);
    if (weights)
      e.storeVector(weight, weights, {e.index(row), e.index(vector * e.width)});
    if (moment) {
      // 0 ln 0 = 0: a hidden key's relative logit is kept finite.
      double lowest = std::numeric_limits<float>::lowest();
      moments.push_back(e.mul(weight, e.maxOrRhs(relative, e.f32(lowest))));
    }
  }
  return sumVectors(e, sums);
}
