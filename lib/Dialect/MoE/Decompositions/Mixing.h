//===- Mixing.h - What the mixing ops are made of ---------------*- C++ -*-===//
//
// An op and its gradient are made of the same operands: those are gathered
// here, so that one function builds a part of both.
//
//===----------------------------------------------------------------------===//

#ifndef LIB_DIALECT_MOE_DECOMPOSITIONS_MIXING_H
#define LIB_DIALECT_MOE_DECOMPOSITIONS_MIXING_H

#include "Domain.h"

namespace mlir::moe {

//===----------------------------------------------------------------------===//
// Operands
//===----------------------------------------------------------------------===//

/// What the logits of similarity_inform and of its gradient are made of; absent
/// operands are null.
struct SimilarityOperands {
  template <typename OpTy>
  SimilarityOperands(OpTy op)
      : u(op.getU()), e(op.getE()), uk(op.getUk()), ws(op.getWs()),
        keyMask(op.getMask()), queryMask(op.getQueryMask()),
        tauValue(op.getTauValue()), origin(op.getOrigin()),
        tau(op.getTau().convertToDouble()), visibility(op.getVisibility()),
        restrictedTo(op.getRestrict()), precision(op.getPrecision()) {
    // The keys are the queries.
    if (!uk && !queryMask)
      queryMask = keyMask;
  }

  Value u, e, uk, ws, keyMask, queryMask;
  Value tauValue; ///< Stands for `tau` where it is there.
  Value origin;
  double tau;
  VisibilityAttr visibility;
  Restrict restrictedTo;
  Precision precision;
};

/// What the logits scale q.k + bias of an attention are made of, for ops with
/// the dims of `posterior`.
struct AttentionOperands {
  template <typename OpTy>
  AttentionOperands(OpTy op)
      : q(op.getQ()), k(op.getK()), bias(op.getBias()),
        keyMask(op.getKeyMask()), queryMask(op.getQueryMask()),
        scale(*op.getScaleValue()), visibility(op.getVisibility()),
        precision(op.getPrecision()) {}

  Value q, k, bias, keyMask, queryMask;
  double scale;
  VisibilityAttr visibility;
  Precision precision;
};

/// What the logits of attention_posterior and of its gradient are made of.
struct PosteriorOperands : AttentionOperands {
  template <typename OpTy>
  PosteriorOperands(OpTy op)
      : AttentionOperands(op), u(op.getU()), e(op.getE()), vp(op.getVp()),
        v(op.getV()), wo(op.getWo()), headPrior(op.getHeadPrior()),
        sigmaValue(op.getSigmaValue()), sigma(op.getSigma().convertToDouble()) {
  }

  Value u, e;
  Value vp, v, wo; ///< Either `vp`, or `v` and `wo`.
  Value headPrior;
  Value sigmaValue; ///< Stands for `sigma` where it is there.
  double sigma;
};

//===----------------------------------------------------------------------===//
// Parts
//===----------------------------------------------------------------------===//

/// H_row = -sum_e p ln p of distributions over `dim`, with 0 ln 0 = 0.
Access buildEntropies(Domain &domain, Access p, ArrayRef<int64_t> row);

/// `value` over `dims`, or nullopt where there is none.
std::optional<Access> atIfPresent(Domain &domain, Value value,
                                  ArrayRef<int64_t> dims);

/// The mean of each head's row entropies over the unmasked queries, into the
/// op's own destination.
Access buildMeanEntropies(Domain &domain, AttentionEntropyOp op, Access rows);

/// The logits of softmax_mix, `[b, h, i, j]`, -inf where the query does not see
/// the key; with `isTransposed`, where j sees i. `origin` is the key position
/// of query 0; null for the default.
Access buildMixLogits(Domain &domain, MixLogitsOpInterface op, Value origin,
                      bool isTransposed = false);

/// u_i^T ws uk_j / tau, `[b, i, j]`, -inf where not visible. `j` is the dim of
/// the keys.
Access buildSimilarities(Domain &domain, const SimilarityOperands &op,
                         int64_t j);

/// `rows` in `out`, `hidden` for the queries that `queryMask`, which may be
/// null, masks.
Access hideRows(Domain &domain, Access rows, Value queryMask, Value hidden,
                Access out);

/// The head whose rows have the smallest mean entropy, the lower of equal ones:
/// i32 `[b]`. `entropies` are `[b, h, i]`, 0 for masked rows.
Access buildMinEntropyHead(Domain &domain, AttentionPosteriorOp op,
                           Access entropies);

/// The weights of the heads (22), `[b, h, i]`: softmax_h(ln pi + posterior_lse
/// - prior_lse), 0 for a row that sees no key.
Access buildHeadWeights(Domain &domain, const PosteriorOperands &op,
                        Access priorLse, Access posteriorLse);

/// 1/sigma^2.
Value buildPrecision(Domain &domain, const PosteriorOperands &op);

/// l_hij = scale q.k + bias, -inf where not visible.
Access buildPriorLogits(Domain &domain, const AttentionOperands &op);

/// v'_hj, `[b, h, j, d]`.
Access buildMeans(Domain &domain, const PosteriorOperands &op);

/// l + u_i.v'_j/sigma^2 - |v'_j|^2/(2 sigma^2), where l admits the pair.
Access buildPosteriorLogits(Domain &domain, const PosteriorOperands &op,
                            Access prior, Access means);

} // namespace mlir::moe

#endif // LIB_DIALECT_MOE_DECOMPOSITIONS_MIXING_H
