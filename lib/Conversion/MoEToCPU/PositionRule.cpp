//===- PositionRule.cpp - Which columns a row sees ------------------------===//

#include "PositionRule.h"

using namespace mlir;
using namespace mlir::moe;

PositionRule::PositionRule(MixLogitsOpInterface op, bool rowsAreKeys)
    : causal(op.getVisibility().getCausal()),
      excludeSelf(op.getVisibility().getExcludeSelf()),
      rowsAreKeys(rowsAreKeys), reach(op.getVisibility().getReach()) {
  // Positions are compared in 32 bits.
  if (reach)
    reach = std::min<int64_t>(*reach, (int64_t(1) << 30) + excludeSelf);
}

Value PositionRule::getVisible(Emitter &e, Value position,
                               Value firstColumn) const {
  if (admitsAll())
    return {};
  using Predicate = arith::CmpIPredicate;
  Type i32 = e.getI32Type();
  Value columns = e.add(e.splat(e.castInt(firstColumn, i32)), e.iota());
  Value own = e.splat(e.castInt(position, i32));
  Value visible;
  if (causal)
    visible =
        e.compare(rowsAreKeys ? Predicate::sge : Predicate::sle, columns, own);
  if (excludeSelf)
    visible = e.both(visible, e.compare(Predicate::ne, columns, own));
  if (reach) {
    Value end = rowsAreKeys ? e.add(position, e.index(*reach))
                            : e.sub(position, e.index(*reach));
    visible =
        e.both(visible, e.compare(rowsAreKeys ? Predicate::slt : Predicate::sgt,
                                  columns, e.splat(e.castInt(end, i32))));
  }
  return visible;
}

Value PositionRule::isGroupVisible(Emitter &e, Value position,
                                   Value firstColumn,
                                   int64_t numColumns) const {
  using Predicate = arith::CmpIPredicate;
  Value lastPosition = e.add(position, e.index(kGroupRows - 1));
  Value lastColumn = e.add(firstColumn, e.index(numColumns - 1));
  Value visible;
  if (causal)
    visible = rowsAreKeys
                  ? e.compare(Predicate::sge, lastColumn, position)
                  : e.compare(Predicate::sle, firstColumn, lastPosition);
  if (reach)
    visible = e.both(
        visible, rowsAreKeys ? e.compare(Predicate::slt, firstColumn,
                                         e.add(lastPosition, e.index(*reach)))
                             : e.compare(Predicate::sgt, lastColumn,
                                         e.sub(position, e.index(*reach))));
  return visible;
}

std::pair<Value, Value>
PositionRule::getGroupColumns(Emitter &e, Value position, Value firstColumn,
                              int64_t numColumns) const {
  Value begin = e.index(0), end = e.index(numColumns);
  if (!causal)
    return {begin, end};
  // Index arithmetic is signed: the group may lie before or behind the block.
  Value distance = e.sub(position, firstColumn);
  auto clamp = [&](Value column) {
    return e.maxSigned(e.minSigned(column, end), begin);
  };
  if (rowsAreKeys)
    return {clamp(distance), end};
  return {begin, clamp(e.add(distance, e.index(kGroupRows)))};
}

std::pair<Value, Value> PositionRule::getRange(Emitter &e, Value position,
                                               Value numRows, Value numColumns,
                                               int64_t blockColumns) const {
  Value begin = e.index(0), end = numColumns;
  auto startBlockAt = [&](Value first) {
    first = e.maxSigned(first, e.index(0));
    return e.sub(first,
                 arith::RemSIOp::create(e, first, e.index(blockColumns)));
  };
  if (rowsAreKeys) {
    if (causal)
      begin = startBlockAt(position);
    if (reach)
      end = e.minSigned(end,
                        e.add(position, e.add(numRows, e.index(*reach - 1))));
    return {begin, end};
  }
  if (causal)
    end = e.minSigned(end, e.add(position, numRows));
  if (reach)
    begin = startBlockAt(e.sub(position, e.index(*reach - 1)));
  return {begin, end};
}
