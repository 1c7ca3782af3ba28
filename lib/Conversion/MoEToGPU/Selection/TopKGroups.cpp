//===- TopKGroups.cpp - Groups of experts that drop out -------------------===//

#include "TopKGroups.h"
#include "TopKKeys.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

Value ExpertGroups::isInGroup(int64_t j, int64_t group) {
  int64_t size = row.numExperts / row.op.getNGroup();
  int64_t first = row.shape.getFirstExpert(j);
  int64_t last = first + (row.shape.lanes - 1) * row.shape.width;
  int64_t begin = group * size, end = begin + size;
  if (last < begin || first >= end)
    return {};
  if (first >= begin && last < end)
    return b.boolean(true);
  return b.both(
      b.compare(CmpIPredicate::sge, scores.getExperts()[j], b.i32(begin)),
      b.compare(CmpIPredicate::slt, scores.getExperts()[j], b.i32(end)));
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

/// The value of each group, the same in all
SmallVector<Value> ExpertGroups::getGroupValues() {
  SmallVector<Value> values;
  for (int64_t group = 0, e = row.op.getNGroup(); group < e; ++group) {
    TwoLargest best(b);
    for (int64_t j = 0; j < row.shape.keysPerLane; ++j)
      if (Value inGroup = isInGroup(j, group))
        best.add(b.select(inGroup, choice[j], b.negInfinity()));
    best.addLanes(row.shape.lanes, sumsTwo(row.op));
    values.push_back(sumsTwo(row.op) ? b.add(best.first, best.second)
                                     : best.first);
  }
  return values;
}

int64_t ExpertGroups::getLanesOfGroup() const {
  int64_t size = row.numExperts / row.op.getNGroup(),
          lanesOfGroup = size / row.shape.width;
  int64_t perAccess = row.shape.lanes * row.shape.width;
  bool isAligned = row.shape.lanes == kWarpSize &&
                   size % row.shape.width == 0 &&
                   llvm::isPowerOf2_64(lanesOfGroup) &&
                   lanesOfGroup < kWarpSize && row.numExperts % perAccess == 0;
  return isAligned ? lanesOfGroup : 0;
}

/// As findDropped, but each lane finds the value and the rank of the groups
/// that it has a part of, one an access, and learns the values of the others:
/// a short chain where one warp has little else to do.
SmallVector<Value> ExpertGroups::findDroppedOfWarp(int64_t lanesOfGroup) {
  int64_t perAccess = kWarpSize / lanesOfGroup;
  SmallVector<Value> own, keys;
  for (int64_t j = 0; j < row.shape.keysPerLane; j += row.shape.width) {
    TwoLargest best(b);
    for (Value value : choice.slice(j, row.shape.width))
      best.add(value);
    best.addLanes(lanesOfGroup, sumsTwo(row.op));
    own.push_back(WideKeys::ordered(
        b, sumsTwo(row.op) ? b.add(best.first, best.second) : best.first));
    for (int64_t i = 0; i < perAccess; ++i)
      keys.push_back(b.shuffleFrom(own.back(), b.i32(i * lanesOfGroup)));
  }
  SmallVector<Value> dropped;
  for (auto [access, key] : llvm::enumerate(own)) {
    Value group = b.add(b.op<arith::DivUIOp>(row.lane, b.i32(lanesOfGroup)),
                        b.i32(access * perAccess));
    Value rank = b.i32(0);
    for (auto [number, other] : llvm::enumerate(keys)) {
      Value isLower = b.compare(CmpIPredicate::ult, b.i32(number), group);
      Value isBefore =
          b.either(b.compare(CmpIPredicate::ugt, other, key),
                   b.both(b.compare(CmpIPredicate::eq, other, key), isLower));
      rank = b.add(rank, b.select(isBefore, b.i32(1), b.i32(0)));
    }
    Value loses =
        b.compare(CmpIPredicate::sge, rank, b.i32(row.op.getTopkGroup()));
    dropped.append(row.shape.width, loses);
  }
  return dropped;
}

SmallVector<Value> ExpertGroups::findDropped() {
  if (int64_t lanesOfGroup = getLanesOfGroup())
    return findDroppedOfWarp(lanesOfGroup);
  int64_t numGroups = row.op.getNGroup(), numKept = row.op.getTopkGroup();
  // +inf plus -inf is a NaN; as a key it ranks last.
  SmallVector<Value> keys;
  for (Value value : getGroupValues())
    keys.push_back(WideKeys::ordered(b, value));

  // rank[g] = the number of groups before g; of equal ones the lower is first.
  SmallVector<Value> ranks(numGroups, b.i32(0));
  for (int64_t g = 0; g < numGroups; ++g)
    for (int64_t higher = g + 1; higher < numGroups; ++higher) {
      Value later = b.compare(CmpIPredicate::uge, keys[g], keys[higher]);
      ranks[higher] = b.add(ranks[higher], b.select(later, b.i32(1), b.i32(0)));
      ranks[g] = b.add(ranks[g], b.select(later, b.i32(0), b.i32(1)));
    }
  SmallVector<Value> dropped(row.shape.keysPerLane, b.boolean(false));
  for (int64_t g = 0; g < numGroups; ++g) {
    Value loses = b.compare(CmpIPredicate::sge, ranks[g], b.i32(numKept));
    for (int64_t j = 0; j < row.shape.keysPerLane; ++j)
      if (Value inGroup = isInGroup(j, g))
        dropped[j] = b.either(dropped[j], b.both(inGroup, loses));
  }
  return dropped;
}
