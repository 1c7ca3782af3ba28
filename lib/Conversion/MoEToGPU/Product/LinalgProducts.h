//===- LinalgProducts.h - Which linalg ops multiply rows --------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_LINALGPRODUCTS_H
#define MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_LINALGPRODUCTS_H

#include "mlir/Dialect/Linalg/IR/Linalg.h"

namespace mlir::moe {

/// Whether the dims of `op` are rows.., n, d and its maps those of
///
///   out[.., n] += sum over d of left[.., d] right[n, d]
///
/// or of right[d, n] if `isTransposed`.
bool hasProductMaps(linalg::LinalgOp op, bool isTransposed);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_LINALGPRODUCTS_H
