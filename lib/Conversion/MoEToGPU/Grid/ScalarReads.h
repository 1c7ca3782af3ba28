//===- ScalarReads.h - Scalars that kernels read ----------------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_GRID_SCALARREADS_H
#define MOE_LIB_CONVERSION_MOETOGPU_GRID_SCALARREADS_H

#include "mlir/Dialect/Func/IR/FuncOps.h"

namespace mlir::moe {

/// Moves loads of scalars, and what follows from them, into the loops over
/// blocks that use them, where the buffer still holds what it held.
void readScalarsInLoops(func::FuncOp function);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_GRID_SCALARREADS_H
