//===- ScatterLoops.h - Loops that write slices to places -------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_GRID_SCATTERLOOPS_H
#define MOE_LIB_CONVERSION_MOETOGPU_GRID_SCATTERLOOPS_H

#include "ThreadLowerings.h"

#include "mlir/Dialect/Func/IR/FuncOps.h"

namespace mlir::moe {

/// Makes loops over blocks of the loops outside of them that copy slices, or
/// store elements, to places that they read from buffers.
void distributeScatterLoops(func::FuncOp function, BlockShape block);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_GRID_SCATTERLOOPS_H
