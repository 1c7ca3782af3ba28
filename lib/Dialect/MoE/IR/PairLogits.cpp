//===- PairLogits.cpp - Which pairs of tokens count, and how much ---------===//

#include "MoE/Dialect/MoE/IR/PairLogits.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

//===----------------------------------------------------------------------===//
// Positions
//===----------------------------------------------------------------------===//

PairRule::PairRule(VisibilityAttr visibility, bool isTransposed)
    : excludeSelf(visibility.getExcludeSelf()), transposed(isTransposed) {
  // Sums with positions stay in 64 bits.
  constexpr int64_t furthest = int64_t(1) << 62;
  if (std::optional<int64_t> reach = visibility.getReach())
    before = std::min(*reach, furthest) - 1;
  if (visibility.getCausal())
    behind = 0;
  if (transposed)
    std::swap(before, behind);
}

/// `position` plus `distance`; null where 32 bits do not hold the sum, and no
/// position is as far away.
static Value move(ArithmeticBuilder &b, Value position, int64_t distance) {
  if (distance == 0)
    return position;
  constexpr int64_t furthest = int64_t(1) << 30;
  bool isNarrow = getElementTypeOrSelf(position.getType()).isInteger(32);
  if (isNarrow && std::abs(distance) >= furthest)
    return {};
  return b.add(position, b.constantInt(position.getType(), distance));
}

Value PairRule::isVisible(ArithmeticBuilder &b, Value row, Value column) const {
  Value visible;
  if (behind)
    if (Value last = move(b, row, *behind))
      visible = b.compare(CmpIPredicate::sle, column, last);
  if (excludeSelf)
    visible = b.both(visible, b.compare(CmpIPredicate::ne, column, row));
  if (before)
    if (Value first = move(b, row, -*before))
      visible = b.both(visible, b.compare(CmpIPredicate::sge, column, first));
  return visible;
}

Value PairRule::isBlockVisible(ArithmeticBuilder &b, Value firstRow,
                               Value lastRow, Value firstColumn,
                               Value lastColumn) const {
  Value visible;
  if (behind)
    visible =
        b.compare(CmpIPredicate::sle, firstColumn, move(b, lastRow, *behind));
  if (before)
    visible = b.both(visible, b.compare(CmpIPredicate::sge, lastColumn,
                                        move(b, firstRow, -*before)));
  return visible;
}

std::pair<Value, Value> PairRule::getColumns(ArithmeticBuilder &b,
                                             Value firstRow, Value numRows,
                                             Value numColumns,
                                             int64_t blockColumns) const {
  Value begin = b.index(0), end = numColumns;
  if (behind)
    end = b.minSigned(end, move(b, b.add(firstRow, numRows), *behind));
  if (before) {
    Value first = b.maxSigned(move(b, firstRow, -*before), begin);
    begin =
        b.sub(first, arith::RemUIOp::create(b, first, b.index(blockColumns)));
  }
  return {begin, end};
}

std::pair<Value, Value>
PairRule::getBlockColumns(ArithmeticBuilder &b, Value firstRow, int64_t numRows,
                          Value firstColumn, int64_t blockColumns) const {
  Value zero = b.index(0), size = b.index(blockColumns);
  // The rows may lie before or behind the block.
  auto clamp = [&](Value column) {
    return b.maxSigned(b.minSigned(column, size), zero);
  };
  Value first = b.sub(firstRow, firstColumn), begin = zero, end = size;
  if (before)
    begin = clamp(move(b, first, -*before));
  if (behind)
    end = clamp(move(b, first, numRows + *behind));
  return {begin, end};
}

//===----------------------------------------------------------------------===//
// Logits
//===----------------------------------------------------------------------===//

PairLogits::PairLogits(MixLogitsOpInterface op, bool isTransposed)
    : rule(op.getVisibility(), isTransposed),
      scale(op.getScale().convertToDouble()) {}

Value PairLogits::isVisible(ArithmeticBuilder &b, const PairTerms &pair) const {
  Value visible = rule.isVisible(b, pair.row, pair.column);
  if (pair.rowLevel) {
    Value query = pair.rowLevel, key = pair.columnLevel;
    if (rule.isTransposed())
      std::swap(query, key);
    visible = b.both(visible, b.compare(CmpFPredicate::OLE, key, query));
  }
  return b.both(visible, pair.isReal);
}

Value PairLogits::getLogit(ArithmeticBuilder &b, const PairTerms &pair) const {
  Value factor = b.constant(pair.product.getType(), scale);
  ArrayRef<Value> biases(pair.biases);
  Value first = biases.empty() ? Value() : biases.front();
  Value x =
      first ? b.fma(pair.product, factor, first) : b.mul(pair.product, factor);
  for (Value bias : biases.drop_front(biases.empty() ? 0 : 1))
    if (bias)
      x = b.add(x, bias);
  return x;
}

Value PairLogits::getVisibleLogit(ArithmeticBuilder &b,
                                  const PairTerms &pair) const {
  Value x = getLogit(b, pair);
  Value visible = isVisible(b, pair);
  if (!visible)
    return x;
  double hidden = -std::numeric_limits<double>::infinity();
  return b.select(visible, x, b.constant(x.getType(), hidden));
}
