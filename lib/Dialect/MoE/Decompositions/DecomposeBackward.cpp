//===- DecomposeBackward.cpp - The meaning of the backward ops ------------===//
//
// The gradients as docs/Spec.md prints them, those of the mixing ops with the
// whole token-by-token matrix. None of the algebra of
// `moe-convert-to-softmax-mix` is used, so that each checks the other.
//
//===----------------------------------------------------------------------===//

#include "Mixing.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"
#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"

#include "mlir/Dialect/Math/IR/Math.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// exp(x - lse), 0 where the pair is hidden.
static Access buildWeights(Domain &domain, Access logits, Access lse) {
  return domain.map({logits, lse},
                    domain.empty(logits.dims, domain.getBody().getF32Type()),
                    [](Body &b, ValueRange in) {
                      return b.select(b.isNegInfinity(in[0]), b.f32(0.0),
                                      b.exp(b.sub(in[0], in[1])));
                    });
}

/// weights * (products - delta), 0 where the weight is.
static Access buildLogitGradients(Domain &domain, Access weights,
                                  Access products, Access delta) {
  return domain.map({weights, products, delta},
                    domain.empty(weights.dims, domain.getBody().getF32Type()),
                    [](Body &b, ValueRange in) {
                      Value zero = b.f32(0.0);
                      Value gradient = b.mul(in[0], b.sub(in[1], in[2]));
                      return b.select(b.equal(in[0], zero), zero, gradient);
                    });
}

//===----------------------------------------------------------------------===//
// AttentionPosteriorBackwardOp
//===----------------------------------------------------------------------===//

namespace {
/// What the gradients of the posterior are sums of.
struct PosteriorGradients {
  Access means; ///< v'_hj
  Access dy;    ///< dY_hij
  Access dl;    ///< dY - R A, or dY with one head
  Access sums;  ///< R_hi
  Access de;    ///< sum_hi W dp_i
};
} // namespace

/// W_hij: the posterior of the chosen head, or of all weighed by H'.
static Access buildJointWeights(Domain &domain, AttentionPosteriorBackwardOp op,
                                Access joint) {
  using namespace posterior;
  Type f32 = domain.getBody().getF32Type();
  if (!op.getHead()) {
    Access lse = domain.at(op.getPosteriorLse(), {b, h, i});
    Access ofHeads = buildHeadWeights(
        domain, op, domain.at(op.getPriorLse(), {b, h, i}), lse);
    return domain.map(
        {buildWeights(domain, joint, lse), ofHeads},
        domain.empty(joint.dims, f32),
        [](Body &b, ValueRange in) { return b.mul(in[0], in[1]); });
  }
  Access lse = domain.at(op.getPosteriorLse(), {b, Access::kBroadcast, i});
  Access head = domain.at(op.getHead(), {b});
  return domain.map(
      {joint, lse, head}, domain.empty(joint.dims, f32),
      [&](Body &b, ValueRange in) {
        Value isHead =
            b.equal(b.castInt(b.iteration(h), in[2].getType()), in[2]);
        Value isSeen = b.both(isHead, b.negate(b.isNegInfinity(in[0])));
        return b.select(isSeen, b.exp(b.sub(in[0], in[1])), b.f32(0.0));
      });
}

static PosteriorGradients
buildPosteriorGradients(Domain &domain, AttentionPosteriorBackwardOp op) {
  using namespace posterior;
  PosteriorGradients result;
  Access prior = buildPriorLogits(domain, op);
  result.means = buildMeans(domain, op);
  Access joint = buildPosteriorLogits(domain, op, prior, result.means);
  Access weights = buildJointWeights(domain, op, joint);

  Access dp = domain.at(op.getDp(), {b, i, e});
  Access delta = domain.contract(dp, domain.at(op.getP(), {b, i, e}), {b, i});
  Access products =
      domain.contract(dp, domain.at(op.getE(), {b, j, e}), {b, i, j});
  result.dy = buildLogitGradients(domain, weights, products, delta);
  result.de = sumProducts(domain, weights, dp, {b, j, e});
  result.sums = sumOver(domain, result.dy, {b, h, i});
  result.dl = result.dy;
  if (!op.getHead()) {
    Access attention =
        buildWeights(domain, prior, domain.at(op.getPriorLse(), {b, h, i}));
    result.dl =
        domain.map({result.dy, result.sums, attention},
                   domain.empty({b, h, i, j}, domain.getBody().getF32Type()),
                   [](Body &b, ValueRange in) {
                     return b.sub(in[0], b.mul(in[1], in[2]));
                   });
  }
  return result;
}

/// dv'_hj = sum_i dY (u_i - v'_j) / sigma^2
static Access buildMeanGradients(Domain &domain,
                                 AttentionPosteriorBackwardOp op,
                                 const PosteriorGradients &gradients) {
  using namespace posterior;
  Value precision = buildPrecision(domain, op);
  Access attracted = sumProducts(domain, gradients.dy,
                                 domain.at(op.getU(), {b, i, d}), {b, h, j, d});
  Access keySums = sumOver(domain, gradients.dy, {b, h, j});
  return domain.map({attracted, keySums, gradients.means},
                    domain.empty({b, h, j, d}, domain.getBody().getF32Type()),
                    [&](Body &b, ValueRange in) {
                      Value zero = b.f32(0.0);
                      Value pull = b.select(b.equal(in[1], zero), zero,
                                            b.mul(in[1], in[2]));
                      return b.mul(precision, b.sub(in[0], pull));
                    });
}

/// dsigma = -(2/sigma) (sum_i u_i.du_i - sum_hij dY |v'_j|^2 / (2 sigma^2))
static Value buildSigmaGradient(Domain &domain, AttentionPosteriorBackwardOp op,
                                const PosteriorGradients &gradients,
                                Access du) {
  using namespace posterior;
  Value precision = buildPrecision(domain, op);
  Access pull = sumProducts(domain, du, domain.at(op.getU(), {b, i, d}), {});
  Access norms = domain.contract(gradients.means, gradients.means, {b, h, j});
  Access spread = sumProducts(domain, gradients.dy, norms, {});
  return domain
      .map({pull, spread}, domain.at(op.getOut("dsigma"), {}),
           [&](Body &b, ValueRange in) {
             Value half = b.mul(b.f32(0.5), precision);
             Value sum = b.sub(in[0], b.mul(half, in[1]));
             return b.mul(b.div(b.f32(-2.0), op.getSigmaValue()), sum);
           })
      .value;
}

Replacements mlir::moe::decompose(AttentionPosteriorBackwardOp op,
                                  OpBuilder &builder) {
  using namespace posterior;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Body &outer = domain.getBody();
  PosteriorGradients gradients = buildPosteriorGradients(domain, op);
  Value scale = outer.f32(*op.getScaleValue());
  Value precision = buildPrecision(domain, op);
  auto at = [&](Value value, ArrayRef<int64_t> dims) {
    return domain.at(value, dims);
  };

  Access dq = sumProducts(domain, gradients.dl, at(op.getK(), {b, h, j, f}),
                          {b, h, i, f});
  Access dk = sumProducts(domain, gradients.dl, at(op.getQ(), {b, h, i, f}),
                          {b, h, j, f});
  Access du = sumProducts(domain, gradients.dy, gradients.means, {b, i, d});
  SmallVector<Value> results{scaleInto(domain, dq, scale, op.getOut("dq")),
                             scaleInto(domain, dk, scale, op.getOut("dk")),
                             scaleInto(domain, du, precision, op.getOut("du")),
                             copyInto(domain, gradients.de, op.getOut("de"))};
  Access dmeans = buildMeanGradients(domain, op, gradients);
  if (op.getVp()) {
    results.push_back(copyInto(domain, dmeans, op.getOut("dvp")));
  } else {
    Access dv =
        domain.contract(dmeans, at(op.getWo(), {h, d, c}), {b, h, j, c});
    Access dwo =
        sumProducts(domain, dmeans, at(op.getV(), {b, h, j, c}), {h, d, c});
    results.push_back(copyInto(domain, dv, op.getOut("dv")));
    results.push_back(copyInto(domain, dwo, op.getOut("dwo")));
  }
  if (op.getBias()) {
    Access dbias =
        sumOver(domain, gradients.dl, getBiasDims(op.getBias(), b, h, i, j));
    results.push_back(copyInto(domain, dbias, op.getOut("dbias")));
  }
  if (op.getHeadPrior()) {
    Access dprior = domain.map(
        {gradients.sums, at(op.getHeadPrior(), {b, i, h})},
        at(op.getOut("dhead_prior"), {b, i, h}),
        [](Body &b, ValueRange in) { return divideOrZero(b, in[0], in[1]); });
    results.push_back(dprior.value);
  }
  if (op.getSigmaValue())
    results.push_back(
        buildSigmaGradient(domain, op, gradients, at(results[2], {b, i, d})));
  return results;
}

//===----------------------------------------------------------------------===//
// SimilarityInformBackwardOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(SimilarityInformBackwardOp op,
                                  OpBuilder &builder) {
  using namespace similarity;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Body &outer = domain.getBody();
  Type f32 = builder.getF32Type();
  // Without keys of their own no operand spans j: it runs over the queries.
  int64_t j = op.getUk() ? similarity::j : domain.addTwin(i);
  int64_t feature = op.getWs() ? f : d;
  Value tau = op.getTauValue() ? op.getTauValue()
                               : outer.f32(op.getTau().convertToDouble());
  Value inverse = outer.div(outer.f32(1.0), tau);

  // S and dx
  Access x = buildSimilarities(domain, op, j);
  Access s = buildWeights(domain, x, domain.at(op.getLse(), {b, i}));
  Access dp = domain.at(op.getDp(), {b, i, e});
  Access delta = domain.contract(dp, domain.at(op.getP(), {b, i, e}), {b, i});
  if (op.getDlse())
    delta = domain.map(
        {delta, domain.at(op.getDlse(), {b, i})}, domain.empty({b, i}, f32),
        [](Body &b, ValueRange in) { return b.sub(in[0], in[1]); });
  Access products =
      domain.contract(dp, domain.at(op.getE(), {b, j, e}), {b, i, j});
  Access dx = buildLogitGradients(domain, s, products, delta);

  // dQ, dK without 1/tau
  Access u = domain.at(op.getU(), {b, i, d}), q = u;
  if (op.getWs())
    q = domain.contract(u, domain.at(op.getWs(), {d, f}), {b, i, f});
  Access k = domain.at(op.getUk() ? op.getUk() : op.getU(), {b, j, feature});
  Access dq = sumProducts(domain, dx, k, {b, i, feature});
  Access dk = sumProducts(domain, dx, q, {b, j, feature});

  Access du = dq;
  if (op.getWs())
    du = domain.contract(dq, domain.at(op.getWs(), {d, f}), {b, i, d});
  if (!op.getUk())
    du = domain.map(
        // Queries and keys are the same tokens, and f is as long as d.
        {du, domain.at(dk.value, {b, i, d})}, domain.empty({b, i, d}, f32),
        [](Body &b, ValueRange in) { return b.add(in[0], in[1]); });
  SmallVector<Value> results{
      scaleInto(domain, du, inverse, op.getOut("du")),
      copyInto(domain, sumProducts(domain, s, dp, {b, j, e}), op.getOut("de"))};
  if (op.getUk())
    results.push_back(scaleInto(domain, dk, inverse, op.getOut("duk")));
  if (op.getWs())
    results.push_back(scaleInto(domain, sumProducts(domain, dq, u, {d, f}),
                                inverse, op.getOut("dws")));
  if (op.getTauValue()) {
    // -sum_i Q_i.dQ_i / tau = -sum_ij dx_ij x_ij / tau
    Access sum = sumProducts(domain, dx, x, {});
    results.push_back(scaleInto(domain, sum, outer.sub(outer.f32(0.0), inverse),
                                op.getOut("dtau")));
  }
  return results;
}

//===----------------------------------------------------------------------===//
// SoftmaxMixBackwardDqOp, SoftmaxMixBackwardDkvOp
//===----------------------------------------------------------------------===//

namespace {
struct MixGradients {
  Access weights; ///< A_hij
  Access dx;      ///< dx_hij
};
} // namespace

/// `origin` is the key position of query 0.
template <typename OpTy>
static MixGradients buildMixGradients(Domain &domain, OpTy op, Value origin) {
  using namespace mix;
  Access x = buildMixLogits(domain, op, origin);
  Access weights = buildWeights(domain, x, domain.at(op.getLse(), {b, h, i}));
  Access products =
      op.getV() ? domain.contract(
                      domain.at(op.getDmixed(), {b, h, i, e}),
                      domain.at(op.getV(), getValueDims(op.getV(), b, h, j, e)),
                      {b, h, i, j})
                : domain.filled({b, h, i, j}, 0.0f);
  return {weights, buildLogitGradients(domain, weights, products,
                                       domain.at(op.getDelta(), {b, h, i}))};
}

Replacements mlir::moe::decompose(SoftmaxMixBackwardDqOp op,
                                  OpBuilder &builder) {
  using namespace mix;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Value scale = domain.getBody().f32(op.getScale().convertToDouble());
  Access dx = buildMixGradients(domain, op, op.getOrigin()).dx;
  Access dq =
      sumProducts(domain, dx, domain.at(op.getK(), {b, h, j, f}), {b, h, i, f});
  SmallVector<Value> results{scaleInto(domain, dq, scale, op.getOut("dq"))};
  if (op.getWithSums())
    results.push_back(
        copyInto(domain, sumOver(domain, dx, {b, h, i}), op.getOut("sums")));
  if (op.getWithDbias()) {
    Access dbias = sumOver(domain, dx, getBiasDims(op.getBias(), b, h, i, j));
    results.push_back(copyInto(domain, dbias, op.getOut("dbias")));
  }
  return results;
}

Replacements mlir::moe::decompose(SoftmaxMixBackwardDkvOp op,
                                  OpBuilder &builder) {
  using namespace mix;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Body &outer = domain.getBody();
  Value scale = outer.f32(op.getScale().convertToDouble());
  Value origin = op.getOrigin();
  if (origin) // of the queries among the keys: the other way round
    origin = outer.sub(outer.constantInt(outer.getIndexType(), 0), origin);
  auto [weights, dx] = buildMixGradients(domain, op, origin);
  Access dk =
      sumProducts(domain, dx, domain.at(op.getQ(), {b, h, i, f}), {b, h, j, f});
  SmallVector<Value> results{scaleInto(domain, dk, scale, op.getOut("dk"))};
  if (op.getV()) {
    Access dv = sumProducts(
        domain, weights, domain.at(op.getDmixed(), {b, h, i, e}), {b, h, j, e});
    results.push_back(copyInto(domain, dv, op.getOut("dv")));
  }
  if (op.getWithSums())
    results.push_back(
        copyInto(domain, sumOver(domain, dx, {b, h, j}), op.getOut("sums")));
  return results;
}

//===----------------------------------------------------------------------===//
// TopKRenormBackwardOp
//===----------------------------------------------------------------------===//

namespace {
/// The dims of the gradient of a selection, and what several steps read.
struct SelectionGradient {
  SelectionGradient(OpBuilder &builder, TopKRenormBackwardOp op)
      : op(op), domain(builder, op), e(domain.getNumDims() - 2), k(e + 1),
        n(llvm::to_vector(llvm::seq<int64_t>(0, e))), ne(join(n, {e})),
        nk(join(n, {k})), choices(domain.at(op.getIndices(), nk)),
        f32(builder.getF32Type()) {}

  /// Whether choice `index` is the expert that the nest is at.
  Value isChosen(Body &b, Value index) {
    return b.equal(index, b.castInt(b.iteration(e), index.getType()));
  }

  TopKRenormBackwardOp op;
  Domain domain;
  int64_t e, k;
  SmallVector<int64_t> n, ne, nk;
  Access choices;
  Type f32;
};
} // namespace

/// g = gates / route_scale, 0 for no expert.
static Access buildShares(SelectionGradient &t) {
  double scale = t.op.getRouteScale().convertToDouble();
  return t.domain.map({t.domain.at(t.op.getGates(), t.nk), t.choices},
                      t.domain.empty(t.nk, t.f32), [&](Body &b, ValueRange in) {
                        Value none =
                            b.less(in[1], b.constantInt(in[1].getType(), 0));
                        Value share =
                            b.mul(in[0], b.f32(scale == 0 ? 0 : 1 / scale));
                        return b.select(none, b.f32(0.0), share);
                      });
}

/// dg_b - c, 0 for no expert.
static Access buildShareGradients(SelectionGradient &t, Access shares) {
  double scale = t.op.getRouteScale().convertToDouble();
  Access dg = t.domain.map(
      {t.domain.at(t.op.getDgates(), t.nk), t.choices},
      t.domain.empty(t.nk, t.f32), [&](Body &b, ValueRange in) {
        Value none = b.less(in[1], b.constantInt(in[1].getType(), 0));
        return b.select(none, b.f32(0.0), b.mul(in[0], b.f32(scale)));
      });
  if (!t.op.getRenorm())
    return dg;
  Access mean = t.domain.contract(shares, dg, t.n);
  return t.domain.map(
      {dg, mean}, t.domain.empty(t.nk, t.f32),
      [](Body &b, ValueRange in) { return b.sub(in[0], in[1]); });
}

/// sum_k [indices = e] values, `[n.., e]`.
static Access scatterChosen(SelectionGradient &t, Access values, Access out) {
  return t.domain.reduce(
      {values, t.choices}, t.domain.fill(out, t.domain.getBody().f32(0.0)),
      [&](Body &b, ValueRange in, Value acc) {
        return b.select(t.isChosen(b, in[1]), b.add(acc, in[0]), acc);
      });
}

/// 1 / (sum of the selected scores + eps), 0 where that is 0.
static Access buildInverseSums(SelectionGradient &t) {
  double eps = t.op.getEps().convertToDouble();
  Access sums = t.domain.reduce(
      {t.domain.at(t.op.getScores(), t.ne), t.choices},
      t.domain.filled(t.n, 0.0f), [&](Body &b, ValueRange in, Value acc) {
        Value counts =
            b.both(t.isChosen(b, in[1]), b.negate(b.isNegInfinity(in[0])));
        return b.select(counts, b.add(acc, in[0]), acc);
      });
  return t.domain.map(
      {sums}, t.domain.empty(t.n, t.f32), [&](Body &b, ValueRange in) {
        return divideOrZero(b, b.f32(1.0), b.add(in[0], b.f32(eps)));
      });
}

Replacements mlir::moe::decompose(TopKRenormBackwardOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  SelectionGradient t(builder, op);
  Access out = t.domain.at(op.getOuts()[0], t.ne);
  Access shares = buildShares(t);
  Access gradients = buildShareGradients(t, shares);
  ScoreFunction function = op.getScoreFunction();
  auto multiply = [](Body &b, ValueRange in) { return b.mul(in[0], in[1]); };

  if (function == ScoreFunction::None) {
    if (op.getRenorm())
      gradients = t.domain.map({gradients, buildInverseSums(t)},
                               t.domain.empty(t.nk, t.f32), multiply);
    Access scattered = scatterChosen(t, gradients, out);
    if (!op.getScores())
      return SmallVector<Value>{scattered.value};
    // A choice of -inf has gate 0 whatever else there is.
    Access x = t.domain.at(op.getScores(), t.ne);
    Access dp = t.domain.map({scattered, x}, out, [](Body &b, ValueRange in) {
      return b.select(b.isNegInfinity(in[1]), b.f32(0.0), in[0]);
    });
    return SmallVector<Value>{dp.value};
  }

  Access w =
      t.domain.map({shares, gradients}, t.domain.empty(t.nk, t.f32), multiply);
  if (function == ScoreFunction::Softmax && !op.isDense())
    return SmallVector<Value>{scatterChosen(t, w, out).value};
  Access scattered = scatterChosen(t, w, t.domain.empty(t.ne, t.f32));
  Access x = t.domain.at(op.getScores(), t.ne);
  if (function != ScoreFunction::Softmax) {
    Access dx = t.domain.map({scattered, x}, out, [&](Body &b, ValueRange in) {
      Value zero = b.f32(0.0);
      Value product = b.mul(in[0], buildLogSlope(b, function, in[1]));
      return b.select(b.equal(in[0], zero), zero, product);
    });
    return SmallVector<Value>{dx.value};
  }
  // w_e - s_e sum w
  Access total = sumOver(t.domain, w, t.n);
  Softmax softmax = buildSoftmax(t.domain, x, t.n);
  Access dx = t.domain.map({scattered, softmax.exps, softmax.sum, total}, out,
                           [](Body &b, ValueRange in) {
                             Value s = divideOrZero(b, in[1], in[2]);
                             return b.sub(in[0], b.mul(s, in[3]));
                           });
  return SmallVector<Value>{dx.value};
}
