//===- SoftmaxMixBackward.cpp - Gradients by the sweeps of softmax_mix ----===//
//
// similarity_inform_backward is the chain rule through the softmax_mix that its
// forward is written with, whose two sweeps do all that is quadratic in the
// number of tokens.
//
//===----------------------------------------------------------------------===//

#include "SoftmaxMixBackward.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"

#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

SoftmaxMixBackwardDqOp MixBackward::buildDq(OpBuilder &builder, Location loc,
                                            ValueRange outs, bool withSums,
                                            bool withDbias) const {
  return SoftmaxMixBackwardDqOp::create(
      builder, loc, TypeRange(outs), mix.q, mix.k, lse, delta, mix.v, dmixed,
      mix.keyBias, mix.bias, mix.queryMask, mix.keyMask, mix.queryLevel,
      mix.keyLevel, mix.origin, outs, APFloat(mix.scale), mix.visibility,
      withSums, withDbias, mix.precision);
}

SoftmaxMixBackwardDkvOp MixBackward::buildDkv(OpBuilder &builder, Location loc,
                                              ValueRange outs,
                                              bool withSums) const {
  // The queries' origin among the keys, seen from the keys.
  Value origin = mix.origin;
  if (origin)
    origin = arith::SubIOp::create(
        builder, loc, arith::ConstantIndexOp::create(builder, loc, 0), origin);
  return SoftmaxMixBackwardDkvOp::create(
      builder, loc, TypeRange(outs), mix.q, mix.k, lse, delta, mix.v, dmixed,
      mix.keyBias, mix.bias, mix.queryMask, mix.keyMask, mix.queryLevel,
      mix.keyLevel, origin, outs, APFloat(mix.scale), mix.visibility, withSums,
      mix.precision);
}

SoftmaxMixBackwardSelfOp MixBackward::buildSelf(OpBuilder &builder,
                                                Location loc,
                                                ValueRange outs) const {
  return SoftmaxMixBackwardSelfOp::create(
      builder, loc, TypeRange(outs), mix.q, lse, delta, mix.v, dmixed,
      mix.keyMask, mix.keyLevel, outs, APFloat(mix.scale), mix.visibility,
      mix.precision);
}

//===----------------------------------------------------------------------===//
// SoftmaxMixBackwardSelfOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(SoftmaxMixBackwardSelfOp op,
                                  OpBuilder &builder) {
  using namespace selfmix;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  SmallVector<int64_t> tokens{b, h, i, f};
  MixBackward sweeps{startSelfMix(op), op.getLse(), op.getDelta(),
                     op.getDmixed()};
  auto empty = [&] { return domain.empty(tokens, builder.getF32Type()).value; };
  auto dq = sweeps.buildDq(builder, op.getLoc(), empty());
  auto dkv = sweeps.buildDkv(builder, op.getLoc(), {empty(), op.getOuts()[1]});
  Access sum = domain.map(
      {domain.at(dq.getResult(0), tokens), domain.at(dkv.getResult(0), tokens)},
      domain.at(op.getOuts()[0], tokens),
      [](Body &b, ValueRange in) { return b.add(in[0], in[1]); });
  return SmallVector<Value>{sum.value, dkv.getResult(1)};
}

//===----------------------------------------------------------------------===//
// What both gradients are made with
//===----------------------------------------------------------------------===//

Access mlir::moe::withoutPadding(Domain &domain, Access access,
                                 std::optional<Access> mask) {
  if (!mask)
    return access;
  return domain.map({access, *mask},
                    domain.empty(access.dims, domain.getBody().getF32Type()),
                    [](Body &b, ValueRange in) {
                      return b.select(in[1], in[0], b.f32(0.0));
                    });
}

Access mlir::moe::joinDims(OpBuilder &builder, Domain &domain, Access access,
                           int64_t first, int64_t joined) {
  SmallVector<ReassociationIndices> groups;
  SmallVector<int64_t> dims;
  for (int64_t position = 0, rank = access.dims.size(); position < rank;
       ++position) {
    if (position == first + 1) {
      groups.back().push_back(position);
      continue;
    }
    groups.push_back({position});
    dims.push_back(position == first ? joined : access.dims[position]);
  }
  Value value = tensor::CollapseShapeOp::create(builder, access.value.getLoc(),
                                                access.value, groups);
  return domain.at(value, dims);
}

int64_t mlir::moe::addJoinedDim(Domain &domain, int64_t outer, int64_t inner) {
  std::optional<int64_t> left = getConstantIntValue(domain.getSize(outer));
  std::optional<int64_t> right = getConstantIntValue(domain.getSize(inner));
  if (left && right)
    return domain.addDim(domain.getBody().getIndexAttr(*left * *right));
  return domain.addDim(domain.getBody().mul(domain.getSizeValue(outer),
                                            domain.getSizeValue(inner)));
}

//===----------------------------------------------------------------------===//
// SimilarityInformBackwardOp
//===----------------------------------------------------------------------===//

/// delta_i = dp_i.p_i - dlse_i
static Access buildDelta(Domain &domain, SimilarityInformBackwardOp op) {
  using namespace similarity;
  Access delta = domain.contract(domain.at(op.getDp(), {b, i, e}),
                                 domain.at(op.getP(), {b, i, e}), {b, i});
  if (!op.getDlse())
    return delta;
  return domain.map({delta, domain.at(op.getDlse(), {b, i})},
                    domain.empty({b, i}, domain.getBody().getF32Type()),
                    [](Body &b, ValueRange in) { return b.sub(in[0], in[1]); });
}

/// The gradients that follow from dQ, the gradient of the queries, and dK:
/// du, duk, dws, as far as they are there.
static SmallVector<Value> finishSimilarity(OpBuilder &builder, Domain &domain,
                                           SimilarityInformBackwardOp op,
                                           Access dq, Access dk,
                                           std::optional<Access> queryMask) {
  using namespace similarity;
  SmallVector<Value> results;
  // du = dQ ws^T, and dK where the keys are the queries
  Access du = dq;
  if (op.getWs())
    du = domain.contract(dq, domain.at(op.getWs(), {d, f}), {b, i, d});
  if (op.getUk()) {
    results.push_back(copyInto(domain, du, op.getOut("du")));
    results.push_back(dk.value);
  } else {
    Access out = domain.at(op.getOut("du"), {b, i, d});
    Access sum =
        domain.map({du, domain.at(dk.value, {b, i, d})}, out,
                   [](Body &b, ValueRange in) { return b.add(in[0], in[1]); });
    results.push_back(sum.value);
  }
  if (op.getWs()) {
    // dws_df = sum over all tokens of u_d dQ_f
    int64_t n = addJoinedDim(domain, b, i);
    Access u =
        withoutPadding(domain, domain.at(op.getU(), {b, i, d}), queryMask);
    Access dws = domain.fill(domain.at(op.getOut("dws"), {d, f}),
                             domain.getBody().f32(0.0));
    dws = domain.contract(joinDims(builder, domain, u, 0, n),
                          joinDims(builder, domain, dq, 0, n), dws);
    results.push_back(dws.value);
  }
  return results;
}

Replacements mlir::moe::convertToSoftmaxMix(SimilarityInformBackwardOp op,
                                            OpBuilder &builder) {
  using namespace similarity;
  if (!op.hasPureTensorSemantics())
    return failure();
  Location loc = op.getLoc();
  Domain domain(builder, op);
  Type f32 = builder.getF32Type();
  Value tau = op.getTauValue();
  auto divideByTau = [&](Access access) {
    return domain.map(
        {access}, domain.empty(access.dims, f32),
        [&](Body &b, ValueRange in) { return b.div(in[0], tau); });
  };

  Access q = buildSimilarityQueries(domain, op);
  if (tau)
    q = divideByTau(q);
  MixBackward backward;
  backward.mix = startSimilarityMix(builder, domain, op, q);
  backward.lse = addHeadDim(builder, loc, op.getLse());
  backward.delta = addHeadDim(builder, loc, buildDelta(domain, op).value);
  backward.dmixed = addHeadDim(builder, loc, op.getDp());

  if (takesPairsOnce(op)) {
    auto self = backward.buildSelf(builder, loc,
                                   {addHeadDim(builder, loc, op.getOut("du")),
                                    addHeadDim(builder, loc, op.getOut("de"))});
    return llvm::map_to_vector(self.getResults(), [&](Value result) {
      return dropHeadDim(builder, loc, result);
    });
  }
  int64_t keyFeature = op.getWs() ? f : d, key = op.getUk() ? j : i;
  auto dqOp = backward.buildDq(
      builder, loc, addHeadDim(builder, loc, domain.empty(q.dims, f32).value));
  Access dq = domain.at(dropHeadDim(builder, loc, dqOp.getResult(0)), q.dims);
  Value dk0 = op.getUk() ? op.getOut("duk")
                         : domain.empty({b, key, keyFeature}, f32).value;
  auto dkvOp = backward.buildDkv(builder, loc,
                                 {addHeadDim(builder, loc, dk0),
                                  addHeadDim(builder, loc, op.getOut("de"))});
  Access dk = domain.at(dropHeadDim(builder, loc, dkvOp.getResult(0)),
                        {b, key, keyFeature});

  // With a learned tau the sweeps see Q/tau.
  Access scaled = dq;
  if (tau)
    dq = divideByTau(dq);
  std::optional<Access> queryMask;
  if (backward.mix.queryMask)
    queryMask = domain.at(backward.mix.queryMask, {b, i});
  SmallVector<Value> results =
      finishSimilarity(builder, domain, op, dq, dk, queryMask);
  results.insert(results.begin() + 1,
                 dropHeadDim(builder, loc, dkvOp.getResult(1)));
  if (tau) {
    // dtau = -sum_i Q_i.dQ_i / tau, and Q.dQ = (Q/tau).(tau dQ)
    Access rows = sumProducts(domain, scaled, q, {b, i});
    Value factor = domain.getBody().div(domain.getBody().f32(-1.0), tau);
    results.push_back(scaleInto(domain,
                                sumOver(domain, sumOver(domain, rows, {b}), {}),
                                factor, op.getOut("dtau")));
  }
  return results;
}
