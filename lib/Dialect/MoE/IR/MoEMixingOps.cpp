//===- MoEMixingOps.cpp - Dims, maps and verifiers ----------------------===//
//
// One section an op, in the order of MoEMixingOps.td: its dims, its maps, what
// its verifier checks beyond the shapes, its folders.
//
//===----------------------------------------------------------------------===//

#include "MoEOpsDetail.h"

#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// SimilarityInformOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> SimilarityInformOp::getDims() {
  // The entropies that `restrict = entropy` compares are sums over all experts.
  bool wholeExperts = getRestrict() == Restrict::Entropy;
  return {{"b", kParallel},
          {"i", kParallel, wholeExperts},
          {"e", kParallel, wholeExperts},
          {"j", kReduction},
          {"d", kReduction},
          {"f", kReduction}};
}

ArrayAttr SimilarityInformOp::getIndexingMaps() {
  using namespace similarity;
  // Without ws the query and key features are the same dim.
  int64_t keyFeature = getWs() ? f : d;
  // Without keys of their own the queries are the keys, and i stands for both.
  int64_t key = getUk() ? j : i;
  return MapsBuilder(getContext(), numDims)
      .add(getU(), {b, i, d})
      .add(getE(), {b, key, e})
      .add(getUk(), {b, j, keyFeature})
      .add(getWs(), {d, f})
      .add(getMask(), {b, key})
      .add(getQueryMask(), {b, i})
      .add(getTauValue())
      .add(getOrigin())
      .add(getOuts()[0], {b, i, e})
      .add(getOuts()[1], {b, i})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> SimilarityInformOp::getOrigins() {
  return getOriginsAlong(similarity::i, getOriginMutable());
}

LogicalResult SimilarityInformOp::verify() {
  // similarity_inform_c1 follows from the maps: without uk, e spans i.
  if (failed(verifyStructured(*this, {OutElement::F32, OutElement::F32})))
    return failure();
  return verifySimilarity(*this);
}

LogicalResult mlir::moe::verifyVisibility(Operation *op) {
  for (StringRef name : {"causal", "window", "exclude_self"})
    if (op->hasAttr(name))
      return op->emitOpError()
             << "expected visibility = #moe.visibility<causal, window = 4, "
                "exclude_self> with the parts that apply, found the attribute '"
             << name << "'";
  return success();
}

/// The size of dim `position` of `value`.
static Value getDimValue(OpBuilder &builder, Location loc, Value value,
                         int64_t position) {
  return getValueOrCreateConstantIndexOp(
      builder, loc, linalg::createFoldedDimOp(builder, loc, value, position));
}

Value mlir::moe::buildDefaultOrigin(OpBuilder &builder, Location loc,
                                    Value columns, Value rows, int64_t dim) {
  return arith::SubIOp::create(builder, loc,
                               getDimValue(builder, loc, columns, dim),
                               getDimValue(builder, loc, rows, dim));
}

Operation *SimilarityInformOp::makeExplicit(OpBuilder &builder) {
  if (getUk() && getOrigin())
    return *this;
  // restrict = entropy compares queries with keys of the same tensor; its
  // tokens stay whole, so it has nothing to spell out.
  if (getRestrict() == Restrict::Entropy)
    return *this;
  Value keys = getUk() ? getUk() : getU();
  Value origin = getOrigin();
  if (!origin)
    origin = buildDefaultOrigin(builder, getLoc(), keys, getU(), 1);
  auto explicitOp = cast<SimilarityInformOp>(builder.clone(**this));
  explicitOp.getUkMutable().assign(keys);
  explicitOp.getOriginMutable().assign(origin);
  if (!getUk() && getMask() && !getQueryMask())
    explicitOp.getQueryMaskMutable().assign(getMask());
  return explicitOp;
}

//===----------------------------------------------------------------------===//
// AttentionPosteriorOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> AttentionPosteriorOp::getDims() {
  // The head is chosen from all rows of a sequence, or of the whole batch.
  bool wholeBatch = getHeadMode() == HeadMode::MinEntropy &&
                    getHeadScope() == HeadScope::Batch;
  return {{"b", kParallel, wholeBatch},
          {"h", kReduction},
          {"i", kParallel, /*whole=*/true},
          {"j", kReduction},
          {"f", kReduction},
          {"d", kReduction},
          {"c", kReduction},
          {"e", kParallel},
          // The heads of the log-sum-exps: h with head_mode = all, else 1.
          {"l", kParallel, /*whole=*/true}};
}

ArrayAttr AttentionPosteriorOp::getIndexingMaps() {
  using namespace posterior;
  return MapsBuilder(getContext(), numDims)
      .add(getQ(), {b, h, i, f})
      .add(getK(), {b, h, j, f})
      .add(getU(), {b, i, d})
      .add(getE(), {b, j, e})
      .add(getVp(), {b, h, j, d})
      .add(getV(), {b, h, j, c})
      .add(getWo(), {h, d, c})
      .add(getBias(), getBiasDims(getBias(), b, h, i, j))
      .add(getHeadPrior(), {b, i, h})
      .add(getQueryMask(), {b, i})
      .add(getKeyMask(), {b, j})
      .add(getRowLse(), {b, h, i})
      .add(getRowEntropy(), {b, h, i})
      .add(getSigmaValue())
      .add(getOuts()[0], {b, i, e})
      .add(getOuts()[1], {b})
      .add(getOuts()[2], {b, l, i})
      .add(getOuts()[3], {b, l, i})
      .get();
}

FailureOr<double> mlir::moe::getAttentionScale(MoEStructuredOpInterface op,
                                               std::optional<APFloat> scale,
                                               int64_t f) {
  if (scale)
    return scale->convertToDouble();
  int64_t width = getStaticDimSize(op, f);
  if (ShapedType::isDynamic(width) || width == 0)
    return failure();
  return 1.0 / std::sqrt(static_cast<double>(width));
}

LogicalResult mlir::moe::verifyHasScale(Operation *op,
                                        FailureOr<double> scale) {
  if (succeeded(scale))
    return success();
  return op->emitOpError("expected 'scale' where the width of 'q' is not "
                         "static and positive, found none");
}

FailureOr<double> AttentionPosteriorOp::getScaleValue() {
  return getAttentionScale(*this, getScale(), posterior::f);
}

/// attention_posterior_c3: a fixed head exists, and is given exactly when the
/// mode asks for it.
static LogicalResult verifyHead(AttentionPosteriorOp op) {
  std::optional<uint64_t> head = op.getHead();
  bool fixed = op.getHeadMode() == HeadMode::Fixed;
  if (fixed != head.has_value())
    return op.emitOpError()
           << "expected 'head' with head_mode = fixed and only then, found "
           << (head ? "it" : "none")
           << " with head_mode = " << stringifyHeadMode(op.getHeadMode());
  int64_t heads = getStaticDimSize(op, posterior::h);
  if (!fixed || ShapedType::isDynamic(heads))
    return verifyAtLeast(op, head, 0, "head");
  if (static_cast<int64_t>(*head) < 0 || static_cast<int64_t>(*head) >= heads)
    return op.emitOpError() << "expected head to be in [0, " << heads
                            << "), found " << static_cast<int64_t>(*head);
  return success();
}

LogicalResult AttentionPosteriorOp::verify() {
  if (failed(verifyMeans(*this)))
    return failure();
  if (static_cast<bool>(getRowLse()) != static_cast<bool>(getRowEntropy()))
    return emitOpError("expected 'row_lse' and 'row_entropy' together");
  if (failed(verifyStructured(*this, {OutElement::F32, OutElement::I32,
                                      OutElement::F32, OutElement::F32})))
    return failure();
  if (failed(verifySigma(*this)))
    return failure();
  if (failed(verifyHead(*this)))
    return failure();
  if (failed(verifyHasScale(*this, getScaleValue())))
    return failure();
  int64_t lseHeads = getStaticDimSize(*this, posterior::l);
  int64_t heads = getStaticDimSize(*this, posterior::h);
  int64_t expected = getHeadMode() == HeadMode::All ? heads : 1;
  if (!ShapedType::isDynamic(lseHeads) && !ShapedType::isDynamic(expected) &&
      lseHeads != expected)
    return emitOpError() << "expected dim 1 of 'prior_lse' to be " << expected
                         << " with head_mode = "
                         << stringifyHeadMode(getHeadMode()) << ", found "
                         << lseHeads;
  return verifyVisibility(*this);
}

//===----------------------------------------------------------------------===//
// AttentionEntropyOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> AttentionEntropyOp::getDims() {
  return {{"b", kParallel},
          {"h", kParallel},
          {"i", kParallel, /*whole=*/true},
          {"j", kReduction},
          {"f", kReduction}};
}

ArrayAttr AttentionEntropyOp::getIndexingMaps() {
  using namespace entropy;
  return MapsBuilder(getContext(), numDims)
      .add(getQ(), {b, h, i, f})
      .add(getK(), {b, h, j, f})
      .add(getBias(), getBiasDims(getBias(), b, h, i, j))
      .add(getQueryMask(), {b, i})
      .add(getKeyMask(), {b, j})
      .add(getOuts()[0], {b, h})
      .add(getOuts()[1], {b, h, i})
      .get();
}

FailureOr<double> AttentionEntropyOp::getScaleValue() {
  return getAttentionScale(*this, getScale(), entropy::f);
}

LogicalResult AttentionEntropyOp::verify() {
  if (failed(verifyStructured(*this, {OutElement::F32, OutElement::F32})) ||
      failed(verifyHasScale(*this, getScaleValue())))
    return failure();
  return verifyVisibility(*this);
}

//===----------------------------------------------------------------------===//
// SoftmaxMixOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> SoftmaxMixOp::getDims() {
  return {{"b", kParallel}, {"h", kParallel},  {"i", kParallel},
          {"e", kParallel}, {"j", kReduction}, {"f", kReduction}};
}

ArrayAttr SoftmaxMixOp::getIndexingMaps() {
  using namespace mix;
  return MapsBuilder(getContext(), numDims)
      .add(getQ(), {b, h, i, f})
      .add(getK(), {b, h, j, f})
      .add(getV(), getValueDims(getV(), b, h, j, e))
      .add(getKeyBias(), {b, h, j})
      .add(getBias(), getBiasDims(getBias(), b, h, i, j))
      .add(getQueryMask(), {b, i})
      .add(getKeyMask(), {b, j})
      .add(getQueryLevel(), {b, i})
      .add(getKeyLevel(), {b, j})
      .add(getOrigin())
      .add(getMixedInit(), {b, h, i, e})
      .add(getLseInit(), {b, h, i})
      .add(getEntropyInit(), {b, h, i})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> SoftmaxMixOp::getOrigins() {
  return getOriginsAlong(mix::i, getOriginMutable());
}

Operation *SoftmaxMixOp::makeExplicit(OpBuilder &builder) {
  if (getOrigin())
    return *this;
  Value origin = buildDefaultOrigin(builder, getLoc(), getK(), getQ(), 2);
  auto explicitOp = cast<SoftmaxMixOp>(builder.clone(**this));
  explicitOp.getOriginMutable().assign(origin);
  return explicitOp;
}

LogicalResult SoftmaxMixOp::verify() {
  SmallVector<OutElement> outs(
      1 + (getV() ? 1 : 0) + (getWithEntropy() ? 1 : 0), OutElement::F32);
  if (outs.size() != getOuts().size())
    return emitOpError() << "expected " << outs.size()
                         << " destinations in 'outs' (mixed with values, lse, "
                            "entropy with with_entropy), found "
                         << getOuts().size();
  if (static_cast<bool>(getQueryLevel()) != static_cast<bool>(getKeyLevel()))
    return emitOpError("expected 'query_level' and 'key_level' together");
  if (failed(verifyStructured(*this, outs)))
    return failure();
  return verifyVisibility(*this);
}

//===----------------------------------------------------------------------===//
// SoftmaxMixSelfOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> SoftmaxMixSelfOp::getDims() {
  return {{"b", kParallel, /*whole=*/true},
          {"h", kParallel, /*whole=*/true},
          {"i", kParallel, /*whole=*/true},
          {"e", kParallel},
          {"f", kReduction}};
}

ArrayAttr SoftmaxMixSelfOp::getIndexingMaps() {
  using namespace selfmix;
  return MapsBuilder(getContext(), numDims)
      .add(getQ(), {b, h, i, f})
      .add(getV(), {b, i, e})
      .add(getMask(), {b, i})
      .add(getLevel(), {b, i})
      .add(getOuts()[0], {b, h, i, e})
      .add(getOuts()[1], {b, h, i})
      .get();
}

LogicalResult SoftmaxMixSelfOp::verify() {
  if (failed(verifyStructured(*this, {OutElement::F32, OutElement::F32})))
    return failure();
  if (getVisibility().getCausal())
    return emitOpError("expected a visibility that is not causal, because then "
                       "pairs of tokens have one role and share nothing; "
                       "found ")
           << getVisibility();
  return verifyVisibility(*this);
}
