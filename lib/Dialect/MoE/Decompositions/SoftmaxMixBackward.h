//===- SoftmaxMixBackward.h - Writing the sweeps of a gradient --*- C++ -*-===//

#ifndef LIB_DIALECT_MOE_DECOMPOSITIONS_SOFTMAXMIXBACKWARD_H
#define LIB_DIALECT_MOE_DECOMPOSITIONS_SOFTMAXMIXBACKWARD_H

#include "SoftmaxMix.h"

namespace mlir::moe {

/// The arguments of both sweeps over a mix.
struct MixBackward {
  Mix mix;
  Value lse, delta, dmixed;

  SoftmaxMixBackwardDqOp buildDq(OpBuilder &builder, Location loc,
                                 ValueRange outs, bool withSums = false,
                                 bool withDbias = false) const;
  SoftmaxMixBackwardDkvOp buildDkv(OpBuilder &builder, Location loc,
                                   ValueRange outs,
                                   bool withSums = false) const;
  /// Both at once, where queries and keys are the same tokens.
  SoftmaxMixBackwardSelfOp buildSelf(OpBuilder &builder, Location loc,
                                     ValueRange outs) const;
};

/// `access` in f32 with 0 for masked tokens, where there is a mask.
Access withoutPadding(Domain &domain, Access access,
                      std::optional<Access> mask);

/// `access` with the dims at positions first and first + 1, which lie side by
/// side, as the one dim `joined`.
Access joinDims(OpBuilder &builder, Domain &domain, Access access,
                int64_t first, int64_t joined);

/// A dim as long as `outer` and `inner` together.
int64_t addJoinedDim(Domain &domain, int64_t outer, int64_t inner);

} // namespace mlir::moe

#endif // LIB_DIALECT_MOE_DECOMPOSITIONS_SOFTMAXMIXBACKWARD_H
