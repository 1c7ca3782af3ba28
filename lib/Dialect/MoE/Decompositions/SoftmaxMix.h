//===- SoftmaxMix.h - Writing softmax_mix and its backward ------*- C++ -*-===//
//
// What the conversions of the mixing ops and of their gradients share: the
// arguments of a softmax_mix, and the posterior as an attention over
// concatenated features.
//
//===----------------------------------------------------------------------===//

#ifndef LIB_DIALECT_MOE_DECOMPOSITIONS_SOFTMAXMIX_H
#define LIB_DIALECT_MOE_DECOMPOSITIONS_SOFTMAXMIX_H

#include "Mixing.h"
#include "MoE/Dialect/MoE/IR/KernelConfig.h"

namespace mlir::moe {

/// The arguments of a softmax_mix, by name.
struct Mix {
  Value q, k, v, keyBias, bias, queryMask, keyMask, queryLevel, keyLevel,
      origin;
  SmallVector<Value> outs;
  double scale = 1.0;
  VisibilityAttr visibility;
  bool withEntropy = false;
  Precision precision = Precision::IEEE;

  SoftmaxMixOp build(OpBuilder &builder, Location loc) const;
  /// Where queries, masks and levels are those of the keys.
  SoftmaxMixSelfOp buildSelf(OpBuilder &builder, Location loc) const;
};

/// The mix that an op on tokens that mix with themselves stands for, but for
/// its destinations.
template <typename OpTy>
Mix startSelfMix(OpTy op) {
  Mix mix;
  mix.q = mix.k = op.getQ();
  mix.queryMask = mix.keyMask = op.getMask();
  mix.queryLevel = mix.keyLevel = op.getLevel();
  mix.v = op.getV();
  mix.scale = op.getScale().convertToDouble();
  mix.visibility = op.getVisibility();
  mix.precision = op.getPrecision();
  return mix;
}

/// `[b, rest..]` to `[b, 1, rest..]`.
Value addHeadDim(OpBuilder &builder, Location loc, Value value);
/// `[b, 1, rest..]` to `[b, rest..]`.
Value dropHeadDim(OpBuilder &builder, Location loc, Value value);

//===----------------------------------------------------------------------===//
// Similarity
//===----------------------------------------------------------------------===//

/// The queries u ws, `[b, i, d]` without ws or else `[b, i, f]`.
Access buildSimilarityQueries(Domain &domain, const SimilarityOperands &op);

/// Whether each pair of tokens is to be taken once, in both of its roles.
template <typename OpTy>
bool takesPairsOnce(OpTy op) {
  return hasSchedule(op, KernelSchedule::PairsOnce) && canTakePairsOnce(op);
}

/// The mix of similarity_inform but for its destinations. The scale is 1/tau,
/// or 1 with a tau value, which `queries` must have been divided by.
Mix startSimilarityMix(OpBuilder &builder, Domain &domain,
                       const SimilarityOperands &op, Access queries);

//===----------------------------------------------------------------------===//
// Posterior
//===----------------------------------------------------------------------===//

/// The operands of the posterior that have a head, with the dims that index
/// them: as the op has them, or reduced to one head.
struct HeadOperands {
  Access q, k;
  /// Either `vp`, or `v` and `wo`.
  std::optional<Access> vp, v, wo, bias;
  /// The log-sum-exps and entropies of the prior that the attention has
  /// emitted.
  std::optional<Access> rowLse, rowEntropy;
  /// The dim of the heads.
  int64_t head;
};

HeadOperands getHeadOperands(Domain &domain, const PosteriorOperands &op);

/// Applies `pick` to each operand that has the head dim.
HeadOperands pickHead(const HeadOperands &all, int64_t one,
                      function_ref<Access(const Access &)> pick);

/// out[b, one, ..] = access[b, head_b, ..]: the operand of the head that each
/// sequence chose. What all sequences share becomes theirs.
Access gatherHead(Domain &domain, const Access &access, int64_t one,
                  Access head);

/// The concatenation of two operands along their last dim, in their common
/// element type or else in f32.
Value concatFeatures(OpBuilder &builder, Domain &domain, Access lhs,
                     Access rhs);

/// wo^T wo v, `[b, head, j, c]`.
Access buildGramProducts(Domain &domain, const HeadOperands &operands);

/// The bias of each key, -|v'_j|^2/(2 sigma^2), `[b, head, j]`.
Value buildKeyBias(Domain &domain, const HeadOperands &operands,
                   Value precision);

/// The features of the queries, [q * scale, u~ / sigma^2] with u~ = wo^T u, or
/// u itself for given means.
Value buildQueryFeatures(OpBuilder &builder, Domain &domain,
                         const PosteriorOperands &op, Access u,
                         const HeadOperands &operands, Value precision);

/// What the mixes of the prior and of the posterior have in common.
Mix startMix(const AttentionOperands &op, const HeadOperands &operands);

} // namespace mlir::moe

#endif // LIB_DIALECT_MOE_DECOMPOSITIONS_SOFTMAXMIX_H
