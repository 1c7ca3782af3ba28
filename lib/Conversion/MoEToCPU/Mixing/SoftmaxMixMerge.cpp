//===- SoftmaxMixMerge.cpp - Results from the states of splits ------------===//

#include "SoftmaxMixMerge.h"

using namespace mlir;
using namespace mlir::moe;

/// The maxima of a vector of tokens over their own state and all splits'.
Value StateMerge::findMax(Value first) const {
  Values own{e.loadVector(rows.max, {first})};
  return e
      .loop(e.index(0), splits.numSplits, 1, own,
            [&](Value split, ValueRange old) -> Values {
              return {softmax.updateMax(columns.loadMax(split, first), old[0])};
            })
      .front();
}

/// The sums of a vector of tokens over their own, which has a factor `own`, and
/// all splits'.
Value StateMerge::addSums(Value own, Value first, Value factors) const {
  Values lanes;
  for (int64_t lane = 0; lane < e.width; ++lane)
    lanes.push_back(
        e.loadVector(rows.sum, {e.add(first, e.index(lane)), e.index(0)}));
  Values start{e.mul(sumTree(e, transposeLanes(e, lanes)), own)};
  return e
      .loop(e.index(0), splits.numSplits, 1, start,
            [&](Value split, ValueRange old) -> Values {
              Value factor = e.loadVector(factors, {split, e.index(0)});
              return {e.fma(columns.loadSum(split, first), factor, old[0])};
            })
      .front();
}

/// mixed of a vector of tokens: a factor of their own state, a sum, and whether
/// there is nothing to mix, each a number a token.
void StateMerge::writeMixed(Value first, ArrayRef<Value> own,
                            ArrayRef<Value> sums, ArrayRef<Value> isEmpty,
                            Value factors, Value mixed) const {
  Value numValues = e.dim(tokens.values, 1);
  Value offset = columns.getOffset(first);
  e.loop(e.index(0), numValues, e.width, [&](Value column) {
    Values zeros(e.width, e.f32(0.0));
    Values totals =
        e.loop(e.index(0), splits.numSplits, 1, zeros,
               [&](Value split, ValueRange old) -> Values {
                 Value factor = e.loadVector(factors, {split, e.index(0)});
                 Value block = columns.getBlock(split, first);
                 Values next;
                 for (int64_t lane = 0; lane < e.width; ++lane) {
                   Value value = e.add(column, e.index(lane));
                   Value part = columns.loadMixed(block, value, offset);
                   next.push_back(e.fma(part, factor, old[lane]));
                 }
                 return next;
               });
    Value exists = e.firstLanes(e.sub(numValues, column));
    for (auto [lane, others] : llvm::enumerate(transposeLanes(e, totals))) {
      Value token = e.add(first, e.index(lane));
      Value total = e.fma(e.loadVector(rows.mixed, {token, column}),
                          e.splat(own[lane]), others);
      Value value = e.select(isEmpty[lane], e.f32(0.0),
                             e.div(total, e.splat(sums[lane])));
      e.ifThen(e.compare(arith::CmpIPredicate::slt, token, splits.numTokens),
               [&, column = column] {
                 e.storeVector(value, mixed, {token, column}, exists);
               });
    }
  });
}

void StateMerge::writeResults(Value first, Value factors, Value mixed,
                              Value lse) const {
  Value max = findMax(first);
  SoftmaxStep step = softmax.start(e.loadVector(rows.max, {first}), max);
  e.loop(e.index(0), splits.numSplits, 1, [&](Value split) {
    Value old = columns.loadMax(split, first);
    e.storeVector(softmax.weigh(old, step.shift), factors, {split, e.index(0)});
  });
  SoftmaxSums sums{addSums(step.decay, first, factors), Value()};
  Value isReal;
  if (tokens.mask)
    isReal = loadLanes(e, tokens.mask,
                       clampRows(e, first, e.width, splits.numTokens));
  OnlineSoftmax::Result result = softmax.finish(max, sums, isReal);
  e.storeVector(result.lse, lse, {first},
                e.firstLanes(e.sub(splits.numTokens, first)));
  auto split = [&](Value vector) {
    Values lanes;
    for (int64_t lane = 0; lane < e.width; ++lane)
      lanes.push_back(
          vector::ExtractOp::create(e, vector, ArrayRef<int64_t>{lane}));
    return lanes;
  };
  writeMixed(first, split(step.decay), split(sums.sum), split(result.isEmpty),
             factors, mixed);
}
