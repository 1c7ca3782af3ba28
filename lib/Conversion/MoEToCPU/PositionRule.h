//===- PositionRule.h - Which columns a row sees ----------------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_POSITIONRULE_H
#define MOE_LIB_CONVERSION_MOETOCPU_POSITIONRULE_H

#include "Emitter.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// Rows of a register tile.
inline constexpr int64_t kGroupRows = 6;

/// Which columns a row sees by position. Row r sits at column r + origin. Where
/// rows are queries, `causal` admits columns up to there; where rows are keys,
/// columns from there on.
class PositionRule {
public:
  PositionRule(MixLogitsOpInterface op, bool rowsAreKeys);

  /// Whether every row sees every column.
  bool admitsAll() const { return !causal && !excludeSelf && !reach; }
  /// Which columns of the vector from `firstColumn` on the row at column
  /// `position` sees; null for all.
  Value getVisible(Emitter &e, Value position, Value firstColumn) const;
  /// Whether any of the group of rows from `position` on can see one of the
  /// `numColumns` columns from `firstColumn` on; null for always.
  Value isGroupVisible(Emitter &e, Value position, Value firstColumn,
                       int64_t numColumns) const;
  /// The columns of a block of `numColumns` from `firstColumn` on that any of
  /// the group of rows from `position` on can see, as [begin, end) within the
  /// block; not cut where only a window hides columns.
  std::pair<Value, Value> getGroupColumns(Emitter &e, Value position,
                                          Value firstColumn,
                                          int64_t numColumns) const;
  /// The columns that `numRows` rows from `position` on may see: from a
  /// multiple of `blockColumns` on, so that a row's sums do not depend on the
  /// rows around it.
  std::pair<Value, Value> getRange(Emitter &e, Value position, Value numRows,
                                   Value numColumns,
                                   int64_t blockColumns) const;

private:
  bool causal, excludeSelf, rowsAreKeys;
  /// The distance from which on nothing is visible, if there is one.
  std::optional<int64_t> reach;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_POSITIONRULE_H
