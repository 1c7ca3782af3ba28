//===- TopKGroups.cpp - Groups of experts that drop out -------------------===//

#include "TopKGroups.h"
#include "TopKKernel.h"

using namespace mlir;
using namespace mlir::moe;

/// The key of a group's value in every lane: of its largest choice score, or of
/// the sum of its two largest.
Value ExpertGroups::getKey(Value group, Value groupSize) {
  Value begin = e.mul(group, groupSize);
  Value lowest = toSortableKey(e, e.negInfinity());
  Values best =
      e.loop(begin, e.add(begin, groupSize), 1, {lowest, lowest},
             [&](Value expert, ValueRange values) -> Values {
               // A NaN counts as -inf.
               Value choice = e.maxSigned(e.load(stage, {expert}), lowest);
               Value second =
                   e.maxSigned(e.minSigned(choice, values[0]), values[1]);
               return {e.maxSigned(choice, values[0]), second};
             });
  if (op.getGroupScore() == GroupScore::Max)
    return best[0];
  // A group of one expert has no second score to add.
  Value isSingle = e.compare(arith::CmpIPredicate::eq, groupSize, e.index(1));
  Value sum = e.add(fromSortableKey(e, best[0]), fromSortableKey(e, best[1]));
  return e.select(isSingle, best[0], toSortableKey(e, sum));
}

void ExpertGroups::drop() {
  int64_t numGroups = op.getNGroup();
  Value groupSize = arith::DivSIOp::create(e, numExperts, e.index(numGroups));
  Value values = e.scratch({e.getIndexAttr(numGroups)}, e.ints());
  Value end = e.index(numGroups);
  e.loop(e.index(0), end, 1, [&](Value group) {
    e.store(getKey(group, groupSize), values, {group});
  });
  e.loop(e.index(0), end, 1, [&](Value group) {
    Value own = e.load(values, {group});
    Value rank = e.loop(
        e.index(0), end, 1, {e.i32(0)},
        [&](Value other, ValueRange count) -> Values {
          Value key = e.load(values, {other});
          Value isLower =
              e.splat(e.compare(arith::CmpIPredicate::slt, other, group));
          Value ties = arith::AndIOp::create(
              e, isLower, e.compare(arith::CmpIPredicate::eq, key, own));
          Value isBefore = arith::OrIOp::create(
              e, ties, e.compare(arith::CmpIPredicate::sgt, key, own));
          return {e.add(count[0], e.select(isBefore, e.i32(1), e.i32(0)))};
        })[0];
    Value stays =
        e.compare(arith::CmpIPredicate::slt, rank, e.i32(op.getTopkGroup()));
    Value begin = e.mul(group, groupSize);
    e.loop(begin, e.add(begin, groupSize), 1, [&](Value expert) {
      Value key = e.load(stage, {expert});
      e.store(e.select(stays, key, e.i32(kEmptyKey)), stage, {expert});
    });
  });
}
