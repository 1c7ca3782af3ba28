//===- MoECanonicalizeMixing.cpp - Cheaper forms of the mixing ops --------===//
//
// Masks, biases, windows, priors and choices that change nothing are dropped,
// because kernels pay for each of them at every pair of tokens or every head.
// Bits do not change, except that a uniform head prior adds a constant less.
//
//===----------------------------------------------------------------------===//

#include "MoECanonicalize.h"
#include "MoEOpsDetail.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Positions
//===----------------------------------------------------------------------===//

namespace {
/// How many queries and keys an op has, and where its queries lie; the origin
/// is known to be the default one, Nk - N.
struct Positions {
  int64_t numQueries, numKeys;
};
} // namespace

static std::optional<Positions> getPositions(SimilarityInformOp op) {
  using namespace similarity;
  if (op.getOrigin())
    return std::nullopt;
  return Positions{getStaticDimSize(op, i),
                   getStaticDimSize(op, op.getUk() ? j : i)};
}
static std::optional<Positions> getPositions(AttentionPosteriorOp op) {
  using namespace posterior;
  return Positions{getStaticDimSize(op, i), getStaticDimSize(op, j)};
}
static std::optional<Positions> getPositions(AttentionEntropyOp op) {
  using namespace entropy;
  return Positions{getStaticDimSize(op, i), getStaticDimSize(op, j)};
}
static std::optional<Positions> getPositions(SoftmaxMixOp op) {
  using namespace mix;
  if (op.getOrigin())
    return std::nullopt;
  return Positions{getStaticDimSize(op, i), getStaticDimSize(op, j)};
}

namespace {
/// A window over all keys hides none: the last query, at Nk - 1, still sees
/// key 0.
template <typename OpTy>
struct DropWideWindow : OpRewritePattern<OpTy> {
  using OpRewritePattern<OpTy>::OpRewritePattern;

  LogicalResult matchAndRewrite(OpTy op,
                                PatternRewriter &rewriter) const override {
    VisibilityAttr visibility = op.getVisibility();
    std::optional<int64_t> window = visibility.getWindow();
    std::optional<Positions> positions = getPositions(op);
    if (!window || !positions || ShapedType::isDynamic(positions->numKeys) ||
        *window < positions->numKeys)
      return rewriter.notifyMatchFailure(op, "no window that sees all keys");
    rewriter.modifyOpInPlace(op, [&] {
      op.setVisibilityAttr(VisibilityAttr::get(
          op.getContext(), visibility.getCausal(), /*window=*/std::nullopt,
          visibility.getExcludeSelf()));
    });
    return success();
  }
};

/// A single query sits at the last key, which no key follows.
template <typename OpTy>
struct DropCausalOfOneQuery : OpRewritePattern<OpTy> {
  using OpRewritePattern<OpTy>::OpRewritePattern;

  LogicalResult matchAndRewrite(OpTy op,
                                PatternRewriter &rewriter) const override {
    VisibilityAttr visibility = op.getVisibility();
    std::optional<Positions> positions = getPositions(op);
    if (!visibility.getCausal() || !positions || positions->numQueries != 1)
      return rewriter.notifyMatchFailure(op, "several queries, or not causal");
    rewriter.modifyOpInPlace(op, [&] {
      op.setVisibilityAttr(VisibilityAttr::get(
          op.getContext(), /*causal=*/false, visibility.getWindow(),
          visibility.getExcludeSelf()));
    });
    return success();
  }
};
} // namespace

/// The rewrites of every op whose queries see keys by their position.
template <typename OpTy>
static void addPositionPatterns(RewritePatternSet &results) {
  results.add<DropCausalOfOneQuery<OpTy>, DropWideWindow<OpTy>>(
      results.getContext());
}

template <typename OpTy>
static void addNeutral(RewritePatternSet &results,
                       MutableOperandRange (OpTy::*get)(),
                       bool (*isNeutral)(Value)) {
  results.add<DropNeutralOperand<OpTy>>(results.getContext(), get, isNeutral);
}

//===----------------------------------------------------------------------===//
// SimilarityInformOp
//===----------------------------------------------------------------------===//

void SimilarityInformOp::getCanonicalizationPatterns(RewritePatternSet &results,
                                                     MLIRContext *) {
  using Op = SimilarityInformOp;
  addPositionPatterns<Op>(results);
  addNeutral<Op>(results, &Op::getMaskMutable, isAllTrue);
  addNeutral<Op>(results, &Op::getQueryMaskMutable, isAllTrue);
  addNeutral<Op>(results, &Op::getWsMutable, isIdentityMatrix);
}

//===----------------------------------------------------------------------===//
// AttentionPosteriorOp
//===----------------------------------------------------------------------===//

/// A prior that prefers no head; any positive constant cancels between heads.
static bool isUniformPrior(Value prior) {
  std::optional<double> value = getSplatFloat(prior);
  return value && *value > 0.0 && std::isfinite(*value);
}

namespace {
/// Only head_mode = all weighs heads by a prior.
struct DropUnusedHeadPrior : OpRewritePattern<AttentionPosteriorOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(AttentionPosteriorOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.getHeadPrior() || op.getHeadMode() == HeadMode::All)
      return rewriter.notifyMatchFailure(op, "the prior is used");
    rewriter.modifyOpInPlace(op, [&] { op.getHeadPriorMutable().clear(); });
    return success();
  }
};

/// The surest of one head is that head: no entropies are needed.
struct FixTheOnlyHead : OpRewritePattern<AttentionPosteriorOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(AttentionPosteriorOp op,
                                PatternRewriter &rewriter) const override {
    if (op.getHeadMode() != HeadMode::MinEntropy ||
        getStaticDimSize(op, posterior::h) != 1)
      return rewriter.notifyMatchFailure(op, "there is a choice of heads");
    rewriter.modifyOpInPlace(op, [&] {
      op.setHeadMode(HeadMode::Fixed);
      op.setHead(0);
    });
    return success();
  }
};

/// A scope without effect returns to its default, which lets sequences be
/// tiled: one sequence is the batch, and modes other than min_entropy choose no
/// head from rows.
struct DropBatchScope : OpRewritePattern<AttentionPosteriorOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(AttentionPosteriorOp op,
                                PatternRewriter &rewriter) const override {
    if (op.getHeadScope() != HeadScope::Batch ||
        (op.getHeadMode() == HeadMode::MinEntropy &&
         getStaticDimSize(op, posterior::b) != 1))
      return rewriter.notifyMatchFailure(op, "the scope has an effect");
    rewriter.modifyOpInPlace(op, [&] { op.setHeadScope(HeadScope::Sequence); });
    return success();
  }
};
} // namespace

void AttentionPosteriorOp::getCanonicalizationPatterns(
    RewritePatternSet &results, MLIRContext *context) {
  using Op = AttentionPosteriorOp;
  addPositionPatterns<Op>(results);
  addNeutral<Op>(results, &Op::getKeyMaskMutable, isAllTrue);
  addNeutral<Op>(results, &Op::getQueryMaskMutable, isAllTrue);
  addNeutral<Op>(results, &Op::getBiasMutable, isAllZero);
  addNeutral<Op>(results, &Op::getHeadPriorMutable, isUniformPrior);
  results.add<DropBatchScope, DropUnusedHeadPrior, FixTheOnlyHead>(context);
}

//===----------------------------------------------------------------------===//
// AttentionEntropyOp
//===----------------------------------------------------------------------===//

void AttentionEntropyOp::getCanonicalizationPatterns(RewritePatternSet &results,
                                                     MLIRContext *) {
  using Op = AttentionEntropyOp;
  addPositionPatterns<Op>(results);
  addNeutral<Op>(results, &Op::getKeyMaskMutable, isAllTrue);
  addNeutral<Op>(results, &Op::getQueryMaskMutable, isAllTrue);
  addNeutral<Op>(results, &Op::getBiasMutable, isAllZero);
}

//===----------------------------------------------------------------------===//
// SoftmaxMixOp
//===----------------------------------------------------------------------===//

void SoftmaxMixOp::getCanonicalizationPatterns(RewritePatternSet &results,
                                               MLIRContext *) {
  using Op = SoftmaxMixOp;
  addPositionPatterns<Op>(results);
  addNeutral<Op>(results, &Op::getKeyMaskMutable, isAllTrue);
  addNeutral<Op>(results, &Op::getQueryMaskMutable, isAllTrue);
  addNeutral<Op>(results, &Op::getKeyBiasMutable, isAllZero);
  addNeutral<Op>(results, &Op::getBiasMutable, isAllZero);
}
