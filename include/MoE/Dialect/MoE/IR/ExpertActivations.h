//===- ExpertActivations.h - What an expert's layer ends with ---*- C++ -*-===//
//
// One table for the decomposition and the kernels of moe.grouped_linear. A new
// activation is a case in MoEAttrs.td, a row in ExpertActivations.cpp, and its
// meaning in python/moe_mlir/formulas.py.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_EXPERTACTIVATIONS_H
#define MOE_DIALECT_MOE_IR_EXPERTACTIVATIONS_H

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/Utils/ArithmeticBuilder.h"

namespace mlir::moe {

/// act(x) of an op without a gate, of f32 scalars or vectors. NaN for NaN.
Value buildActivation(ArithmeticBuilder &b, GroupedLinearOp op, Value x);

/// y of a gate and its factor, of an op with a gate. NaN where either is.
Value buildGatedActivation(ArithmeticBuilder &b, GroupedLinearOp op, Value gate,
                           Value up);

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_IR_EXPERTACTIVATIONS_H
