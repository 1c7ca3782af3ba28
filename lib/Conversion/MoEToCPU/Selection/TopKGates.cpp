//===- TopKGates.cpp - Their weights ------------------------------------===//
//
// The gates of the selected experts, and how results are written.
//
//===----------------------------------------------------------------------===//

#include "TopKKernel.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Gates
//===----------------------------------------------------------------------===//

/// s = score(x).
Value TopKKernel::applyScore(Value x, const RowStats &stats) {
  if (isElementwise(function))
    return buildScore(e, function, x);
  Value weight = e.exp(e.sub(x, getShift(e, stats.max)));
  return normalise(weight, stats.sumExp);
}

/// weight / sum, and 0 where the sum is 0 (E7).
Value TopKKernel::normalise(Value weight, Value sum) {
  Value isZero = e.compare(arith::CmpFPredicate::OEQ, sum, e.f32(0.0));
  return e.select(isZero, e.f32(0.0), e.div(weight, sum));
}

/// The scores x of `experts`, one a lane.
Value TopKKernel::gatherScores(const TokenBlock &block, Value experts,
                               Value valid) {
  Values lanes;
  Value ids = e.select(valid, experts, e.i32(0));
  for (auto [lane, row] : llvm::enumerate(block.rows)) {
    Value id = vector::ExtractOp::create(
        e, ids, ArrayRef<int64_t>{static_cast<int64_t>(lane)});
    lanes.push_back(e.toF32(e.load(scores, {row, e.toIndex(id)})));
  }
  return vector::FromElementsOp::create(e, e.floats(), lanes);
}

/// gates = renorm ? v / (sum v + eps) : v with v the scores at the places.
Places TopKKernel::computeGates(const TokenBlock &block, BestList &best,
                                const RowStats &stats) {
  bool inLogSpace = weighsInLogSpace();
  Places values(e, k, e.floats());
  // v, or ln v, and its maximum.
  Value max = forEachPlace(
      {e.negInfinity()}, [&](Place place, ValueRange carried) -> Values {
        Value key = best.keys.get(e, place);
        bool isOwnScore = !isForced && !isStaged;
        Value lowest =
            isForced ? e.i32(kEmptyKey) : toSortableKey(e, e.negInfinity());
        Value valid = e.compare(arith::CmpIPredicate::ne, key, lowest);
        Value x = isOwnScore
                      ? fromSortableKey(e, key)
                      : gatherScores(block, best.experts.get(e, place), valid);
        // A choice of -inf has gate 0. A key does not say so of one that is
        // forced or has a bias of NaN or +inf.
        if (isForced || op.getSelectBias())
          valid = e.both(
              valid, e.compare(arith::CmpFPredicate::UNE, x, e.negInfinity()));
        Value value;
        if (!inLogSpace)
          value = e.select(valid, applyScore(x, stats), e.f32(0.0));
        else
          value =
              e.select(valid, buildLogScore(e, function, x), e.negInfinity());
        values.set(e, place, value);
        return {e.maxOrRhs(value, carried[0])};
      })[0];
  if (!renorm)
    return values;

  Value shift = getShift(e, max);
  Value sum = forEachPlace({e.f32(0.0)},
                           [&](Place place, ValueRange carried) -> Values {
                             Value value = values.get(e, place);
                             if (inLogSpace) {
                               value = e.exp(e.sub(value, shift));
                               values.set(e, place, value);
                             }
                             return {e.add(carried[0], value)};
                           })[0];
  if (eps != 0.0)
    sum = e.add(sum, e.f32(eps));
  forEachPlace({}, [&](Place place, ValueRange) {
    values.set(e, place, normalise(values.get(e, place), sum));
    return Values();
  });
  return values;
}

/// Lanes whose token is real; null where all are.
Value TopKKernel::getTokenMask(const TokenBlock &block) {
  Value valid;
  if (mask) {
    Values lanes;
    for (Value row : block.rows)
      lanes.push_back(
          arith::ExtUIOp::create(e, e.getI32Type(), e.load(mask, {row})));
    Value vector = vector::FromElementsOp::create(e, e.ints(), lanes);
    valid = e.compare(arith::CmpIPredicate::ne, vector, e.i32(0));
  }
  if (validEnd) {
    Value count = e.sub(validEnd, block.first);
    // Lanes behind the last token repeat it, and its validity.
    if (block.exists)
      count =
          e.select(e.compare(arith::CmpIPredicate::sge, validEnd, numTokens),
                   e.index(e.width), count);
    valid = e.both(valid, e.firstLanes(count));
  }
  return valid;
}

//===----------------------------------------------------------------------===//
// Results
//===----------------------------------------------------------------------===//

/// Writes whole vectors of neighbouring tokens' places. `rows` is dense.
void TopKKernel::writeInterleaved(const TokenBlock &block, Value rows,
                                  Places &places) {
  SmallVector<ReassociationIndices> flat{{0, 1}};
  Value memory = memref::CollapseShapeOp::create(e, rows, flat);
  Value begin = e.mul(block.first, e.index(k));
  for (auto [i, vector] :
       llvm::enumerate(interleave(e, places.getRegisters()))) {
    Value position = e.add(begin, e.index(i * e.width));
    Value lanes;
    if (block.exists) {
      Value end = e.mul(numTokens, e.index(k));
      lanes = e.firstLanes(e.sub(end, position));
    }
    e.storeVector(vector, memory, {position}, lanes);
  }
}

void TopKKernel::writeResults(const TokenBlock &block, Places &gateValues,
                              Places &ids) {
  Type indexType = cast<MemRefType>(indices.getType()).getElementType();
  for (auto [memory, places, element] :
       {std::tuple<Value, Places *, Type>{gates, &gateValues, e.getF32Type()},
        {indices, &ids, indexType}}) {
    if (places->areRegisters() && llvm::isPowerOf2_64(k) &&
        isContiguousFrom(cast<MemRefType>(memory.getType()), 0)) {
      Values converted(places->getRegisters());
      if (memory == indices)
        for (Value &value : converted)
          value = e.castInt(value, element);
      Places dense(converted);
      writeInterleaved(block, memory, dense);
      continue;
    }
    forEachPlace({}, [&, memory = memory, places = places,
                      element = element](Place place, ValueRange) {
      Value value = places->get(e, place);
      if (memory == indices)
        value = e.castInt(value, element);
      for (auto [lane, row] : llvm::enumerate(block.rows)) {
        // In a partial block the last row is written again with its own value:
        // lanes behind it hold the same token.
        Value scalar = vector::ExtractOp::create(
            e, value, ArrayRef<int64_t>{static_cast<int64_t>(lane)});
        e.store(scalar, memory, {row, place.get(e)});
      }
      return Values();
    });
  }
}
