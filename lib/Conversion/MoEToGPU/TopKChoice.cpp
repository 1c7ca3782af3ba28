//===- TopKChoice.cpp - Scores by which experts are chosen ----------------===//

#include "TopKSelection.h"

#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

//===----------------------------------------------------------------------===//
// Choice scores
//===----------------------------------------------------------------------===//

Value RowSelection::score(Value x) {
  if (isElementwise(form.function))
    return buildScore(b, form.function, x);
  Value weight = b.exp(b.sub(x, rowMax));
  Value isEmpty = b.compare(CmpFPredicate::OEQ, rowSum, b.f32(0.0));
  return b.div(weight, b.select(isEmpty, b.f32(1.0), rowSum));
}

SmallVector<Value> RowSelection::getChoiceScores() {
  if (form.choosesByScores && op.getNGroup() == 1)
    return scores;
  SmallVector<Value> choice;
  for (auto [j, x] : llvm::enumerate(scores)) {
    Value c = form.choosesByScores ? x : score(x);
    if (Value bias = op.getSelectBias()) {
      Value expert = experts[j];
      if (exists(j))
        expert = b.minSigned(expert, b.i32(numExperts - 1));
      c = b.add(c, b.loadF32(bias, b.toIndex(expert)));
    }
    choice.push_back(c);
  }
  return choice;
}

Value RowSelection::isInGroup(int64_t j, int64_t group) {
  int64_t size = numExperts / op.getNGroup();
  int64_t first = shape.getFirstExpert(j);
  int64_t last = first + (shape.lanes - 1) * shape.width;
  int64_t begin = group * size, end = begin + size;
  if (last < begin || first >= end)
    return {};
  if (first >= begin && last < end)
    return b.boolean(true);
  return b.both(b.compare(CmpIPredicate::sge, experts[j], b.i32(begin)),
                b.compare(CmpIPredicate::slt, experts[j], b.i32(end)));
}

/// The value of each group, the same in all lanes. A NaN counts as -inf here:
/// the gates of its row are NaN whatever is selected.
SmallVector<Value> RowSelection::getGroupValues(ArrayRef<Value> choice) {
  int64_t numGroups = op.getNGroup();
  bool sumsTwo =
      op.getGroupScore() == GroupScore::Top2Sum && numExperts / numGroups > 1;
  Value lowest = b.negInfinity();
  SmallVector<Value> values;
  for (int64_t group = 0; group < numGroups; ++group) {
    // The two largest of a set that is the union of two sets:
    // first = max(first, first'), second = max(min(first, first'), second,
    // second').
    Value first = lowest, second = lowest;
    auto merge = [&](Value otherFirst, Value otherSecond) {
      Value lower = b.minimumNumber(first, otherFirst);
      first = maximum(first, otherFirst);
      second = maximum(maximum(second, otherSecond), lower);
    };
    for (int64_t j = 0; j < shape.keysPerLane; ++j)
      if (Value inGroup = isInGroup(j, group))
        merge(maximum(b.select(inGroup, choice[j], lowest), lowest), lowest);
    for (int64_t distance = 1; distance < shape.lanes; distance *= 2) {
      Value otherFirst = b.shuffleXor(first, distance);
      Value otherSecond =
          sumsTwo ? b.shuffleXor(second, distance) : Value(lowest);
      merge(otherFirst, otherSecond);
    }
    values.push_back(sumsTwo ? b.add(first, second) : first);
  }
  return values;
}

/// Whether each expert of the lane is outside of the topk_group best groups.
SmallVector<Value> RowSelection::findDropped(ArrayRef<Value> choice) {
  int64_t numGroups = op.getNGroup(), numKept = op.getTopkGroup();
  // +inf plus -inf is a NaN; as a key it ranks last.
  SmallVector<Value> keys;
  for (Value value : getGroupValues(choice))
    keys.push_back(WideKeys::ordered(b, value));

  // rank[g] = the number of groups before g; of equal ones the lower is first.
  SmallVector<Value> ranks(numGroups, b.i32(0));
  for (int64_t g = 0; g < numGroups; ++g)
    for (int64_t higher = g + 1; higher < numGroups; ++higher) {
      Value later = b.compare(CmpIPredicate::uge, keys[g], keys[higher]);
      ranks[higher] = b.add(ranks[higher], b.select(later, b.i32(1), b.i32(0)));
      ranks[g] = b.add(ranks[g], b.select(later, b.i32(0), b.i32(1)));
    }
  SmallVector<Value> dropped(shape.keysPerLane, b.boolean(false));
  for (int64_t g = 0; g < numGroups; ++g) {
    Value loses = b.compare(CmpIPredicate::sge, ranks[g], b.i32(numKept));
    for (int64_t j = 0; j < shape.keysPerLane; ++j)
      if (Value inGroup = isInGroup(j, g))
        dropped[j] = b.either(dropped[j], b.both(inGroup, loses));
  }
  return dropped;
}
