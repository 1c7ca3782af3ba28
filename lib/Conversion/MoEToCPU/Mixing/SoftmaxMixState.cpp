//===- SoftmaxMixState.cpp - The online softmax of a group of rows --------===//

#include "SoftmaxMixState.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Keys
//===----------------------------------------------------------------------===//

KeyBlock::KeyBlock(Emitter &e, Value queries, const MixKeys &all,
                   bool pairValues) {
  Type f32 = e.getF32Type();
  int64_t numKeys = getColumnVectors(e) * e.width;
  OpFoldResult size = e.getIndexAttr(numKeys);
  PackedShape packed =
      getPackedShape(e, queries, all.features, getSize(e, all.features, 3));
  features = e.scratch(packed.sizes, packed.element);
  bias = e.scratch({size}, f32);
  if (all.level)
    level = e.scratch({size}, f32);
  if (!all.values)
    return;
  OpFoldResult width = padToVectors(e, getLastSize(e, all.values));
  pairValues &= e.target.bf16Dot && getElementType(all.values).isBF16();
  values = pairValues
               ? e.scratch({e.getIndexAttr(numKeys / 2), width}, e.getI32Type())
               : e.scratch({size, width}, f32);
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

/// Stores a vector of f32 in the type of `weights`.
static void storeWeights(Emitter &e, Value vector, Value weights,
                         ValueRange indices) {
  Type element = getElementType(weights);
  if (!element.isF32())
    vector = arith::TruncFOp::create(e, e.vectorOf(element), vector);
  e.storeVector(vector, weights, indices);
}

/// Rows are lanes, as far as they are numbers a row.
Values RowState::updateVector(Emitter &e, Value slot, ArrayRef<Values> logits,
                              Value weights, int64_t firstRow) const {
  int64_t numRows = logits.size();
  Value lanes = numRows < e.width ? e.firstLanes(e.index(numRows)) : Value();
  Value oldMax = e.loadFloats(max, {slot}, lanes);
  OnlineSoftmax softmax(e);
  Values blockMaxima;
  for (ArrayRef<Value> row : logits) {
    Value blockMax = row.front();
    for (Value x : row.drop_front())
      blockMax = softmax.updateMax(x, blockMax);
    blockMaxima.push_back(blockMax);
  }
  Value newMax = softmax.updateMax(reduceMaxima(e, blockMaxima), oldMax);
  e.storeVector(newMax, max, {slot}, lanes);
  SoftmaxStep step = softmax.start(oldMax, newMax);

  Values decays;
  Value origin = e.index(0);
  for (auto [row, x] : llvm::enumerate(logits)) {
    Values place{e.add(slot, e.index(row)), origin};
    SoftmaxStep own{splatLane(e, step.shift, row),
                    splatLane(e, step.decay, row),
                    moment ? splatLane(e, step.drop, row) : Value()};
    SoftmaxSums sums{e.loadVector(sum, place),
                     moment ? e.loadVector(moment, place) : Value()};
    Values blockWeights(x);
    softmax.add(sums, own, blockWeights);
    e.storeVector(sums.sum, sum, place);
    if (moment)
      e.storeVector(sums.moment, moment, place);
    if (weights)
      for (auto [vector, weight] : llvm::enumerate(blockWeights))
        storeWeights(e, weight, weights,
                     {e.index(firstRow + row), e.index(vector * e.width)});
    decays.push_back(own.decay);
  }
  return decays;
}
