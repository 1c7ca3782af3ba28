//===- TopKChoice.cpp - Scores by which experts are chosen ----------------===//

#include "TopKSelection.h"

#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

//===----------------------------------------------------------------------===//
// Choice scores
//===----------------------------------------------------------------------===//

/// lhs / rhs for 0 <= lhs <= 1 <= rhs <= 2: what the division of IEEE takes
/// where no exponent is extreme, without its branches, which would keep the
/// scores of a lane from being computed together. Quotients below 2^-100 may
/// differ in their last bit.
static Value divideScores(ThreadBuilder &b, Value lhs, Value rhs) {
  Value minus = b.neg(rhs), inverse = b.reciprocal(rhs);
  inverse = b.fma(b.fma(minus, inverse, b.f32(1.0)), inverse, inverse);
  Value quotient = b.mul(lhs, inverse);
  for (int step = 0; step < 2; ++step)
    quotient = b.fma(b.fma(minus, quotient, lhs), inverse, quotient);
  return quotient;
}

/// As in ScoreFunctions.cpp, but for the division.
static Value sigmoid(ThreadBuilder &b, Value x) {
  Value one = b.f32(1.0), t = b.exp(b.neg(b.abs(x)));
  Value isNegative = b.less(x, b.f32(0.0));
  return divideScores(b, b.select(isNegative, t, one), b.add(one, t));
}

Value RowSelection::score(Value x) {
  if (form.function == ScoreFunction::Sigmoid)
    return sigmoid(b, x);
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

namespace {
/// The two largest of what was added. A NaN counts as -inf here: the gates of
/// its row are NaN whatever is selected.
struct TwoLargest {
  explicit TwoLargest(ThreadBuilder &b)
      : b(b), first(b.negInfinity()), second(first) {}

  void add(Value value) {
    merge(b.maximumNumber(value, b.negInfinity()), b.negInfinity());
  }
  /// Adds those of the lanes with which `lanes` lanes share them.
  void addLanes(int64_t lanes, bool needsSecond) {
    for (int64_t distance = 1; distance < lanes; distance *= 2) {
      Value otherFirst = b.shuffleXor(first, distance);
      merge(otherFirst,
            needsSecond ? b.shuffleXor(second, distance) : b.negInfinity());
    }
  }

  ThreadBuilder &b;
  Value first, second;

private:
  /// first = max(first, first'), second = max(min(first, first'), second,
  /// second')
  void merge(Value otherFirst, Value otherSecond) {
    Value lower = b.minimumNumber(first, otherFirst);
    first = b.maximumNumber(first, otherFirst);
    second = b.maximumNumber(b.maximumNumber(second, otherSecond), lower);
  }
};
} // namespace

static bool sumsTwo(TopKRenormOp op) {
  return op.getGroupScore() == GroupScore::Top2Sum &&
         op.getNumExperts() / op.getNGroup() > 1;
}

/// The value of each group, the same in all lanes.
SmallVector<Value> RowSelection::getGroupValues(ArrayRef<Value> choice) {
  SmallVector<Value> values;
  for (int64_t group = 0, e = op.getNGroup(); group < e; ++group) {
    TwoLargest best(b);
    for (int64_t j = 0; j < shape.keysPerLane; ++j)
      if (Value inGroup = isInGroup(j, group))
        best.add(b.select(inGroup, choice[j], b.negInfinity()));
    best.addLanes(shape.lanes, sumsTwo(op));
    values.push_back(sumsTwo(op) ? b.add(best.first, best.second) : best.first);
  }
  return values;
}

int64_t RowSelection::getLanesOfGroup() {
  int64_t size = numExperts / op.getNGroup(), lanes = size / shape.width;
  int64_t perAccess = shape.lanes * shape.width;
  bool isAligned = shape.lanes == kWarpSize && size % shape.width == 0 &&
                   llvm::isPowerOf2_64(lanes) && lanes < kWarpSize &&
                   numExperts % perAccess == 0;
  return isAligned ? lanes : 0;
}

/// As findDropped, but each lane finds the value and the rank of the groups
/// that it has a part of, one an access, and learns the values of the others:
/// a short chain where one warp has little else to do.
SmallVector<Value> RowSelection::findDroppedOfWarp(ArrayRef<Value> choice,
                                                   int64_t lanes) {
  int64_t perAccess = kWarpSize / lanes;
  SmallVector<Value> own, keys;
  for (int64_t j = 0; j < shape.keysPerLane; j += shape.width) {
    TwoLargest best(b);
    for (Value value : choice.slice(j, shape.width))
      best.add(value);
    best.addLanes(lanes, sumsTwo(op));
    own.push_back(WideKeys::ordered(
        b, sumsTwo(op) ? b.add(best.first, best.second) : best.first));
    for (int64_t i = 0; i < perAccess; ++i)
      keys.push_back(b.shuffleFrom(own.back(), b.i32(i * lanes)));
  }
  SmallVector<Value> dropped;
  for (auto [access, key] : llvm::enumerate(own)) {
    Value group = b.add(b.op<arith::DivUIOp>(lane, b.i32(lanes)),
                        b.i32(access * perAccess));
    Value rank = b.i32(0);
    for (auto [number, other] : llvm::enumerate(keys)) {
      Value isLower = b.compare(CmpIPredicate::ult, b.i32(number), group);
      Value isBefore =
          b.either(b.compare(CmpIPredicate::ugt, other, key),
                   b.both(b.compare(CmpIPredicate::eq, other, key), isLower));
      rank = b.add(rank, b.select(isBefore, b.i32(1), b.i32(0)));
    }
    Value loses = b.compare(CmpIPredicate::sge, rank, b.i32(op.getTopkGroup()));
    dropped.append(shape.width, loses);
  }
  return dropped;
}

/// Whether each expert of the lane is outside of the topk_group best groups.
SmallVector<Value> RowSelection::findDropped(ArrayRef<Value> choice) {
  if (int64_t lanes = getLanesOfGroup())
    return findDroppedOfWarp(choice, lanes);
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
