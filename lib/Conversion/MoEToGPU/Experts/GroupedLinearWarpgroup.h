//===- GroupedLinearWarpgroup.h - Experts of many rows ----------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEARWARPGROUP_H
#define MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEARWARPGROUP_H

#include "Emit/WarpBuilder.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// Emits the loop over blocks of `op`, for which hasKernelOfManyRows holds.
void emitGroupedLinearOnWarpgroups(WarpBuilder &builder, GroupedLinearOp op);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEARWARPGROUP_H
