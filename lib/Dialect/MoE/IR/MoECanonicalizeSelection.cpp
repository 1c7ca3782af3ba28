//===- MoECanonicalizeSelection.cpp - Cheaper forms of topk_renorm --------===//
//
// A selection that an attribute or operand does not restrict loses it; a
// softmax in front of it and a factor behind it become part of it. The rewrites
// agree up to rounding, and where rounding makes scores equal that were not,
// up to the order of these: each form is a legal selection of the other's
// scores.
//
//===----------------------------------------------------------------------===//

#include "MoECanonicalize.h"
#include "MoEOpsDetail.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/IR/Matchers.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Attributes and operands without effect
//===----------------------------------------------------------------------===//

namespace {
/// All groups kept, or one group: the choice is over all experts. A dropped
/// group would turn its scores to -inf, a kept one leaves them as they are.
struct DropUnrestrictiveGroups : OpRewritePattern<TopKRenormOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(TopKRenormOp op,
                                PatternRewriter &rewriter) const override {
    if (op.getTopkGroup() != op.getNGroup())
      return rewriter.notifyMatchFailure(op, "groups restrict the selection");
    if (op.getNGroup() == 1 && op.getGroupScore() == GroupScore::Top2Sum)
      return rewriter.notifyMatchFailure(op, "there are no groups");
    rewriter.modifyOpInPlace(op, [&] {
      op.setNGroup(1);
      op.setTopkGroup(1);
      op.setGroupScore(GroupScore::Top2Sum);
    });
    return success();
  }
};

/// The score that `kind` implies is not written, and neither is the eps of a
/// sum that is not formed.
struct DropImpliedAttributes : OpRewritePattern<TopKRenormOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(TopKRenormOp op,
                                PatternRewriter &rewriter) const override {
    ScoreFunction implied = op.getKind() == ScoreKind::Probs
                                ? ScoreFunction::None
                                : ScoreFunction::Softmax;
    bool impliedScore = op.getScore() && *op.getScore() == implied;
    bool unusedEps = !op.getRenorm() && !op.getEps().isZero();
    if (!impliedScore && !unusedEps)
      return rewriter.notifyMatchFailure(op, "all attributes have an effect");
    rewriter.modifyOpInPlace(op, [&] {
      if (impliedScore)
        op.removeScoreAttr();
      if (unusedEps)
        op.setEps(APFloat(0.0));
    });
    return success();
  }
};

/// renorm = false over all experts -> renorm = true: the softmax of everything
/// sums to 1 already, and the renormalising form needs no sum of its own over
/// the experts that were not selected.
struct RenormaliseWholeSelection : OpRewritePattern<TopKRenormOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(TopKRenormOp op,
                                PatternRewriter &rewriter) const override {
    int64_t e = op.getNumExperts();
    if (op.getRenorm() || op.getForced() ||
        op.getScoreFunction() != ScoreFunction::Softmax ||
        ShapedType::isDynamic(e) || op.getNumSelected() != e)
      return rewriter.notifyMatchFailure(op, "not a softmax of all experts");
    rewriter.modifyOpInPlace(op, [&] {
      op.setRenorm(true);
      op.setEps(APFloat(0.0));
    });
    return success();
  }
};
} // namespace

/// A bias that is the same for all experts orders them as none does.
static bool isUniformBias(Value bias) {
  std::optional<double> value = getSplatFloat(bias);
  return value && std::isfinite(*value);
}

//===----------------------------------------------------------------------===//
// A softmax in front of the selection
//===----------------------------------------------------------------------===//

/// The maps of a nest over rows whose last loop runs along the rows.
static bool readsWhole(AffineMap map) { return map.isIdentity(); }
static bool readsRow(AffineMap map) {
  return map ==
         AffineMap::getMultiDimIdentityMap(map.getNumDims(), map.getContext())
             .dropResult(map.getNumDims() - 1);
}

/// The operation whose result `op`'s body yields.
static Operation *getYielded(linalg::GenericOp op) {
  return op.getBody()->getTerminator()->getOperand(0).getDefiningOp();
}

/// Whether the body of `op` is a single operation `BodyOp`.
template <typename BodyOp>
static BodyOp getOnlyOp(linalg::GenericOp op) {
  if (!llvm::hasNItems(*op.getBody(), 2))
    return {};
  return dyn_cast_or_null<BodyOp>(getYielded(op));
}

static bool isParallel(linalg::GenericOp op) {
  return op.getNumLoops() == op.getNumParallelLoops();
}

/// x, where `value` is the combination of the rows of x by `CombineOp`.
template <typename CombineOp>
static Value matchRowReduction(Value value) {
  auto op = value.getDefiningOp<linalg::GenericOp>();
  if (!op || op.getNumDpsInputs() != 1 || op.getNumReductionLoops() != 1 ||
      !getOnlyOp<CombineOp>(op) || !readsWhole(op.getIndexingMapsArray()[0]) ||
      !readsRow(op.getIndexingMapsArray()[1]))
    return {};
  return op.getDpsInputOperand(0)->get();
}

/// (x, y), where `value` is `BodyOp` of the elements of x and of y, which has
/// one a row.
template <typename BodyOp>
static std::pair<Value, Value> matchWithRow(linalg::GenericOp op,
                                            BodyOp combine) {
  if (!combine || !isParallel(op) || op.getNumDpsInputs() != 2 ||
      combine.getLhs() != op.getBody()->getArgument(0) ||
      combine.getRhs() != op.getBody()->getArgument(1) ||
      !readsWhole(op.getIndexingMapsArray()[0]) ||
      !readsRow(op.getIndexingMapsArray()[1]) ||
      !readsWhole(op.getIndexingMapsArray()[2]))
    return {};
  return {op.getDpsInputOperand(0)->get(), op.getDpsInputOperand(1)->get()};
}

/// x, where `value` is exp(x - max x).
static Value matchShiftedExp(Value value) {
  auto op = value.getDefiningOp<linalg::GenericOp>();
  if (!op || !llvm::hasNItems(*op.getBody(), 3))
    return {};
  auto exp = dyn_cast_or_null<math::ExpOp>(getYielded(op));
  if (!exp)
    return {};
  auto shift = exp.getOperand().getDefiningOp<arith::SubFOp>();
  auto [x, peak] = matchWithRow(op, shift);
  return x && matchRowReduction<arith::MaximumFOp>(peak) == x ? x : Value();
}

/// x, where `value` is the softmax of x over its last dim: linalg.softmax, or
/// the four loop nests that a softmax imported from torch consists of.
static Value matchSoftmax(Value value) {
  if (auto op = value.getDefiningOp<linalg::SoftmaxOp>())
    return static_cast<int64_t>(op.getDimension()) + 1 ==
                   op.getInputOperandRank()
               ? op.getInput()
               : Value();
  auto op = value.getDefiningOp<linalg::GenericOp>();
  if (!op)
    return {};
  auto [exps, sum] = matchWithRow(op, getOnlyOp<arith::DivFOp>(op));
  if (!exps || matchRowReduction<arith::AddFOp>(sum) != exps)
    return {};
  return matchShiftedExp(exps);
}

namespace {
/// topk_renorm(softmax(z)) {kind = probs} -> topk_renorm(z) {kind = logits}
/// where nothing else needs the probabilities. Rows of -inf get gates 0 (E6),
/// where the softmax had made them NaN.
struct SelectFromLogits : OpRewritePattern<TopKRenormOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(TopKRenormOp op,
                                PatternRewriter &rewriter) const override {
    if (op.getKind() != ScoreKind::Probs)
      return rewriter.notifyMatchFailure(op, "selects from logits already");
    // With a sum that eps shifts, or with choice scores that a bias shifts,
    // the two kinds agree as well; kernels renormalise logits without eps.
    if (!op.getScores().hasOneUse() ||
        (op.getRenorm() && !op.getEps().isZero()))
      return rewriter.notifyMatchFailure(op, "the probabilities are needed");
    Value logits = matchSoftmax(op.getScores());
    if (!logits || !isa<RankedTensorType>(logits.getType()))
      return rewriter.notifyMatchFailure(op, "the scores are no softmax");
    rewriter.modifyOpInPlace(op, [&] {
      op.getScoresMutable().assign(logits);
      op.setKind(ScoreKind::Logits);
      op.removeScoreAttr();
    });
    return success();
  }
};

//===----------------------------------------------------------------------===//
// A factor behind the selection
//===----------------------------------------------------------------------===//

/// gates * c -> gates with route_scale * c
struct FoldFactorIntoRouteScale : OpRewritePattern<linalg::GenericOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(linalg::GenericOp op,
                                PatternRewriter &rewriter) const override {
    if (op.getNumDpsInputs() != 1 || op.getNumResults() != 1 ||
        !isParallel(op) || !llvm::all_of(op.getIndexingMapsArray(), readsWhole))
      return rewriter.notifyMatchFailure(op, "not elementwise");
    auto gates = dyn_cast<OpResult>(op.getDpsInputOperand(0)->get());
    auto topk = gates ? dyn_cast<TopKRenormOp>(gates.getOwner()) : nullptr;
    if (!topk || gates.getResultNumber() != 0 || !gates.hasOneUse() ||
        op.getResult(0).getType() != gates.getType())
      return rewriter.notifyMatchFailure(op, "not the only use of gates");
    std::optional<double> factor = getFactor(op);
    if (!factor || !std::isfinite(*factor))
      return rewriter.notifyMatchFailure(op, "not a product with a constant");
    double scale = topk.getRouteScale().convertToDouble() * *factor;
    rewriter.modifyOpInPlace(topk, [&] { topk.setRouteScale(APFloat(scale)); });
    rewriter.replaceOp(op, gates);
    return success();
  }

private:
  /// c, where the body is `in * c`.
  static std::optional<double> getFactor(linalg::GenericOp op) {
    auto multiply = dyn_cast_or_null<arith::MulFOp>(getYielded(op));
    if (!multiply)
      return std::nullopt;
    Value in = op.getBody()->getArgument(0);
    Value other = multiply.getLhs() == in   ? multiply.getRhs()
                  : multiply.getRhs() == in ? multiply.getLhs()
                                            : Value();
    APFloat factor(0.0);
    if (!other || !matchPattern(other, m_ConstantFloat(&factor)))
      return std::nullopt;
    return factor.convertToDouble();
  }
};
} // namespace

void TopKRenormOp::getCanonicalizationPatterns(RewritePatternSet &results,
                                               MLIRContext *context) {
  results.add<DropImpliedAttributes, DropUnrestrictiveGroups,
              FoldFactorIntoRouteScale, RenormaliseWholeSelection,
              SelectFromLogits>(context);
  results.add<DropNeutralOperand<TopKRenormOp>>(
      context, &TopKRenormOp::getMaskMutable, isAllTrue);
  results.add<DropNeutralOperand<TopKRenormOp>>(
      context, &TopKRenormOp::getSelectBiasMutable, isUniformBias);
}
