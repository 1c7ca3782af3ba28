//===- LhsRows.h - The left operand as rows of tiles ------------*- C++ -*-===//
//
// Register tiles read one number of a row in all lanes, from where rows lie or
// from a copy in cache, whose ks are widened or packed in pairs.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_LHSROWS_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_LHSROWS_H

#include "ProductProblem.h"

namespace mlir::moe {

/// Rows of a register tile, and which rows of the left operand they read: their
/// copy has the ks of a chain from packed k `firstPacked` on, null for 0.
struct TileRows {
  Values rows, lhsRows;
  Value firstPacked = {};
};

class LhsRows {
public:
  /// Makes a buffer for a tile of rows, unless they are read where they lie;
  /// with chains of `numChains` chains' ks.
  LhsRows(const ProductProblem &problem, int64_t numChains);

  bool arePacked() const { return bool(packed); }
  /// Reads rows where they lie wherever that is possible: those of one tile
  /// have places in the first cache.
  void packOnlyToWiden();
  /// Copies all ks of a tile of rows, for all panels: each would copy them
  /// again. False if they are not known to fit, or need no copy.
  bool packAllKs(const RowRange &rows);

  /// `numRows` rows; `count` ks of them, from `k` on, are copied if need be.
  TileRows get(Value firstRow, int64_t numRows, Value k, Value count,
               bool mayPack = true) const;
  /// Copies `count` ks of a row, from `k` on, as row `number` of the tile.
  void pack(Value row, Value number, Value k, Value count) const;
  /// Element (row, k) in all lanes: of row `number` of the tile, which reads
  /// row `lhsRow`.
  Value splat(Value number, Value lhsRow, Value k, Value packedK) const;

private:
  bool mustWiden() const;
  bool hasCacheAliasing() const;
  void packRows(ArrayRef<Value> lhsRows, Value firstNumber, Value k,
                Value count) const;

  const ProductProblem &problem;
  Emitter &e;
  /// Null where rows are read where they lie.
  Value packed;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_LHSROWS_H
