//===- TileProduct.h - Products by a matrix unit ----------------*- C++ -*-===//
//
// The loops around the tiles of MatrixUnit.h: a left tile has ks side by side,
// a right one has columns side by side, as panels have.
//
// All products of pairs of bf16 take this way, however few rows they have: a
// sum of 32 products is not rounded as two of 16 by vdpbf16ps are, and results
// would depend on the number of rows.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_TILEPRODUCT_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_TILEPRODUCT_H

#include "ProductProblem.h"

namespace mlir::moe {

/// Adds to the sums of some rows and the columns of a group, where
/// `problem.usesTiles`.
void multiplyGroupByTiles(const ProductProblem &problem, const RowRange &rows,
                          const PanelGroup &group);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_TILEPRODUCT_H
