//===- MoEBackwardOps.cpp - Dims, maps and verifiers --------------------===//
//
// One section an op, in the order of MoEBackwardOps.td: its dims, its maps,
// what its verifier checks beyond the shapes.
//
//===----------------------------------------------------------------------===//

#include "MoEOpsDetail.h"

#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"

#include "mlir/Dialect/Arith/IR/Arith.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Destinations that depend on operands
//===----------------------------------------------------------------------===//

/// A destination's name and the dims that index it.
using NamedDims = std::pair<StringRef, SmallVector<int64_t>>;

/// The dims `names`, all of which stay whole: each result sums over some.
static SmallVector<Dim> getWholeDims(ArrayRef<StringRef> names) {
  return llvm::map_to_vector(
      names, [](StringRef name) { return Dim{name, kReduction}; });
}

/// The maps of the destinations that are present, in their order.
template <typename OpTy>
static void addOuts(MapsBuilder &maps, OpTy op, ArrayRef<NamedDims> outs) {
  SmallVector<StringRef> names = op.getPresentOuts();
  for (auto [name, init] : llvm::zip(names, op.getOuts()))
    maps.add(init, llvm::find_if(outs, [&](const NamedDims &out) {
                     return out.first == name;
                   })->second);
}

template <typename OpTy>
static Value getNamedOut(OpTy op, StringRef name) {
  for (auto [other, init] : llvm::zip(op.getPresentOuts(), op.getOuts()))
    if (other == name)
      return init;
  return {};
}

/// The name of an operand, where destinations may be absent.
template <typename OpTy>
static std::string nameOperand(OpTy op, unsigned operandNumber) {
  for (unsigned group = 0;; ++group) {
    auto [start, length] = op.getODSOperandIndexAndLength(group);
    if (operandNumber >= start + length)
      continue;
    StringRef name = OpTy::getArgumentNames()[group];
    return (name == "outs" ? op.getPresentOuts()[operandNumber - start] : name)
        .str();
  }
}

/// There are as many destinations as the operands ask for. Checked before
/// anything pairs the two.
template <typename OpTy>
static LogicalResult verifyPresentOuts(OpTy op) {
  SmallVector<StringRef> names = op.getPresentOuts();
  if (names.size() == op.getOuts().size())
    return success();
  return op.emitOpError() << "expected " << names.size()
                          << " destinations in 'outs' ("
                          << llvm::join(names, ", ") << "), found "
                          << op.getOuts().size();
}

//===----------------------------------------------------------------------===//
// AttentionPosteriorBackwardOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> AttentionPosteriorBackwardOp::getDims() {
  return getWholeDims({"b", "h", "i", "j", "f", "d", "c", "e", "l"});
}

SmallVector<StringRef> AttentionPosteriorBackwardOp::getPresentOuts() {
  SmallVector<StringRef> names{"dq", "dk", "du", "de"};
  if (getVp())
    names.push_back("dvp");
  else
    names.append({"dv", "dwo"});
  if (getBias())
    names.push_back("dbias");
  if (getHeadPrior())
    names.push_back("dhead_prior");
  if (getSigmaValue())
    names.push_back("dsigma");
  return names;
}

Value AttentionPosteriorBackwardOp::getOut(StringRef name) {
  return getNamedOut(*this, name);
}

std::string AttentionPosteriorBackwardOp::getOperandName(unsigned number) {
  return nameOperand(*this, number);
}

ArrayAttr AttentionPosteriorBackwardOp::getIndexingMaps() {
  using namespace posterior;
  SmallVector<int64_t> biasDims = getBiasDims(getBias(), b, h, i, j);
  MapsBuilder maps(getContext(), numDims);
  maps.add(getQ(), {b, h, i, f})
      .add(getK(), {b, h, j, f})
      .add(getU(), {b, i, d})
      .add(getE(), {b, j, e})
      .add(getP(), {b, i, e})
      .add(getPriorLse(), {b, l, i})
      .add(getPosteriorLse(), {b, l, i})
      .add(getDp(), {b, i, e})
      .add(getVp(), {b, h, j, d})
      .add(getV(), {b, h, j, c})
      .add(getWo(), {h, d, c})
      .add(getBias(), biasDims)
      .add(getHeadPrior(), {b, i, h})
      .add(getQueryMask(), {b, i})
      .add(getKeyMask(), {b, j})
      .add(getSigmaValue())
      .add(getHead(), {b});
  addOuts(maps, *this,
          {{"dq", {b, h, i, f}},
           {"dk", {b, h, j, f}},
           {"du", {b, i, d}},
           {"de", {b, j, e}},
           {"dvp", {b, h, j, d}},
           {"dv", {b, h, j, c}},
           {"dwo", {h, d, c}},
           {"dbias", biasDims},
           {"dhead_prior", {b, i, h}},
           {"dsigma", {}}});
  return maps.get();
}

FailureOr<double> AttentionPosteriorBackwardOp::getScaleValue() {
  return getAttentionScale(*this, getScale(), posterior::f);
}

LogicalResult AttentionPosteriorBackwardOp::verify() {
  if (failed(verifyMeans(*this)))
    return failure();
  if (failed(verifyPresentOuts(*this)) ||
      failed(verifyStructured(
          *this, SmallVector<OutElement>(getOuts().size(), OutElement::F32))))
    return failure();
  if (failed(verifySigma(*this)))
    return failure();
  if (failed(verifyHasScale(*this, getScaleValue())))
    return failure();
  if (getHead() && getHeadPrior())
    return emitOpError("expected no 'head_prior' with 'head', because one "
                       "chosen head needs no weights; found both");
  int64_t lseHeads = getStaticDimSize(*this, posterior::l);
  int64_t heads = getStaticDimSize(*this, posterior::h);
  int64_t expected = getHead() ? 1 : heads;
  if (!ShapedType::isDynamic(lseHeads) && !ShapedType::isDynamic(expected) &&
      lseHeads != expected)
    return emitOpError() << "expected dim 1 of 'prior_lse' to be " << expected
                         << (getHead() ? " with 'head'" : " without 'head'")
                         << ", found " << lseHeads;
  return verifyVisibility(*this);
}

//===----------------------------------------------------------------------===//
// SimilarityInformBackwardOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> SimilarityInformBackwardOp::getDims() {
  return getWholeDims({"b", "i", "e", "j", "d", "f"});
}

SmallVector<StringRef> SimilarityInformBackwardOp::getPresentOuts() {
  SmallVector<StringRef> names{"du", "de"};
  if (getUk())
    names.push_back("duk");
  if (getWs())
    names.push_back("dws");
  if (getTauValue())
    names.push_back("dtau");
  return names;
}

Value SimilarityInformBackwardOp::getOut(StringRef name) {
  return getNamedOut(*this, name);
}

std::string SimilarityInformBackwardOp::getOperandName(unsigned number) {
  return nameOperand(*this, number);
}

ArrayAttr SimilarityInformBackwardOp::getIndexingMaps() {
  using namespace similarity;
  // As in the forward: without ws one dim of features, without uk one of
  // tokens.
  int64_t keyFeature = getWs() ? f : d;
  int64_t key = getUk() ? j : i;
  MapsBuilder maps(getContext(), numDims);
  maps.add(getU(), {b, i, d})
      .add(getE(), {b, key, e})
      .add(getP(), {b, i, e})
      .add(getLse(), {b, i})
      .add(getDp(), {b, i, e})
      .add(getDlse(), {b, i})
      .add(getUk(), {b, j, keyFeature})
      .add(getWs(), {d, f})
      .add(getMask(), {b, key})
      .add(getQueryMask(), {b, i})
      .add(getTauValue())
      .add(getOrigin());
  addOuts(maps, *this,
          {{"du", {b, i, d}},
           {"de", {b, key, e}},
           {"duk", {b, j, keyFeature}},
           {"dws", {d, f}},
           {"dtau", {}}});
  return maps.get();
}

LogicalResult SimilarityInformBackwardOp::verify() {
  if (failed(verifyPresentOuts(*this)) ||
      failed(verifyStructured(
          *this, SmallVector<OutElement>(getOuts().size(), OutElement::F32))))
    return failure();
  return verifySimilarity(*this);
}

//===----------------------------------------------------------------------===//
// SoftmaxMixBackwardDqOp, SoftmaxMixBackwardDkvOp
//===----------------------------------------------------------------------===//

/// The maps of the operands that both sweeps have.
template <typename OpTy>
static MapsBuilder startMixGradientMaps(OpTy op) {
  using namespace mix;
  MapsBuilder maps(op.getContext(), numDims);
  maps.add(op.getQ(), {b, h, i, f})
      .add(op.getK(), {b, h, j, f})
      .add(op.getLse(), {b, h, i})
      .add(op.getDelta(), {b, h, i})
      .add(op.getV(), getValueDims(op.getV(), b, h, j, e))
      .add(op.getDmixed(), {b, h, i, e})
      .add(op.getKeyBias(), {b, h, j})
      .add(op.getBias(), getBiasDims(op.getBias(), b, h, i, j))
      .add(op.getQueryMask(), {b, i})
      .add(op.getKeyMask(), {b, j})
      .add(op.getQueryLevel(), {b, i})
      .add(op.getKeyLevel(), {b, j})
      .add(op.getOrigin());
  return maps;
}

template <typename OpTy>
static LogicalResult verifyMixGradient(OpTy op) {
  if (static_cast<bool>(op.getV()) != static_cast<bool>(op.getDmixed()))
    return op.emitOpError("expected 'v' and 'dmixed' together");
  if (static_cast<bool>(op.getQueryLevel()) !=
      static_cast<bool>(op.getKeyLevel()))
    return op.emitOpError("expected 'query_level' and 'key_level' together");
  if (failed(verifyPresentOuts(op)) ||
      failed(verifyStructured(
          op, SmallVector<OutElement>(op.getOuts().size(), OutElement::F32))))
    return failure();
  return verifyVisibility(op);
}

template <typename OpTy>
static Operation *makeOriginExplicit(OpTy op, OpBuilder &builder, Value columns,
                                     Value rows) {
  if (op.getOrigin())
    return op;
  Value origin = buildDefaultOrigin(builder, op.getLoc(), columns, rows, 2);
  auto explicitOp = cast<OpTy>(builder.clone(*op));
  explicitOp.getOriginMutable().assign(origin);
  return explicitOp;
}

SmallVector<Dim> SoftmaxMixBackwardDqOp::getDims() {
  // A bias that is shared along a dim sums its gradient over it.
  bool wholeBatch = false, wholeHeads = false;
  if (getWithDbias() && getBias()) {
    SmallVector<int64_t> dims =
        getBiasDims(getBias(), mix::b, mix::h, mix::i, mix::j);
    wholeBatch = dims[0] == MapsBuilder::kBroadcast;
    wholeHeads = dims[1] == MapsBuilder::kBroadcast;
  }
  return {{"b", kParallel, wholeBatch},
          {"h", kParallel, wholeHeads},
          {"i", kParallel},
          {"e", kReduction},
          {"j", kReduction},
          {"f", kReduction}};
}

SmallVector<StringRef> SoftmaxMixBackwardDqOp::getPresentOuts() {
  SmallVector<StringRef> names{"dq"};
  if (getWithSums())
    names.push_back("sums");
  if (getWithDbias())
    names.push_back("dbias");
  return names;
}

Value SoftmaxMixBackwardDqOp::getOut(StringRef name) {
  return getNamedOut(*this, name);
}

std::string SoftmaxMixBackwardDqOp::getOperandName(unsigned number) {
  return nameOperand(*this, number);
}

ArrayAttr SoftmaxMixBackwardDqOp::getIndexingMaps() {
  using namespace mix;
  MapsBuilder maps = startMixGradientMaps(*this);
  addOuts(maps, *this,
          {{"dq", {b, h, i, f}},
           {"sums", {b, h, i}},
           {"dbias", getBiasDims(getBias(), b, h, i, j)}});
  return maps.get();
}

SmallVector<std::pair<unsigned, unsigned>>
SoftmaxMixBackwardDqOp::getOrigins() {
  return getOriginsAlong(mix::i, getOriginMutable());
}

Operation *SoftmaxMixBackwardDqOp::makeExplicit(OpBuilder &builder) {
  return makeOriginExplicit(*this, builder, getK(), getQ());
}

LogicalResult SoftmaxMixBackwardDqOp::verify() {
  if (getWithDbias() && !getBias())
    return emitOpError("expected 'bias' with with_dbias, found none");
  return verifyMixGradient(*this);
}

SmallVector<Dim> SoftmaxMixBackwardDkvOp::getDims() {
  return {{"b", kParallel},  {"h", kParallel}, {"i", kReduction},
          {"e", kReduction}, {"j", kParallel}, {"f", kReduction}};
}

SmallVector<StringRef> SoftmaxMixBackwardDkvOp::getPresentOuts() {
  SmallVector<StringRef> names{"dk"};
  if (getV())
    names.push_back("dv");
  if (getWithSums())
    names.push_back("sums");
  return names;
}

Value SoftmaxMixBackwardDkvOp::getOut(StringRef name) {
  return getNamedOut(*this, name);
}

std::string SoftmaxMixBackwardDkvOp::getOperandName(unsigned number) {
  return nameOperand(*this, number);
}

ArrayAttr SoftmaxMixBackwardDkvOp::getIndexingMaps() {
  using namespace mix;
  MapsBuilder maps = startMixGradientMaps(*this);
  addOuts(maps, *this,
          {{"dk", {b, h, j, f}}, {"dv", {b, h, j, e}}, {"sums", {b, h, j}}});
  return maps.get();
}

SmallVector<std::pair<unsigned, unsigned>>
SoftmaxMixBackwardDkvOp::getOrigins() {
  return getOriginsAlong(mix::j, getOriginMutable());
}

Operation *SoftmaxMixBackwardDkvOp::makeExplicit(OpBuilder &builder) {
  return makeOriginExplicit(*this, builder, getQ(), getK());
}

LogicalResult SoftmaxMixBackwardDkvOp::verify() {
  return verifyMixGradient(*this);
}

//===----------------------------------------------------------------------===//
// SoftmaxMixBackwardSelfOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> SoftmaxMixBackwardSelfOp::getDims() {
  return {{"b", kParallel, /*whole=*/true},
          {"h", kParallel, /*whole=*/true},
          {"i", kParallel, /*whole=*/true},
          {"e", kReduction},
          {"f", kReduction}};
}

ArrayAttr SoftmaxMixBackwardSelfOp::getIndexingMaps() {
  using namespace selfmix;
  return MapsBuilder(getContext(), numDims)
      .add(getQ(), {b, h, i, f})
      .add(getLse(), {b, h, i})
      .add(getDelta(), {b, h, i})
      .add(getV(), {b, i, e})
      .add(getDmixed(), {b, h, i, e})
      .add(getMask(), {b, i})
      .add(getLevel(), {b, i})
      .add(getOuts()[0], {b, h, i, f})
      .add(getOuts()[1], {b, h, i, e})
      .get();
}

LogicalResult SoftmaxMixBackwardSelfOp::verify() {
  if (failed(verifyStructured(*this, {OutElement::F32, OutElement::F32})))
    return failure();
  return verifyVisibility(*this);
}

//===----------------------------------------------------------------------===//
// TopKRenormBackwardOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> TopKRenormBackwardOp::getDims() {
  return withLeadingDims(getNumLeading(getGates()),
                         {{"e", kParallel, /*whole=*/true}, {"k", kReduction}});
}

ArrayAttr TopKRenormBackwardOp::getIndexingMaps() {
  int64_t n = getNumLeading(getGates()), e = n, k = n + 1;
  return MapsBuilder(getContext(), n + 2)
      .addWithLeading(getDgates(), n, {k})
      .addWithLeading(getGates(), n, {k})
      .addWithLeading(getIndices(), n, {k})
      .addWithLeading(getScores(), n, {e})
      .addWithLeading(getOuts()[0], n, {e})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> TopKRenormBackwardOp::getDimOrder() {
  unsigned e = getNumLeading(getGates()), k = e + 1;
  return {{k, e}};
}

ScoreFunction TopKRenormBackwardOp::getScoreFunction() {
  if (std::optional<ScoreFunction> score = getScore())
    return *score;
  return getKind() == ScoreKind::Probs ? ScoreFunction::None
                                       : ScoreFunction::Softmax;
}

bool TopKRenormBackwardOp::isDense() {
  bool sumsToOne = getRenorm() && getEps().convertToDouble() == 0.0;
  return getScoreFunction() == ScoreFunction::Softmax && !sumsToOne;
}

bool TopKRenormBackwardOp::needsScores() {
  ScoreFunction function = getScoreFunction();
  if (function == ScoreFunction::None)
    return getRenorm();
  return isElementwise(function) || isDense();
}

LogicalResult TopKRenormBackwardOp::verify() {
  if (failed(verifyHasLastDim(*this, getGates(), "gates")) ||
      failed(verifyStructured(*this, {OutElement::F32})))
    return failure();
  bool hasFunction = getScoreFunction() != ScoreFunction::None;
  if ((getKind() == ScoreKind::Logits) != hasFunction) // topk_renorm_c5
    return emitOpError() << "expected score to be none with kind = probs and "
                            "only then, found "
                         << stringifyScoreFunction(getScoreFunction())
                         << " with kind = " << stringifyScoreKind(getKind());
  if (needsScores() && !getScores())
    return emitOpError("expected 'scores', which this form's gradient reads, "
                       "found none");
  double eps = getEps().convertToDouble();
  if (!(eps >= 0.0))
    return emitOpError() << "expected eps to be at least 0, found " << eps;
  return success();
}
