//===- ScoreFunctions.h - What a score function is --------------*- C++ -*-===//
//
// One table for decompositions, kernels and gradients. A new score function is
// a case in MoEAttrs.td, a row in ScoreFunctions.cpp, and its meaning in
// python/moe_mlir/formulas.py.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_SCOREFUNCTIONS_H
#define MOE_DIALECT_MOE_IR_SCOREFUNCTIONS_H

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/Utils/ArithmeticBuilder.h"

namespace mlir::moe {

/// Whether s is a function of x and not of its row; not so for softmax alone.
bool isElementwise(ScoreFunction function);

/// Whether the table has ln s, so that renormalised gates are a softmax over
/// ln s of the chosen: nothing underflows, nothing divides 0 by 0.
bool hasLogScore(ScoreFunction function);

/// s = score(x) of an elementwise function. NaN for NaN.
Value buildScore(ArithmeticBuilder &b, ScoreFunction function, Value x);

/// ln s, for softmax up to a constant of the row. NaN for NaN, -inf where s is
/// 0.
Value buildLogScore(ArithmeticBuilder &b, ScoreFunction function, Value x);

/// d ln s / dx of an elementwise function other than none.
Value buildLogSlope(ArithmeticBuilder &b, ScoreFunction function, Value x);

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_IR_SCOREFUNCTIONS_H
