//===- ProductProblem.h - The operands of a matrix product ------*- C++ -*-===//
//
// sums[m, n] += lhs[m, k] rhs[k, n]: where operands lie, and what follows from
// it for all parts of the product.
//
// Neighbouring ks may be interleaved, "packed": a pair of bf16 shares the 32
// bits of a lane. A packed k is the number of a k, or of such a pair.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTPROBLEM_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTPROBLEM_H

#include "Chains.h"
#include "PanelShape.h"

namespace mlir::moe {

/// The left operand: element (row, k) of `memref` stands at `at`.
struct ProductLhs {
  /// Which row of `memref` a row of the product reads.
  Value getMemrefRow(Value row) const { return getRow ? getRow(row) : row; }

  Value memref;
  std::function<Values(Value row, Value k)> at;
  /// Whether the ks of a row lie side by side.
  bool isContiguous;
  /// Which row of `memref` stands for a row of the product; null for the same.
  std::function<Value(Value row)> getRow = nullptr;
};

/// How the right operand lies in memory: the columns of a k side by side, the
/// ks of a column side by side, or panels.
enum class RhsLayout { NContiguous, KContiguous, Panels };

/// The right operand: element (k, column) of `memref` stands at `at`. Of panels
/// `at` gets the packed k and the first column of a vector.
struct ProductRhs {
  Value memref;
  std::function<Values(Value k, Value column)> at;
  RhsLayout layout;
  /// Whether a k, of columns side by side, is all zeros and not to be read;
  /// null where none is.
  std::function<Value(Value k)> isMissing = nullptr;
};

/// The f32 sums of a row from `column` on, side by side; `isSecond` for columns
/// of the second half of a panel, which have the number of those in the first.
struct ProductSums {
  Value memref;
  std::function<Values(Value row, Value column, bool isSecond)> at;
};

/// Rows `first` to `end`.
struct RowRange {
  Value first, end;
};

class ProductProblem {
public:
  ProductProblem(Emitter &e, ProductLhs lhs, ProductRhs rhs, ProductSums sums,
                 const PanelShape &shape, Value numK);

  Emitter &e;
  const ProductLhs lhs;
  const ProductRhs rhs;
  const ProductSums sums;
  const PanelShape shape;
  const Value numK;
  /// Whether pairs of products are summed by one instruction.
  const bool usesBf16Dot;
  /// Whether a matrix unit multiplies them.
  const bool usesTiles;
  const Chains chains;

  /// How many ks share an index of the right operand, of what tiles read, and a
  /// lane where the ks of a column lie side by side.
  int64_t getRhsKPack() const;
  int64_t getTileKPack() const;
  int64_t getLaneKPack() const;
  /// The packed k of a buffer that k is in.
  Value toPackedK(Value k) const;
  /// The type of packed ks in a buffer, and how many of them a chain takes, in
  /// whole vectors.
  Type getPackedType() const;
  int64_t getPackedKsOfChain() const;
  /// The rows of a whole register tile.
  int64_t getTileRows() const;
  /// Whether vectors of columns are so short that one row takes longer to add
  /// up its products, one after the other, than memory takes for what it
  /// multiplies.
  bool isLatencyBound() const;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTPROBLEM_H
