//===- SoftmaxMixBackward.h - What the gradient's kernels share -*- C++ -*-===//
//
// Both sweeps are one: rows of the own side, queries for dq and keys for dk and
// dv, go over the rows of the other side,
//
//   A = exp(x - lse),  dx = A (dmixed . v - delta)       of a pair
//   own gradient += dx other,  dv += A dmixed
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SOFTMAXMIXBACKWARD_H
#define MOE_LIB_CONVERSION_MOETOGPU_SOFTMAXMIXBACKWARD_H

#include "WarpBuilder.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// A sweep by its operands.
struct MixSweep {
  explicit MixSweep(SoftmaxMixBackwardDqOp op);
  explicit MixSweep(SoftmaxMixBackwardDkvOp op);

  MixLogitsOpInterface op;
  /// Whether the own side are the queries.
  bool ofQueries;
  Value lse, delta, v, dmixed, origin;
  double scale;
  /// The destinations: of the own features, of the values, of the sums of dx
  /// and of dx; null if there are none.
  Value gradient, dv, total, dbias;

  Value getOwn() { return ofQueries ? op.getQ() : op.getK(); }
  Value getOther() { return ofQueries ? op.getK() : op.getQ(); }
  Value getOwnMask() { return ofQueries ? op.getQueryMask() : op.getKeyMask(); }
  Value getOtherMask() {
    return ofQueries ? op.getKeyMask() : op.getQueryMask();
  }
};

/// dbias = dx at `place` (batch, head, query, key) if it exists, or, from the
/// second of the rows that share a bias on, dbias += dx: a place belongs to one
/// lane.
void storeBiasGradient(ThreadBuilder &b, Value dbias,
                       SmallVector<Value, 4> place, Value exists,
                       Value gradient);

/// Rows that a block takes at a time on tensor cores with `sharedBytes` of
/// shared memory; nullopt if the sweep cannot run there.
std::optional<int64_t> getTensorSweepRows(MixSweep sweep, int64_t sharedBytes);

void emitSweepOnTensorCores(WarpBuilder &b, MixSweep sweep,
                            int64_t sharedBytes);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SOFTMAXMIXBACKWARD_H
