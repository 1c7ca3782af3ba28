//===- DispatchCapacity.h - The bound on an expert's rows -------*- C++ -*-===//
//
// One formula for the decomposition and the kernels of moe.dispatch.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_DISPATCHCAPACITY_H
#define MOE_DIALECT_MOE_IR_DISPATCHCAPACITY_H

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/Utils/ArithmeticBuilder.h"

namespace mlir::moe {

/// k floor(factor ceil(n / e)) of the op's capacity factor, where n, e and k
/// are of index type, as the result is; null without a factor.
Value buildCapacity(ArithmeticBuilder &b, DispatchOp op, Value n, Value e,
                    Value k);

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_IR_DISPATCHCAPACITY_H
