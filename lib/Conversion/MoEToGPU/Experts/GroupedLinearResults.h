//===- GroupedLinearResults.h - From sums to rows of y ----------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEARRESULTS_H
#define MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEARRESULTS_H

#include "GroupedLinearTile.h"

namespace mlir::moe {

/// What a lane does with its sums of a tile: of two rows, 8 apart, and of two
/// neighbouring columns of each fragment.
class TileResults {
public:
  /// Of the rows from `firstRow` (i32) on those of `lane`.
  TileResults(WarpBuilder &b, GroupedLinearOp op, const TilePlan &plan,
              Value firstRow, Value lane, const TileOfRows &tile);

  /// Stores what the sums mean, or zeros where there are none.
  void store(ArrayRef<Value> sums);

private:
  /// Of one row and fragment of y: two neighbouring columns, or one of pairs.
  SmallVector<Value> getResults(ArrayRef<Value> sums, int64_t fragment,
                                int64_t row);
  Value addBias(Value sum, int64_t weightRow, int64_t fragment, int64_t i);
  Value getColumn(int64_t fragment, int64_t i);
  void storeUnits(ArrayRef<Value> sums, int64_t row);
  void storeElements(ArrayRef<Value> sums, int64_t row);
  Value packPair(ArrayRef<Value> pair);
  bool hasUnits() const;
  int64_t getNumFragments() const;

  WarpBuilder &b;
  GroupedLinearOp op;
  const TilePlan &plan;
  const TileOfRows &tile;
  Type element;
  Value firstColumn, quadLane;
  Value rows[2];
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEARRESULTS_H
