//===- PosteriorBackward.cpp - The posterior's gradient by sweeps ---------===//
//
// attention_posterior_backward is the chain rule through the softmax_mix over
// concatenated features that its forward is written with, whose two sweeps do
// all that is quadratic in the number of tokens.
//
//===----------------------------------------------------------------------===//

#include "SoftmaxMixBackward.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"

#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
/// The chain rule through the softmax_mix of the posterior, for the heads that
/// took part: all, or the one that each sequence chose.
class PosteriorBackward {
public:
  PosteriorBackward(OpBuilder &builder, AttentionPosteriorBackwardOp op);

  SmallVector<Value> build();

private:
  void differentiateJoint();
  void differentiatePrior();
  void buildFeatureGradients();
  Access sliceFeatures(Access features, bool likelihood);

  Value finishHeads(Access ofHeads, ArrayRef<int64_t> dims, StringRef out);
  Value buildTokenGradient();
  void buildValueGradients();
  Value buildBiasGradient();
  Value buildSigmaGradient();

  OpBuilder &builder;
  AttentionPosteriorBackwardOp op;
  Location loc;
  Domain domain;
  Type f32;
  Value precision;
  /// With one head: its number for each sequence.
  std::optional<Access> head;
  /// The dim of the heads that took part.
  int64_t h;
  HeadOperands operands;
  Access u, keyBias;

  // What the sweeps give.
  Access dQueries, dKeys; ///< of the concatenated features
  Access dvalues;         ///< of e, a head
  Access keySums;         ///< sum_i dY
  Access querySums;       ///< R, with all heads
  std::optional<Access> dbias;

  // Of the two parts of the features.
  Access dq, dk, dLikelihood, dMeans;
  SmallVector<Value> results;
};
} // namespace

PosteriorBackward::PosteriorBackward(OpBuilder &builder,
                                     AttentionPosteriorBackwardOp op)
    : builder(builder), op(op), loc(op.getLoc()), domain(builder, op),
      f32(builder.getF32Type()), precision(buildPrecision(domain, op)),
      h(posterior::h) {
  using namespace posterior;
  std::optional<Access> queryMask =
      atIfPresent(domain, op.getQueryMask(), {b, i});
  std::optional<Access> keyMask = atIfPresent(domain, op.getKeyMask(), {b, j});
  operands = getHeadOperands(domain, op);
  if (op.getHead()) {
    head = domain.at(op.getHead(), {b});
    this->h = domain.addDim(builder.getIndexAttr(1));
    operands = pickHead(operands, this->h, [&](const Access &access) {
      return gatherHead(domain, access, this->h, *head);
    });
  }
  u = withoutPadding(domain, domain.at(op.getU(), {b, i, d}), queryMask);
  for (std::optional<Access> *values : {&operands.vp, &operands.v})
    if (*values)
      *values = withoutPadding(domain, **values, keyMask);
  keyBias =
      domain.at(buildKeyBias(domain, operands, precision), {b, this->h, j});
}

/// Both sweeps over the joint logits.
void PosteriorBackward::differentiateJoint() {
  using posterior::b, posterior::i, posterior::j, posterior::e;
  MixBackward backward;
  backward.mix = startMix(op, operands);
  Mix &mix = backward.mix;
  mix.q = buildQueryFeatures(builder, domain, op, u, operands, precision);
  mix.k = concatFeatures(builder, domain, operands.k,
                         operands.vp ? *operands.vp : *operands.v);
  mix.keyBias = keyBias.value;
  mix.v = op.getE();
  backward.lse = op.getPosteriorLse();

  Access dp = domain.at(op.getDp(), {b, i, e});
  Access delta = domain.contract(dp, domain.at(op.getP(), {b, i, e}), {b, i});
  if (head) {
    backward.dmixed = addHeadDim(builder, loc, dp.value);
    backward.delta = addHeadDim(builder, loc, delta.value);
  } else {
    // dmixed_hi = H'_ih dp_i, and R makes up for H' not being constant.
    Access ofHeads =
        buildHeadWeights(domain, op, domain.at(op.getPriorLse(), {b, h, i}),
                         domain.at(op.getPosteriorLse(), {b, h, i}));
    auto weigh = [&](Access access, ArrayRef<int64_t> dims) {
      return domain
          .map({access, ofHeads}, domain.empty(dims, f32),
               [](Body &b, ValueRange in) { return b.mul(in[0], in[1]); })
          .value;
    };
    backward.dmixed = weigh(dp, {b, h, i, e});
    backward.delta = weigh(delta, {b, h, i});
  }

  int64_t width =
      domain.addDim(linalg::createFoldedDimOp(builder, loc, mix.q, 3));
  SmallVector<Value> queryOuts{domain.empty({b, h, i, width}, f32).value};
  if (!head)
    queryOuts.push_back(domain.empty({b, h, i}, f32).value);
  if (operands.bias)
    queryOuts.push_back(domain.empty(operands.bias->dims, f32).value);
  auto dqOp = backward.buildDq(builder, loc, queryOuts, /*withSums=*/!head,
                               /*withDbias=*/operands.bias.has_value());
  dQueries = domain.at(dqOp.getResult(0), {b, h, i, width});
  if (!head)
    querySums = domain.at(dqOp.getResult(1), {b, h, i});
  if (operands.bias)
    dbias = domain.at(dqOp->getResults().back(), operands.bias->dims);

  auto dkvOp = backward.buildDkv(builder, loc,
                                 {domain.empty({b, h, j, width}, f32).value,
                                  domain.empty({b, h, j, e}, f32).value,
                                  domain.empty({b, h, j}, f32).value},
                                 /*withSums=*/true);
  dKeys = domain.at(dkvOp.getResult(0), {b, h, j, width});
  dvalues = domain.at(dkvOp.getResult(1), {b, h, j, e});
  keySums = domain.at(dkvOp.getResult(2), {b, h, j});
}

/// One part of the gradient of concatenated features: of q or k, or of what
/// follows them.
Access PosteriorBackward::sliceFeatures(Access features, bool likelihood) {
  using namespace posterior;
  Body &outer = domain.getBody();
  int64_t part = likelihood ? (operands.vp ? d : c) : f;
  SmallVector<int64_t> dims(features.dims);
  dims.back() = part;
  SmallVector<OpFoldResult> offsets(4, builder.getIndexAttr(0));
  SmallVector<OpFoldResult> strides(4, builder.getIndexAttr(1));
  if (likelihood)
    offsets.back() = domain.getSize(f);
  SmallVector<OpFoldResult> sizes = llvm::map_to_vector(
      dims, [&](int64_t dim) { return domain.getSize(dim); });
  return domain.at(tensor::ExtractSliceOp::create(outer, features.value,
                                                  offsets, sizes, strides),
                   dims);
}

/// dq, dk and the gradients of u~ and of the means or values, which the sweeps
/// give by the features [scale q, u~ / sigma^2] and [k, v].
void PosteriorBackward::buildFeatureGradients() {
  double scale = *op.getScaleValue();
  Access scaled = sliceFeatures(dQueries, /*likelihood=*/false);
  dq = domain.map(
      {scaled}, domain.empty(scaled.dims, f32),
      [&](Body &b, ValueRange in) { return b.mul(in[0], b.f32(scale)); });
  dk = sliceFeatures(dKeys, /*likelihood=*/false);
  Access weighed = sliceFeatures(dQueries, /*likelihood=*/true);
  dLikelihood = domain.map(
      {weighed}, domain.empty(weighed.dims, f32),
      [&](Body &b, ValueRange in) { return b.mul(in[0], precision); });
  dMeans = sliceFeatures(dKeys, /*likelihood=*/true);
}

/// With all heads the prior's log-sum-exp takes part in H': dl has the term
/// -R A, the gradient of a mix without values whose delta is R.
void PosteriorBackward::differentiatePrior() {
  using posterior::b, posterior::i, posterior::j, posterior::f;
  MixBackward backward;
  backward.mix = startMix(op, operands);
  backward.mix.q = op.getQ();
  backward.mix.k = op.getK();
  backward.mix.scale = *op.getScaleValue();
  backward.lse = op.getPriorLse();
  backward.delta = querySums.value;
  SmallVector<Value> queryOuts{domain.empty({b, h, i, f}, f32).value};
  if (operands.bias)
    queryOuts.push_back(domain.empty(operands.bias->dims, f32).value);
  auto dqOp = backward.buildDq(builder, loc, queryOuts, /*withSums=*/false,
                               /*withDbias=*/operands.bias.has_value());
  auto dkvOp =
      backward.buildDkv(builder, loc, domain.empty({b, h, j, f}, f32).value);
  auto addTo = [&](Access &sum, Value term) {
    sum = domain.map(
        {sum, domain.at(term, sum.dims)}, domain.empty(sum.dims, f32),
        [](Body &b, ValueRange in) { return b.add(in[0], in[1]); });
  };
  addTo(dq, dqOp.getResult(0));
  addTo(dk, dkvOp.getResult(0));
  if (dbias)
    addTo(*dbias, dqOp->getResults().back());
}

/// The gradient `ofHeads`, indexed by the heads that took part, in destination
/// `out` over `dims`: the others get 0, and what sequences share is summed.
Value PosteriorBackward::finishHeads(Access ofHeads, ArrayRef<int64_t> dims,
                                     StringRef out) {
  Access destination = domain.at(op.getOut(out), dims);
  bool isShared = !llvm::is_contained(dims, posterior::b) &&
                  llvm::is_contained(ofHeads.dims, int64_t(posterior::b));
  if (!head || !llvm::is_contained(ofHeads.dims, h)) {
    if (!isShared)
      return copyInto(domain, domain.at(ofHeads.value, dims),
                      destination.value);
    return copyInto(domain, sumOver(domain, ofHeads, dims), destination.value);
  }
  auto ofHead = [&](Body &b, ValueRange in) {
    Value isHead =
        b.equal(b.castInt(b.iteration(posterior::h), in[1].getType()), in[1]);
    return b.select(isHead, in[0], b.f32(0.0));
  };
  // The dim of one head is read at 0, so that `h` runs over all of them.
  llvm::replace(ofHeads.dims, h, Access::kBroadcast);
  if (!isShared)
    return domain.map({ofHeads, *head}, destination, ofHead).value;
  return domain
      .reduce({ofHeads, *head},
              domain.fill(destination, domain.getBody().f32(0.0)),
              [&](Body &b, ValueRange in, Value acc) {
                return b.add(acc, ofHead(b, in));
              })
      .value;
}

/// du_i = sum_h wo_h du~_hi, or the sum of the gradients of u itself.
Value PosteriorBackward::buildTokenGradient() {
  using posterior::b, posterior::i, posterior::c, posterior::d;
  Value out = op.getOut("du");
  if (operands.vp)
    return copyInto(domain, sumOver(domain, dLikelihood, {b, i, d}), out);
  // One product over heads and features together.
  auto joinHeads = [&](Access access, ArrayRef<int64_t> dims, int64_t joined) {
    Access laidOut = domain.map({access}, domain.empty(dims, f32),
                                [](Body &b, ValueRange in) { return in[0]; });
    return joinDims(builder, domain, laidOut,
                    llvm::find(dims, h) - dims.begin(), joined);
  };
  int64_t joined = addJoinedDim(domain, h, c);
  Access features = joinHeads(dLikelihood, {b, i, h, c}, joined);
  SmallVector<int64_t> woDims{h, c, d};
  if (head)
    woDims.insert(woDims.begin(), b);
  Access wo = joinHeads(*operands.wo, woDims, joined);
  Access du = domain.fill(domain.at(out, {b, i, d}), domain.getBody().f32(0.0));
  return domain.contract(features, wo, du).value;
}

/// dvp, or dv and dwo: through the features, and through the key bias
/// -|v'_j|^2/(2 sigma^2) whose gradient is `keySums`.
void PosteriorBackward::buildValueGradients() {
  using posterior::b, posterior::i, posterior::j, posterior::c, posterior::d;
  // gradient - r_j pulled_j / sigma^2
  auto subtractPull = [&](Access gradient, Access pulled) {
    return domain.map(
        {gradient, keySums, pulled}, domain.empty(gradient.dims, f32),
        [&](Body &b, ValueRange in) {
          return b.sub(in[0], b.mul(precision, b.mul(in[1], in[2])));
        });
  };
  if (operands.vp) {
    Access dvp = subtractPull(dMeans, *operands.vp);
    results.push_back(finishHeads(dvp, {b, posterior::h, j, d}, "dvp"));
    return;
  }
  Access dv = subtractPull(dMeans, buildGramProducts(domain, operands));
  results.push_back(finishHeads(dv, {b, posterior::h, j, c}, "dv"));

  // dwo = sum_i u_i du~_i^T - wo sum_j r_j v_j v_j^T / sigma^2
  int64_t c2 = domain.addTwin(c);
  Access weighed =
      domain.map({*operands.v, keySums}, domain.empty(operands.v->dims, f32),
                 [](Body &b, ValueRange in) { return b.mul(in[0], in[1]); });
  Access moments = domain.contract(domain.at(operands.v->value, {b, h, j, c2}),
                                   weighed, {b, h, c2, c});
  Access wo = *operands.wo;
  wo.dims.back() = c2;
  Access pulled = domain.contract(wo, moments, {b, h, d, c});
  Access products = domain.contract(u, dLikelihood, {b, h, d, c});
  Access dwo = domain.map({products, pulled}, domain.empty({b, h, d, c}, f32),
                          [&](Body &b, ValueRange in) {
                            return b.sub(in[0], b.mul(precision, in[1]));
                          });
  results.push_back(finishHeads(dwo, {posterior::h, d, c}, "dwo"));
}

Value PosteriorBackward::buildBiasGradient() {
  using namespace posterior;
  return finishHeads(*dbias, getBiasDims(op.getBias(), b, posterior::h, i, j),
                     "dbias");
}

/// dsigma = -(2/sigma) (sum_i u_i.du_i + sum_j r_j key_bias_j)
Value PosteriorBackward::buildSigmaGradient() {
  using posterior::b, posterior::i, posterior::d;
  Body &outer = domain.getBody();
  Access tokens =
      sumProducts(domain, domain.at(results[2], {b, i, d}), u, {b, i});
  Access pull = sumOver(domain, sumOver(domain, tokens, {b}), {});
  Access spread = sumProducts(domain, keySums, keyBias, {b, h});
  spread = sumOver(domain, spread, {});
  Value factor = outer.div(outer.f32(-2.0), op.getSigmaValue());
  return domain
      .map({pull, spread}, domain.at(op.getOut("dsigma"), {}),
           [&](Body &b, ValueRange in) {
             return b.mul(factor, b.add(in[0], in[1]));
           })
      .value;
}

SmallVector<Value> PosteriorBackward::build() {
  using posterior::b, posterior::i, posterior::j, posterior::e, posterior::f;
  differentiateJoint();
  buildFeatureGradients();
  if (!head)
    differentiatePrior();
  results.push_back(finishHeads(dq, {b, posterior::h, i, f}, "dq"));
  results.push_back(finishHeads(dk, {b, posterior::h, j, f}, "dk"));
  results.push_back(buildTokenGradient());
  results.push_back(
      copyInto(domain, sumOver(domain, dvalues, {b, j, e}), op.getOut("de")));
  buildValueGradients();
  if (op.getBias())
    results.push_back(buildBiasGradient());
  if (op.getHeadPrior()) {
    Access dprior = domain.map(
        {querySums, domain.at(op.getHeadPrior(), {b, i, posterior::h})},
        domain.at(op.getOut("dhead_prior"), {b, i, posterior::h}),
        [](Body &b, ValueRange in) { return divideOrZero(b, in[0], in[1]); });
    results.push_back(dprior.value);
  }
  if (op.getSigmaValue())
    results.push_back(buildSigmaGradient());
  return results;
}

Replacements mlir::moe::convertToSoftmaxMix(AttentionPosteriorBackwardOp op,
                                            OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  return PosteriorBackward(builder, op).build();
}
