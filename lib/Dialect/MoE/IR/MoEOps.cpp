//===- MoEOps.cpp - Dims, maps and verifiers of the moe ops ---------------===//
//
// One section an op, in the order of MoEOps.td: its dims, its maps, what its
// verifier checks beyond the shapes, its folders.
//
//===----------------------------------------------------------------------===//

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"

#define GET_OP_CLASSES
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"

using namespace mlir;
using namespace mlir::moe;

using utils::IteratorType;

//===----------------------------------------------------------------------===//
// What the ops share
//===----------------------------------------------------------------------===//

static constexpr IteratorType kParallel = IteratorType::parallel;
static constexpr IteratorType kReduction = IteratorType::reduction;

static int64_t getRank(Value value) {
  return cast<ShapedType>(value.getType()).getRank();
}

/// The dims of an op over tokens with free leading dims: `n0, n1, ..` followed
/// by the op's own.
static SmallVector<Dim> withLeadingDims(int64_t numLeading, ArrayRef<Dim> dims,
                                        bool whole = false) {
  static constexpr StringLiteral names[] = {"n0", "n1", "n2", "n3",
                                            "n4", "n5", "n6", "n7"};
  SmallVector<Dim> all;
  for (int64_t i = 0; i < numLeading; ++i)
    all.push_back({numLeading == 1 ? StringRef("n")
                                   : StringRef(names[std::min<int64_t>(i, 7)]),
                   kParallel, whole});
  llvm::append_range(all, dims);
  return all;
}

/// The leading dims of a `[.., e]` operand; none for a scalar, which the
/// verifier refuses.
static int64_t getNumLeading(Value value) {
  return std::max<int64_t>(getRank(value) - 1, 0);
}

static LogicalResult verifyHasLastDim(Operation *op, Value value,
                                      StringRef name) {
  if (getRank(value) >= 1)
    return success();
  return op->emitOpError() << "expected '" << name
                           << "' to have at least one dim, found a scalar";
}

static LogicalResult verifyAtLeast(Operation *op, std::optional<int64_t> value,
                                   int64_t least, StringRef name) {
  if (!value || *value >= least)
    return success();
  return op->emitOpError() << "expected " << name << " to be at least " << least
                           << ", found " << *value;
}
static LogicalResult
verifyAtLeastOne(Operation *op, std::optional<int64_t> value, StringRef name) {
  return verifyAtLeast(op, value, 1, name);
}

static LogicalResult verifyPositive(Operation *op, double value,
                                    StringRef name) {
  // Written so that NaN fails too.
  if (value > 0.0 && std::isfinite(value))
    return success();
  return op->emitOpError() << "expected " << name
                           << " to be positive and finite, found " << value;
}

/// An operand dim that is 1 is broadcast along `dim`.
static int64_t orBroadcast(Value value, unsigned position, int64_t dim) {
  return cast<ShapedType>(value.getType()).getDimSize(position) == 1
             ? MapsBuilder::kBroadcast
             : dim;
}

/// Rank-4 biases are `[b or 1, h or 1, i, j]`.
static SmallVector<int64_t> getBiasDims(Value bias, int64_t b, int64_t h,
                                        int64_t i, int64_t j) {
  if (!bias || getRank(bias) != 4)
    return {b, h, i, j};
  return {orBroadcast(bias, 0, b), orBroadcast(bias, 1, h), i, j};
}

#define MOE_STRUCTURED_OP(OP)                                                  \
  void OP::getEffects(                                                         \
      SmallVectorImpl<SideEffects::EffectInstance<MemoryEffects::Effect>>      \
          &effects) {                                                          \
    getStructuredEffects(*this, effects);                                      \
  }                                                                            \
  LogicalResult OP::reifyResultShapes(OpBuilder &builder,                      \
                                      ReifiedRankedShapedTypeDims &shapes) {   \
    return reifyFromInits(*this, builder, shapes);                             \
  }

MOE_STRUCTURED_OP(RouterLogitsOp)
MOE_STRUCTURED_OP(TopKRenormOp)
MOE_STRUCTURED_OP(SimilarityInformOp)
MOE_STRUCTURED_OP(AttentionPosteriorOp)
MOE_STRUCTURED_OP(SoftmaxMixOp)
MOE_STRUCTURED_OP(MadDispersionOp)
MOE_STRUCTURED_OP(AdjacencyGateOp)
MOE_STRUCTURED_OP(AdjacencyUpdateOp)
#undef MOE_STRUCTURED_OP

//===----------------------------------------------------------------------===//
// RouterLogitsOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> RouterLogitsOp::getDims() {
  return withLeadingDims(getNumLeading(getH()),
                         {{"e", kParallel}, {"d", kReduction}});
}

ArrayAttr RouterLogitsOp::getIndexingMaps() {
  int64_t n = getNumLeading(getH()), e = n, d = n + 1;
  return MapsBuilder(getContext(), n + 2)
      .addWithLeading(getH(), n, {d})
      .add(getWeight(), {e, d})
      .add(getBias(), {e})
      .addWithLeading(getOuts()[0], n, {e})
      .get();
}

LogicalResult RouterLogitsOp::verify() {
  if (failed(verifyHasLastDim(*this, getH(), "h")))
    return failure();
  return verifyStructured(*this, {OutElement::F32});
}

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
  if (ShapedType::isDynamic(e))
    return success();
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

/// A single group restricts nothing: its attributes return to their defaults.
LogicalResult TopKRenormOp::canonicalize(TopKRenormOp op,
                                         PatternRewriter &rewriter) {
  // All groups kept, or one group: the choice is over all experts. A dropped
  // group would turn its scores to -inf, a kept one leaves them as they are.
  if (op.getNGroup() == 1 || op.getTopkGroup() != op.getNGroup())
    return rewriter.notifyMatchFailure(op, "groups restrict the selection");
  rewriter.modifyOpInPlace(op, [&] {
    op.setNGroup(1);
    op.setTopkGroup(1);
    op.setGroupScore(GroupScore::Top2Sum);
  });
  return success();
}

//===----------------------------------------------------------------------===//
// SimilarityInformOp
//===----------------------------------------------------------------------===//

namespace similarity {
enum : int64_t { b, i, e, j, d, f, numDims };
} // namespace similarity

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
  if (!getOrigin())
    return {};
  return {{getODSOperandIndexAndLength(7).first, similarity::i}};
}

LogicalResult SimilarityInformOp::verify() {
  // similarity_inform_c1 follows from the maps: without uk, e spans i.
  if (failed(verifyStructured(*this, {OutElement::F32, OutElement::F32})))
    return failure();
  if (!getTauValue() &&
      failed(verifyPositive(*this, getTau().convertToDouble(), "tau")))
    return failure(); // similarity_inform_c2
  if (getRestrict() == Restrict::Entropy && getUk())
    return emitOpError( // similarity_inform_c3
        "expected no keys of their own with restrict = entropy, because the "
        "entropies of queries and keys are compared; found uk");
  if (!getUk() && getWs()) {
    auto type = cast<ShapedType>(getWs().getType());
    if (type.getDimSize(0) != type.getDimSize(1))
      return emitOpError() << "expected 'ws' to be square without 'uk', found "
                           << type;
  }
  return verifyAtLeastOne(*this, getWindow(), "window"); // similarity_inform_c4
}

/// The size of dim `position` of `value`.
static Value getDimValue(OpBuilder &builder, Location loc, Value value,
                         int64_t position) {
  return getValueOrCreateConstantIndexOp(
      builder, loc, linalg::createFoldedDimOp(builder, loc, value, position));
}

/// The position of query 0 among the keys when the last query sits at the last
/// key: Nk - N.
static Value buildDefaultOrigin(OpBuilder &builder, Location loc, Value keys,
                                int64_t keyDim, Value queries,
                                int64_t queryDim) {
  return arith::SubIOp::create(builder, loc,
                               getDimValue(builder, loc, keys, keyDim),
                               getDimValue(builder, loc, queries, queryDim));
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
    origin = buildDefaultOrigin(builder, getLoc(), keys, 1, getU(), 1);
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

namespace posterior {
enum : int64_t { b, h, i, j, f, d, c, e, l, numDims };
} // namespace posterior

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
      .add(getMask(), {b, j})
      .add(getSigmaValue())
      .add(getOuts()[0], {b, i, e})
      .add(getOuts()[1], {b})
      .add(getOuts()[2], {b, l, i})
      .add(getOuts()[3], {b, l, i})
      .get();
}

FailureOr<double> AttentionPosteriorOp::getScaleValue() {
  if (std::optional<APFloat> scale = getScale())
    return scale->convertToDouble();
  int64_t width = getStaticDimSize(*this, posterior::f);
  if (ShapedType::isDynamic(width) || width == 0)
    return failure();
  return 1.0 / std::sqrt(static_cast<double>(width));
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
  bool means = static_cast<bool>(getVp());
  bool values = getV() && getWo();
  if (means == values) // attention_posterior_c1
    return emitOpError() << "expected exactly one of 'vp' and ('v', 'wo'), "
                            "found "
                         << (means ? "both" : "neither");
  if (failed(verifyStructured(*this, {OutElement::F32, OutElement::I32,
                                      OutElement::F32, OutElement::F32})))
    return failure();
  if (!getSigmaValue() &&
      failed(verifyPositive(*this, getSigma().convertToDouble(), "sigma")))
    return failure(); // attention_posterior_c2
  if (failed(verifyHead(*this)))
    return failure();
  if (failed(getScaleValue()))
    return emitOpError("expected 'scale' where the width of 'q' is not static "
                       "and positive, found none");
  int64_t lseHeads = getStaticDimSize(*this, posterior::l);
  int64_t heads = getStaticDimSize(*this, posterior::h);
  int64_t expected = getHeadMode() == HeadMode::All ? heads : 1;
  if (!ShapedType::isDynamic(lseHeads) && !ShapedType::isDynamic(expected) &&
      lseHeads != expected)
    return emitOpError() << "expected dim 1 of 'prior_lse' to be " << expected
                         << " with head_mode = "
                         << stringifyHeadMode(getHeadMode()) << ", found "
                         << lseHeads;
  return verifyAtLeastOne(*this, getWindow(),
                          "window"); // attention_posterior_c4
}

//===----------------------------------------------------------------------===//
// SoftmaxMixOp
//===----------------------------------------------------------------------===//

namespace mix {
enum : int64_t { b, h, i, e, j, f, numDims };
} // namespace mix

SmallVector<Dim> SoftmaxMixOp::getDims() {
  return {{"b", kParallel}, {"h", kParallel},  {"i", kParallel},
          {"e", kParallel}, {"j", kReduction}, {"f", kReduction}};
}

ArrayAttr SoftmaxMixOp::getIndexingMaps() {
  using namespace mix;
  return MapsBuilder(getContext(), numDims)
      .add(getQ(), {b, h, i, f})
      .add(getK(), {b, h, j, f})
      .add(getV(), {b, j, e})
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
  if (!getOrigin())
    return {};
  return {{getODSOperandIndexAndLength(9).first, mix::i}};
}

Operation *SoftmaxMixOp::makeExplicit(OpBuilder &builder) {
  if (getOrigin())
    return *this;
  Value origin = buildDefaultOrigin(builder, getLoc(), getK(), 2, getQ(), 2);
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
  return verifyAtLeastOne(*this, getWindow(), "window");
}

//===----------------------------------------------------------------------===//
// MadDispersionOp
//===----------------------------------------------------------------------===//

namespace dispersion {
enum : int64_t { e, d, n, numDims };
} // namespace dispersion

SmallVector<Dim> MadDispersionOp::getDims() {
  return {
      {"e", kParallel, /*whole=*/true}, {"d", kParallel}, {"n", kReduction}};
}

ArrayAttr MadDispersionOp::getIndexingMaps() {
  using namespace dispersion;
  return MapsBuilder(getContext(), numDims)
      .add(getH(), {n, d})
      .add(getAssign(), {n})
      .add(getMask(), {n})
      .add(getOuts()[0], {e, d})
      .add(getOuts()[1], {e, d})
      .add(getOuts()[2], {e})
      .get();
}

LogicalResult MadDispersionOp::verify() {
  return verifyStructured(*this,
                          {OutElement::F32, OutElement::F32, OutElement::I32});
}

//===----------------------------------------------------------------------===//
// AdjacencyGateOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> AdjacencyGateOp::getDims() {
  return withLeadingDims(getNumLeading(getP()),
                         {{"e", kParallel, /*whole=*/true}, {"l", kReduction}});
}

ArrayAttr AdjacencyGateOp::getIndexingMaps() {
  int64_t n = getNumLeading(getP()), e = n, l = n + 1;
  return MapsBuilder(getContext(), n + 2)
      .addWithLeading(getP(), n, {l})
      .add(getA(), {e, l})
      .addWithLeading(getOuts()[0], n, {e})
      .get();
}

/// adjacency_gate_c1, adjacency_update_c1.
static LogicalResult verifySquare(Operation *op, Value a) {
  auto type = cast<ShapedType>(a.getType());
  if (type.getRank() == 2 && !type.isDynamicDim(0) && !type.isDynamicDim(1) &&
      type.getDimSize(0) != type.getDimSize(1))
    return op->emitOpError()
           << "expected 'a' to be square, found " << type.getDimSize(0) << " x "
           << type.getDimSize(1);
  return success();
}

LogicalResult AdjacencyGateOp::verify() {
  if (failed(verifyHasLastDim(*this, getP(), "p")) ||
      failed(verifySquare(*this, getA())))
    return failure();
  return verifyStructured(*this, {OutElement::F32});
}

SmallVector<std::pair<unsigned, unsigned>> AdjacencyGateOp::getDimOrder() {
  unsigned e = getNumLeading(getP()), l = e + 1;
  return {{e, l}, {l, e}};
}

//===----------------------------------------------------------------------===//
// AdjacencyUpdateOp
//===----------------------------------------------------------------------===//

namespace adjacency {
enum : int64_t { e, l, n, k, numDims };
} // namespace adjacency

SmallVector<Dim> AdjacencyUpdateOp::getDims() {
  return {{"e", kParallel, /*whole=*/true},
          {"l", kParallel, /*whole=*/true},
          {"n", kReduction},
          {"k", kReduction}};
}

ArrayAttr AdjacencyUpdateOp::getIndexingMaps() {
  using namespace adjacency;
  return MapsBuilder(getContext(), numDims)
      .add(getA(), {e, l})
      .add(getIndices(), {n, k})
      .add(getMask(), {n})
      .add(getOuts()[0], {e, l})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> AdjacencyUpdateOp::getDimOrder() {
  using namespace adjacency;
  return {{k, e}, {e, l}, {l, e}};
}

LogicalResult AdjacencyUpdateOp::verify() {
  if (failed(verifySquare(*this, getA())) ||
      failed(verifyStructured(*this, {OutElement::F32})))
    return failure();
  double beta = getBeta().convertToDouble();
  if (!(beta >= 0.0 && beta <= 1.0)) // adjacency_update_c2
    return emitOpError() << "expected beta to be in [0, 1], found " << beta;
  if (getNorm() == AdjacencyNorm::Eq7 && !getDiagonal())
    return emitOpError( // adjacency_update_c3
        "expected diagonal = true with norm = eq7, which divides by the "
        "diagonal");
  return success();
}
