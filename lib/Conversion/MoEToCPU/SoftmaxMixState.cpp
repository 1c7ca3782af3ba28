//===- SoftmaxMixState.cpp - The online softmax of a group of rows --------===//

#include "SoftmaxMixState.h"

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
  PackedShape packed = getPackedShape(e, queries, all.features,
                                      getSize(e, all.features, 3));
  features = e.scratch(packed.sizes, packed.element);
  bias = e.scratch({size}, f32);
  if (all.level)
    level = e.scratch({size}, f32);
  if (all.values)
    values =
        e.scratch({size, padToVectors(e, getSize(e, all.values, 2))}, f32);
}

void KeyBlock::pack(Emitter &e, const MixKeys &keys, Value firstKey) const {
  Value numKeys = e.dim(keys.features, 0);
  for (int64_t vector = 0; vector < getColumnVectors(e); ++vector) {
    Value slot = e.index(vector * e.width), first = e.add(firstKey, slot);
    Values rows = clampRows(e, first, e.width, numKeys);
    Value exists = e.firstLanes(e.sub(numKeys, first));
    Value isReal = keys.mask ? loadLanes(e, keys.mask, rows) : Value();
    Value term = e.f32(0.0);
    if (keys.bias)
      term = e.loadFloats(keys.bias, {first}, exists);
    term = e.select(e.both(exists, isReal), term, e.f32(-kInfinity));
    e.storeVector(term, bias, {slot});
    if (level)
      e.storeVector(e.loadFloats(keys.level, {first}, exists), level, {slot});
    packTransposed(e, keys.features, rows, isReal, features, slot);
  }
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

Value RowState::update(Emitter &e, Value slot, ArrayRef<Value> logits,
                       Value weights, int64_t row) const {
  Type f32 = e.getF32Type();
  Value hidden = e.constant(f32, -kInfinity);
  Value oldMax = e.load(max, {slot});
  Value blockMax = logits.front();
  for (Value x : logits.drop_front())
    blockMax = e.max(x, blockMax);
  Value newMax = e.max(e.reduceMax(blockMax), oldMax);
  e.store(newMax, max, {slot});
  // Before the first visible key there is nothing to be relative to.
  Value isEmpty = e.compare(arith::CmpFPredicate::OEQ, newMax, hidden);
  Value shift = e.select(isEmpty, e.constant(f32, 0.0), newMax);
  Value decay = e.exp(e.splat(e.sub(oldMax, shift)));

  Values weightVectors, moments;
  for (auto [vector, x] : llvm::enumerate(logits)) {
    Value relative = e.sub(x, e.splat(shift));
    Value weight = e.exp(relative);
    weightVectors.push_back(weight);
    if (weights)
      e.storeVector(weight, weights, {e.index(row), e.index(vector * e.width)});
    if (moment) {
      // 0 ln 0 = 0: a hidden key's relative logit is kept finite.
      double lowest = std::numeric_limits<float>::lowest();
      moments.push_back(e.mul(weight, e.max(relative, e.f32(lowest))));
    }
  }
  Value zero = e.index(0);
  Value oldSum = e.loadVector(sum, {slot, zero});
  e.storeVector(e.fma(oldSum, decay, sumVectors(e, weightVectors)), sum,
                {slot, zero});
  if (moment) {
    Value wasEmpty = e.compare(arith::CmpFPredicate::OEQ, oldMax, hidden);
    Value drop = e.select(wasEmpty, e.constant(f32, 0.0), e.sub(oldMax, shift));
    Value old = e.loadVector(moment, {slot, zero});
    Value moved = e.mul(e.fma(oldSum, e.splat(drop), old), decay);
    e.storeVector(e.add(moved, sumVectors(e, moments)), moment, {slot, zero});
  }
  return decay;
}
