//===- PairLogits.h - Which pairs of tokens count, and how much -*- C++ -*-===//
//
// What a pair of a query and a key is worth, for decompositions and kernels
// alike (docs/Spec.md, Visibility).
//
// Pairs form a matrix. Its rows are queries and its columns keys or,
// transposed, rows are keys and columns queries. Positions count columns: that
// of row r is r + origin.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_PAIRLOGITS_H
#define MOE_DIALECT_MOE_IR_PAIRLOGITS_H

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/Utils/ArithmeticBuilder.h"

namespace mlir::moe {

/// Which pairs are visible by their positions: a band around the diagonal.
class PairRule {
public:
  explicit PairRule(VisibilityAttr visibility, bool isTransposed = false);

  bool isTransposed() const { return transposed; }
  /// Whether every pair is visible.
  bool admitsAll() const { return !before && !behind && !excludeSelf; }
  /// Whether the pair of two positions is visible: indices, i32 or vectors of
  /// them. Null for always.
  Value isVisible(ArithmeticBuilder &b, Value row, Value column) const;
  /// Whether any pair of the rows and columns from the first to the last ones
  /// can be visible, by their positions as indices. Null for always.
  Value isBlockVisible(ArithmeticBuilder &b, Value firstRow, Value lastRow,
                       Value firstColumn, Value lastColumn) const;
  /// The columns, [begin, end), that `numRows` rows from position `firstRow` on
  /// can form visible pairs with. They begin at a multiple of `blockColumns`,
  /// so that a row's sums do not depend on the rows around it.
  std::pair<Value, Value> getColumns(ArithmeticBuilder &b, Value firstRow,
                                     Value numRows, Value numColumns,
                                     int64_t blockColumns) const;
  /// Those of a block of `blockColumns` from `firstColumn` on, within the
  /// block.
  std::pair<Value, Value> getBlockColumns(ArithmeticBuilder &b, Value firstRow,
                                          int64_t numRows, Value firstColumn,
                                          int64_t blockColumns) const;

private:
  bool excludeSelf, transposed;
  /// A row sees the columns of up to so many positions before and behind its
  /// own; all where there is no such number.
  std::optional<int64_t> before, behind;
};

/// What a kernel has of a pair, scalars or lanes of it; null where absent.
struct PairTerms {
  /// The product of query and key, and what is added to its multiple in this
  /// order: the biases of the key and of the pair. The first one is fused.
  Value product;
  SmallVector<Value, 3> biases;
  /// Positions and levels of the row and of the column.
  Value row, column, rowLevel, columnLevel;
  /// Whether tokens may form the pair at all; null: yes.
  Value isReal;
};

/// How the logit of a pair is made: scale q.k + key_bias + bias where the query
/// sees the key.
class PairLogits {
public:
  explicit PairLogits(MixLogitsOpInterface op, bool isTransposed = false);

  /// Whether the query sees the key; null for yes.
  Value isVisible(ArithmeticBuilder &b, const PairTerms &pair) const;
  /// The logit, whether visible or not.
  Value getLogit(ArithmeticBuilder &b, const PairTerms &pair) const;
  /// The logit, -inf where the pair is not visible.
  Value getVisibleLogit(ArithmeticBuilder &b, const PairTerms &pair) const;

  const PairRule rule;

private:
  double scale;
};

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_IR_PAIRLOGITS_H
