//===- Workspace.h - Global memory between kernels --------------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_GRID_WORKSPACE_H
#define MOE_LIB_CONVERSION_MOETOGPU_GRID_WORKSPACE_H

#include "mlir/Dialect/Func/IR/FuncOps.h"

namespace mlir::moe {

/// `value` as an expression of the dynamic sizes of the function's buffers, the
/// symbols in the order of the kernels' parameters; null if it is none.
AffineExpr getSizeExpr(OpFoldResult value, func::FuncOp function);

/// An expression of the dynamic sizes that is at least `value`, and at least 0;
/// null if none is known. Of the minimum of a number and a size, say, which has
/// no expression, that is the number.
AffineExpr getSizeBound(OpFoldResult value, func::FuncOp function);

/// How many dynamic sizes the buffers of `function` have, the workspace's among
/// them.
unsigned getNumDynamicSizes(func::FuncOp function);

/// Turns the buffers that `function` allocates into parts of one more argument,
/// the workspace, and says in an attribute how large it must be.
LogicalResult moveBuffersToWorkspace(func::FuncOp function);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_GRID_WORKSPACE_H
