//===- RowProducts.h - Products of rows on tensor cores ---------*- C++ -*-===//
//
// What the router's logits and the layers of experts have in common: every row
// of one matrix times every row of another, left right^T. The right side may
// lie transposed, its features along the rows.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_ROWPRODUCTS_H
#define MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_ROWPRODUCTS_H

#include "Emit/WarpBuilder.h"
#include "ThreadLowerings.h"

namespace mlir::moe {

/// Threads of a block that multiplies rows.
inline constexpr int64_t kProductThreads = 4 * kWarpSize;

/// How a block computes left right^T: its warps stand in a grid, and each has
/// the products of 16 rows of the left and `warpColumns` rows of the right
/// side.
struct RowProductPlan {
  int64_t numFeatures, numColumns;
  bool isTransposed;
  int64_t rowWarps, columnWarps, warpColumns;

  /// Rows of the left side, and of the right one, that are multiplied at once.
  int64_t getRows() const { return 16 * rowWarps; }
  int64_t getColumns() const { return warpColumns * columnWarps; }
  /// Of a feature's row of a transposed right side, in shared memory.
  int64_t getTransposedRowBytes() const;
  int64_t getStageBytes() const;
  int64_t getSharedBytes() const;
};

/// Rows of the left side that a block should take: the fewer the more columns
/// there are, for it often hands its products on in workgroup memory.
int64_t getProductRows(int64_t numColumns);

/// The plan for `left` [.., rows, features] and `right` [columns, features], or
/// transposed [features, columns], tensors or buffers, where a block has at
/// most `maxRows` rows. Nullopt where tensor cores cannot multiply them: they
/// take bf16 and f16 rows of whole units of 16 bytes that lie in global memory.
std::optional<RowProductPlan> planRowProducts(Value left, Value right,
                                              bool isTransposed,
                                              int64_t maxRows,
                                              BlockShape block);

/// Computes the products of all rows of `left`; `store` gets the flat number of
/// the row, an index, the column, and the product in f32. Neither the tiles nor
/// the place of a row in them change a bit of it.
void emitRowProducts(
    WarpBuilder &b, Value left, Value right, const RowProductPlan &plan,
    function_ref<void(Value row, Value column, Value product)> store);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_ROWPRODUCTS_H
