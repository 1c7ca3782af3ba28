//===- MixGradient.h - What the gradient's kernels share --------*- C++ -*-===//
//
// The gradients by queries and by keys are one kernel. Its rows are queries for
// dq and keys for dk and dv, and go over the columns, the tokens of the other
// role (PairLogits.h):
//
//   A = exp(x - lse),  dx = A (dmixed . v - delta)       of a pair
//   row gradient += dx column,  dv += A dmixed
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_MIXING_MIXGRADIENT_H
#define MOE_LIB_CONVERSION_MOETOGPU_MIXING_MIXGRADIENT_H

#include "Emit/WarpBuilder.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// The gradient by the tokens of one role, by its operands.
struct MixGradient {
  explicit MixGradient(SoftmaxMixBackwardDqOp op);
  explicit MixGradient(SoftmaxMixBackwardDkvOp op);

  MixLogitsOpInterface op;
  /// Whether rows are queries.
  bool ofQueries;
  Value lse, delta, v, dmixed, origin;
  double scale;
  /// The destinations: of the rows' features, of the values, of the sums of dx
  /// and of dx; null if there are none.
  Value gradient, dv, total, dbias;

  Value getRows() { return ofQueries ? op.getQ() : op.getK(); }
  Value getColumns() { return ofQueries ? op.getK() : op.getQ(); }
  Value getRowMask() { return ofQueries ? op.getQueryMask() : op.getKeyMask(); }
  Value getColumnMask() {
    return ofQueries ? op.getKeyMask() : op.getQueryMask();
  }
};

/// dbias = dx at `place` (batch, head, query, key) if it exists, or, from the
/// second of the rows that share a bias on, dbias += dx: a place belongs to one
/// lane.
void storeBiasGradient(ThreadBuilder &b, Value dbias,
                       SmallVector<Value, 4> place, Value exists,
                       Value gradient);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_MIXING_MIXGRADIENT_H
