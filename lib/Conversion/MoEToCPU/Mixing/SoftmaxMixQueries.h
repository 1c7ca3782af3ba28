//===- SoftmaxMixQueries.h - Queries whose lse are alike --------*- C++ -*-===//
//
// Where tokens mix with themselves, a pair has a weight in each of its roles,
// exp(x - lse_r) and exp(x - lse_c). With f_r = exp(L - lse_r) for any number L
// they are f_r w and f_c w of one w = exp(x - L). A gradient multiplies them by
// what their queries have, g and delta: with L in place of lse, f g in place of
// g and f delta in place of delta it is the same, and takes one exponential a
// pair.
//
// That holds in f32 as long as all lse are near to L. No w overflows, because
// no logit exceeds the lse of a query that sees it; where w underflows, a
// weight loses less than 1e-38 / f. Tokens of one norm have near lse. Where lse
// are far from each other, f is 1 and lse stay what they are.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXQUERIES_H
#define MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXQUERIES_H

#include "SoftmaxMixRole.h"

namespace mlir::moe {

class ScaledQueries {
public:
  /// For `paddedTokens` tokens, in f32.
  ScaledQueries(Emitter &e, KernelBuffers &buffers, Value paddedTokens,
                OpFoldResult numValues);

  /// Fills the buffers from what `role`, whose rows are queries, reads: all lse
  /// are one where `mayShare` and they are near to each other.
  void fill(Emitter &e, const GradientRole &role, bool mayShare);
  /// The gradients of mixed, as wide as `numValues`.
  Value getCotangents(Emitter &e) const;

  /// Per token. Cotangents, gradients of mixed in whole vectors, are 0 for
  /// tokens that have none and behind the last one.
  Value lse, delta, cotangents;
  /// Whether lse are one number; null: they never are.
  Value isShared;

private:
  Value findMiddle(Emitter &e, Value lse);
  void scaleRow(Emitter &e, const GradientRole &role, Value row);

  OpFoldResult numValues;
  Value factors;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXQUERIES_H
