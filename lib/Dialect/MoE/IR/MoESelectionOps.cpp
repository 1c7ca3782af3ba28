//===- MoESelectionOps.cpp - Dims, maps and verifiers -------------------===//
//
// One section an op, in the order of MoESelectionOps.td: its dims, its maps,
// what its verifier checks beyond the shapes, its folders.
//
//===----------------------------------------------------------------------===//

#include "MoEOpsDetail.h"

#include "MoE/Dialect/MoE/IR/ChoiceOrder.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// TopKRenormOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> TopKRenormOp::getDims() {
  // num_valid compares with positions in the whole problem. On tensors tiling
  // turns it into a mask first (makeExplicit).
  bool wholeTokens = getNumValid() && !hasPureTensorSemantics();
  return withLeadingDims(getNumLeading(getScores()),
                         {{"e", kReduction}, {"k", kParallel, /*whole=*/true}},
                         wholeTokens);
}

ArrayAttr TopKRenormOp::getIndexingMaps() {
  int64_t n = getNumLeading(getScores()), e = n, k = n + 1;
  return MapsBuilder(getContext(), n + 2)
      .addWithLeading(getScores(), n, {e})
      .add(getSelectBias(), {e})
      .addWithLeading(getForced(), n, {k})
      .addWithLeading(getMask(), n, {})
      .add(getNumValid())
      .addWithLeading(getGatesInit(), n, {k})
      .addWithLeading(getIndicesInit(), n, {k})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> TopKRenormOp::getDimOrder() {
  unsigned e = getNumLeading(getScores()), k = e + 1;
  return {{k, e}};
}

unsigned TopKRenormOp::getNumLeadingDims() {
  return getNumLeading(getScores());
}

ScoreFunction TopKRenormOp::getScoreFunction() {
  if (std::optional<ScoreFunction> score = getScore())
    return *score;
  return getKind() == ScoreKind::Probs ? ScoreFunction::None
                                       : ScoreFunction::Softmax;
}

int64_t TopKRenormOp::getNumExperts() {
  return getStaticDimSize(*this, getNumLeading(getScores()));
}

int64_t TopKRenormOp::getNumSelected() {
  return getStaticDimSize(*this, getNumLeading(getScores()) + 1);
}

bool mlir::moe::isOrderedByGivenScores(TopKRenormOp op) {
  bool sumsScores =
      op.getNGroup() > 1 && op.getGroupScore() == GroupScore::Top2Sum;
  bool isGiven = op.getScoreFunction() == ScoreFunction::None || !sumsScores;
  return isGiven && !op.getSelectBias();
}

/// topk_renorm_c3 and topk_renorm_c4: groups have equal sizes and the kept ones
/// hold at least k experts.
static LogicalResult verifyGroups(TopKRenormOp op) {
  int64_t nGroup = op.getNGroup(), topkGroup = op.getTopkGroup();
  if (failed(verifyAtLeastOne(op, nGroup, "n_group")))
    return failure();
  if (topkGroup < 1 || topkGroup > nGroup)
    return op.emitOpError()
           << "expected topk_group to be in [1, n_group = " << nGroup
           << "], found " << topkGroup;
  int64_t e = op.getNumExperts(), k = op.getNumSelected();
  if (ShapedType::isDynamic(e)) {
    if (nGroup == 1)
      return success();
    return op.emitOpError()
           << "expected a static number of experts, which n_group (" << nGroup
           << ") divides, found a dynamic one";
  }
  if (e % nGroup != 0)
    return op.emitOpError()
           << "expected n_group (" << nGroup
           << ") to divide the number of experts (" << e << ")";
  int64_t kept = topkGroup * (e / nGroup);
  if (!ShapedType::isDynamic(k) && k > kept)
    return op.emitOpError()
           << "expected k (" << k
           << ") to be at most the number of experts in the topk_group kept "
              "groups ("
           << kept << ")";
  return success();
}

LogicalResult TopKRenormOp::verify() {
  if (failed(verifyHasLastDim(*this, getScores(), "scores")))
    return failure();
  // topk_renorm_c1 (upper end) and topk_renorm_c2 follow from the maps and the
  // dim order.
  if (failed(
          verifyStructured(*this, {OutElement::F32, OutElement::ExpertIndex})))
    return failure();
  int64_t k = getNumSelected();
  if (!ShapedType::isDynamic(k) && k < 1) // topk_renorm_c1
    return emitOpError() << "expected k to be at least 1, found " << k;
  if (failed(verifyGroups(*this)))
    return failure();
  if (getKind() == ScoreKind::Probs &&
      getScoreFunction() != ScoreFunction::None)
    return emitOpError() // topk_renorm_c5
           << "expected score to be none with kind = probs, found "
           << stringifyScoreFunction(getScoreFunction());
  if (getKind() == ScoreKind::Logits &&
      getScoreFunction() == ScoreFunction::None)
    return emitOpError("expected a score function with kind = logits, found "
                       "none; scores that need none are kind = probs");
  double eps = getEps().convertToDouble();
  if (!(eps >= 0.0))
    return emitOpError() << "expected eps to be at least 0, found " << eps;
  return success();
}

//===----------------------------------------------------------------------===//
// ThresholdRenormOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> ThresholdRenormOp::getDims() {
  return withLeadingDims(getNumLeading(getP()),
                         {{"e", kParallel, /*whole=*/true}});
}

ArrayAttr ThresholdRenormOp::getIndexingMaps() {
  int64_t n = getNumLeading(getP()), e = n;
  return MapsBuilder(getContext(), n + 1)
      .addWithLeading(getP(), n, {e})
      .add(getThetaValue())
      .addWithLeading(getMask(), n, {})
      .addWithLeading(getOuts()[0], n, {e})
      .addWithLeading(getOuts()[1], n, {})
      .get();
}

unsigned ThresholdRenormOp::getNumLeadingDims() {
  return getNumLeading(getP());
}

LogicalResult ThresholdRenormOp::verify() {
  if (failed(verifyHasLastDim(*this, getP(), "p")) ||
      failed(verifyStructured(*this, {OutElement::F32, OutElement::I32})))
    return failure();
  if (getStaticDimSize(*this, getNumLeading(getP())) ==
      0) // threshold_renorm_c1
    return emitOpError("expected at least one expert, found none");
  double theta = getTheta().convertToDouble();
  if (!getThetaValue() && !std::isfinite(theta)) // threshold_renorm_c2
    return emitOpError() << "expected theta to be finite, found " << theta;
  return success();
}

//===----------------------------------------------------------------------===//
// DensifyOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> DensifyOp::getDims() {
  return withLeadingDims(getNumLeading(getGates()),
                         {{"e", kParallel, /*whole=*/true}, {"k", kReduction}});
}

ArrayAttr DensifyOp::getIndexingMaps() {
  int64_t n = getNumLeading(getGates()), e = n, k = n + 1;
  return MapsBuilder(getContext(), n + 2)
      .addWithLeading(getGates(), n, {k})
      .addWithLeading(getIndices(), n, {k})
      .addWithLeading(getOuts()[0], n, {e})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> DensifyOp::getDimOrder() {
  unsigned e = getNumLeading(getGates()), k = e + 1;
  return {{k, e}};
}

LogicalResult DensifyOp::verify() {
  if (failed(verifyHasLastDim(*this, getGates(), "gates")))
    return failure();
  return verifyStructured(*this, {OutElement::F32});
}

//===----------------------------------------------------------------------===//
// MakeFiniteOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> MakeFiniteOp::getDims() {
  return withLeadingDims(getNumLeading(getScores()),
                         {{"e", kParallel, /*whole=*/true}},
                         /*whole=*/getScope() == FiniteScope::Tensor);
}

ArrayAttr MakeFiniteOp::getIndexingMaps() {
  int64_t n = getNumLeading(getScores()), e = n;
  return MapsBuilder(getContext(), n + 1)
      .addWithLeading(getScores(), n, {e})
      .addWithLeading(getOuts()[0], n, {e})
      .get();
}

LogicalResult MakeFiniteOp::verify() {
  if (failed(verifyHasLastDim(*this, getScores(), "scores")))
    return failure();
  return verifyStructured(*this, {OutElement::F32});
}
