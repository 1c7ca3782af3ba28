//===- SoftmaxMixSplitSums.cpp - A gradient, summed by splits -------------===//

#include "SoftmaxMixSplitSums.h"

#include "SoftmaxMixPairs.h"

using namespace mlir;
using namespace mlir::moe;

void SplitSums::allocate() {
  all = splits.allocate({padToVectors(e, getSize(e, out, 3))},
                        /*perSplit=*/true);
}

void SplitSums::takeView(const PairSplits::Task &task) {
  gradient = viewTokens(e, out, task.batch, task.head);
}

/// Whether the first split takes its sums where their total belongs: that needs
/// whole blocks of columns and whole vectors. Null: it does not.
Value SplitSums::holdsSums(Type type) const {
  int64_t size = cast<MemRefType>(gradient.getType()).getDimSize(1);
  if (gradient.getType() != type || ShapedType::isDynamic(size) ||
      size % e.width != 0)
    return {};
  Value rest = e.rest(splits.numTokens, splits.blockColumns);
  return e.compare(arith::CmpIPredicate::eq, rest, e.index(0));
}

Value SplitSums::get(const PairSplits::Task &task, Value split) const {
  Value sums = splits.slice(all, task.slot, /*perSplit=*/true, split);
  Value holds = holdsSums(sums.getType());
  if (!holds)
    return sums;
  Value isFirst = e.compare(arith::CmpIPredicate::eq, split, e.index(0));
  return e.select(e.both(holds, isFirst), gradient, sums);
}

/// The sums of the first `numSplits` splits, in order.
void SplitSums::writeRow(Value row, Value numSplits, Value firstSums,
                         Value sums, Value isReal, double scale) const {
  Value size = e.dim(gradient, 1);
  e.loop(e.index(0), size, e.width, [&](Value element) {
    Values first{e.loadVector(firstSums, {row, element})};
    Values total =
        e.loop(e.index(1), numSplits, 1, first,
               [&](Value split, ValueRange old) -> Values {
                 Value place = e.add(e.mul(split, splits.paddedTokens), row);
                 return {e.add(old[0], e.loadVector(sums, {place, element}))};
               });
    Value value = e.mul(total.front(), e.f32(scale));
    e.storeVector(e.select(isReal, value, e.f32(0.0)), gradient, {row, element},
                  e.firstLanes(e.sub(size, element)));
  });
}

void SplitSums::write(const PairSplits::Task &task, const Rows &rows,
                      const TokenMask &mask, double scale) const {
  Value firstSums = get(task, e.index(0));
  Value sums = splits.slice(all, task.slot, /*perSplit=*/true);
  auto writeRows = [&] {
    e.loop(rows.first, rows.end, 1, [&](Value row) {
      writeRow(row, rows.numSplits, firstSums, sums, mask.isReal(row), scale);
    });
    return Values();
  };
  Value holds = holdsSums(sums.getType());
  if (!holds || scale != 1.0 || mask.exists)
    return void(writeRows());
  Value isAlone =
      e.compare(arith::CmpIPredicate::eq, rows.numSplits, e.index(1));
  // The sums of one split are the gradient.
  e.ifElse(
      e.both(holds, isAlone), TypeRange(), [] { return Values(); }, writeRows);
}
