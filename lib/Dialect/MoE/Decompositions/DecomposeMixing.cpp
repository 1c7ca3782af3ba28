//===- DecomposeMixing.cpp - The meaning of the mixing ops ----------------===//
//
// softmax_mix, similarity_inform and attention_posterior with the whole
// token-by-token matrix, as the papers print them. None of the algebra of
// `moe-convert-to-softmax-mix` is used, so that each checks the other.
//
//===----------------------------------------------------------------------===//

#include "Mixing.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"
#include "MoE/Dialect/MoE/IR/PairLogits.h"
#include "MoE/Dialect/MoE/Utils/SortableKeys.h"

#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Visibility
//===----------------------------------------------------------------------===//

namespace {
/// Which keys a query sees; absent parts restrict nothing.
struct PairConditions {
  /// What positions admit.
  VisibilityAttr visibility;
  /// The key position of query 0.
  Value origin;
  std::optional<Access> queryMask, keyMask;
  /// Key visible iff its level is at most that of the query.
  std::optional<Access> queryLevel, keyLevel;
  /// The tokens of the queries' dim are keys, those of the keys' dim queries.
  bool isTransposed = false;
};
} // namespace

std::optional<Access> mlir::moe::atIfPresent(Domain &domain, Value value,
                                             ArrayRef<int64_t> dims) {
  if (!value)
    return std::nullopt;
  return domain.at(value, dims);
}

/// The key position of query 0: `origin`, or the one that puts the last query
/// at the last key.
static Value buildOrigin(Domain &domain, Value origin, int64_t i, int64_t j) {
  if (origin)
    return origin;
  return domain.getBody().sub(domain.getSizeValue(j), domain.getSizeValue(i));
}

/// Whether the positions of query i and key j admit the pair.
static Value buildPositionTest(Body &b, const PairConditions &rule, int64_t i,
                               int64_t j) {
  PairRule positions(rule.visibility, /*isTransposed=*/rule.isTransposed);
  Value visible = positions.isVisible(b, b.add(b.iteration(i), rule.origin),
                                      b.iteration(j));
  return visible ? visible : b.boolean(true);
}

/// fn(ins) where query i sees key j, else -inf: whatever a hidden pair holds is
/// dropped, not computed with (E11).
static Access buildVisibleLogits(Domain &domain, ArrayRef<Access> ins,
                                 ArrayRef<int64_t> dims, int64_t i, int64_t j,
                                 const PairConditions &rule, Domain::MapFn fn) {
  SmallVector<Access> all(ins);
  for (const std::optional<Access> &part :
       {rule.queryMask, rule.keyMask, rule.queryLevel, rule.keyLevel})
    if (part)
      all.push_back(*part);
  Type f32 = domain.getBody().getF32Type();
  return domain.map(all, domain.empty(dims, f32), [&](Body &b, ValueRange in) {
    ValueRange parts = in.drop_front(ins.size());
    Value visible = buildPositionTest(b, rule, i, j);
    for (const std::optional<Access> &mask : {rule.queryMask, rule.keyMask}) {
      if (!mask)
        continue;
      visible = b.both(visible, parts.front());
      parts = parts.drop_front();
    }
    if (rule.keyLevel)
      visible = b.both(visible, b.atMost(parts[1], parts[0]));
    return b.select(visible, fn(b, in.take_front(ins.size())), b.negInfinity());
  });
}

//===----------------------------------------------------------------------===//
// Sums over the keys
//===----------------------------------------------------------------------===//

/// out = sum_j softmax_j(logits) v_j; a key outside of the support adds nothing
/// even where its value is NaN.
static Access buildMixed(Domain &domain, Access logits, const Softmax &softmax,
                         Access v, Access out) {
  Access sums =
      domain.reduce({logits, softmax.exps, v}, domain.filled(out.dims, 0.0f),
                    [](Body &b, ValueRange in, Value acc) {
                      return b.select(b.isNegInfinity(in[0]), acc,
                                      b.add(acc, b.mul(in[1], in[2])));
                    });
  return domain.map({sums, softmax.sum}, out, [](Body &b, ValueRange in) {
    return divideOrZero(b, in[0], in[1]);
  });
}

/// out = shift + ln sum, -inf without a visible key.
static Access buildLse(Domain &domain, const Softmax &softmax, Access out) {
  return domain.map(
      {softmax.shift, softmax.sum}, out,
      [](Body &b, ValueRange in) { return b.add(in[0], b.log(in[1])); });
}

/// out = lse - sum_j A_ij x_ij = ln sum - sum_j A_ij (x_ij - shift); 0 without
/// a visible key. The second form does not cancel for large logits.
static Access buildRowEntropies(Domain &domain, Access logits,
                                const Softmax &softmax, Access out) {
  Access moments = domain.reduce(
      {logits, softmax.exps, softmax.shift}, domain.filled(out.dims, 0.0f),
      [](Body &b, ValueRange in, Value acc) {
        return b.select(b.isNegInfinity(in[0]), acc,
                        b.add(acc, b.mul(in[1], b.sub(in[0], in[2]))));
      });
  return domain.map({moments, softmax.sum}, out, [](Body &b, ValueRange in) {
    Value zero = b.f32(0.0);
    Value entropy = b.sub(b.log(in[1]), b.div(in[0], in[1]));
    return b.select(b.equal(in[1], zero), zero, entropy);
  });
}

Access mlir::moe::buildEntropies(Domain &domain, Access p,
                                 ArrayRef<int64_t> row) {
  return domain.reduce(
      {p}, domain.filled(row, 0.0f), [](Body &b, ValueRange in, Value acc) {
        Value zero = b.f32(0.0);
        Value term = b.mul(in[0], b.log(in[0]));
        return b.sub(acc, b.select(b.equal(in[0], zero), zero, term));
      });
}

//===----------------------------------------------------------------------===//
// SoftmaxMixOp
//===----------------------------------------------------------------------===//

Access mlir::moe::buildMixLogits(Domain &domain, MixLogitsOpInterface op,
                                 Value origin, bool isTransposed) {
  // x_hij = scale q_hi.k_hj + key_bias_hj + bias_hij
  using namespace mix;
  PairConditions rule;
  rule.origin = buildOrigin(domain, origin, i, j);
  rule.visibility = op.getVisibility();
  rule.queryMask = atIfPresent(domain, op.getQueryMask(), {b, i});
  rule.keyMask = atIfPresent(domain, op.getKeyMask(), {b, j});
  rule.queryLevel = atIfPresent(domain, op.getQueryLevel(), {b, i});
  rule.keyLevel = atIfPresent(domain, op.getKeyLevel(), {b, j});
  rule.isTransposed = isTransposed;
  if (isTransposed)
    std::swap(rule.queryLevel, rule.keyLevel);

  SmallVector<Access> ins{domain.contract(domain.at(op.getQ(), {b, h, i, f}),
                                          domain.at(op.getK(), {b, h, j, f}),
                                          {b, h, i, j})};
  if (op.getKeyBias())
    ins.push_back(domain.at(op.getKeyBias(), {b, h, j}));
  if (op.getBias())
    ins.push_back(
        domain.at(op.getBias(), getBiasDims(op.getBias(), b, h, i, j)));
  double scale = op.getScale().convertToDouble();
  return buildVisibleLogits(domain, ins, {b, h, i, j}, i, j, rule,
                            [&](Body &b, ValueRange in) {
                              Value x = b.mul(in[0], b.f32(scale));
                              for (Value term : in.drop_front())
                                x = b.add(x, term);
                              return x;
                            });
}

Replacements mlir::moe::decompose(SoftmaxMixOp op, OpBuilder &builder) {
  using namespace mix;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Access logits = buildMixLogits(domain, op, op.getOrigin());
  Softmax softmax = buildSoftmax(domain, logits, {b, h, i});

  SmallVector<Value> results;
  if (op.getV())
    results.push_back(
        buildMixed(domain, logits, softmax,
                   domain.at(op.getV(), getValueDims(op.getV(), b, h, j, e)),
                   domain.at(op.getMixedInit(), {b, h, i, e}))
            .value);
  results.push_back(
      buildLse(domain, softmax, domain.at(op.getLseInit(), {b, h, i})).value);
  if (op.getWithEntropy())
    results.push_back(
        buildRowEntropies(domain, logits, softmax,
                          domain.at(op.getEntropyInit(), {b, h, i}))
            .value);
  return results;
}

//===----------------------------------------------------------------------===//
// SimilarityInformOp
//===----------------------------------------------------------------------===//

Access mlir::moe::buildSimilarities(Domain &domain,
                                    const SimilarityOperands &op, int64_t j) {
  using namespace similarity;
  PairConditions rule;
  rule.origin = buildOrigin(domain, op.origin, i, j);
  rule.visibility = op.visibility;
  rule.keyMask = atIfPresent(domain, op.keyMask, {b, j});
  rule.queryMask = atIfPresent(domain, op.queryMask, {b, i});
  if (op.restrictedTo == Restrict::Entropy) {
    rule.keyLevel = buildEntropies(domain, domain.at(op.e, {b, j, e}), {b, j});
    rule.queryLevel = domain.at(rule.keyLevel->value, {b, i});
  }

  int64_t feature = op.ws ? f : d;
  Access q = domain.at(op.u, {b, i, d});
  if (op.ws)
    q = domain.contract(q, domain.at(op.ws, {d, f}), {b, i, f});
  Access k = domain.at(op.uk ? op.uk : op.u, {b, j, feature});
  Access products = domain.contract(q, k, {b, i, j});
  return buildVisibleLogits(
      domain, {products}, {b, i, j}, i, j, rule, [&](Body &b, ValueRange in) {
        return b.div(in[0], op.tauValue ? op.tauValue : b.f32(op.tau));
      });
}

Replacements mlir::moe::decompose(SimilarityInformOp op, OpBuilder &builder) {
  using namespace similarity;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  // Without keys of their own no operand spans j: it runs over the queries.
  int64_t j = op.getUk() ? similarity::j : domain.addTwin(i);
  Access logits = buildSimilarities(domain, op, j);
  Softmax softmax = buildSoftmax(domain, logits, {b, i});
  Access p =
      buildMixed(domain, logits, softmax, domain.at(op.getE(), {b, j, e}),
                 domain.at(op.getOuts()[0], {b, i, e}));
  Access lse = buildLse(domain, softmax, domain.at(op.getOuts()[1], {b, i}));
  return SmallVector<Value>{p.value, lse.value};
}

//===----------------------------------------------------------------------===//
// AttentionPosteriorOp
//===----------------------------------------------------------------------===//

/// More heads than there are; keys count down from it.
static constexpr int64_t kLastHead = 0x7fffffff;

Access mlir::moe::buildMinEntropyHead(Domain &domain, AttentionPosteriorOp op,
                                      Access entropies) {
  using namespace posterior;
  // All heads of a scope have the same number of rows, so that their sums
  // compare as their means do; masked rows add 0.
  bool perSequence = op.getHeadScope() == HeadScope::Sequence;
  SmallVector<int64_t> scope;
  if (perSequence)
    scope.push_back(b);
  Access sums = domain.reduce(
      {entropies}, domain.filled(join(scope, {h}), 0.0f),
      [](Body &b, ValueRange in, Value acc) { return b.add(acc, in[0]); });

  // The lowest entropy, and of equal ones the first head, in one integer: a sum
  // that was read twice may be fused twice and rounded in two orders, and then
  // no head, or the wrong one, is the lowest.
  Type i64 = domain.getBody().getI64Type();
  Access best = domain.reduce(
      {sums}, domain.filled(scope, i64, std::numeric_limits<int64_t>::min()),
      [&](Body &b, ValueRange in, Value acc) {
        Value key = toSortableKey(b, b.sub(b.f32(0.0), in[0]));
        Value high = arith::ShLIOp::create(b, b.castInt(key, i64),
                                           b.constantInt(i64, 32));
        Value low = b.sub(b.constantInt(i64, kLastHead),
                          b.castInt(b.iteration(h), i64));
        return b.maxSigned(acc, b.either(high, low));
      });
  Type i32 = domain.getBody().getI32Type();
  return domain.map(
      {best}, domain.at(op.getOuts()[1], {b}), [&](Body &b, ValueRange in) {
        Value low = b.both(in[0], b.constantInt(i64, kLastHead));
        return b.castInt(b.sub(b.constantInt(i64, kLastHead), low), i32);
      });
}

Access mlir::moe::buildHeadWeights(Domain &domain, const PosteriorOperands &op,
                                   Access priorLse, Access posteriorLse) {
  using namespace posterior;
  Type f32 = domain.getBody().getF32Type();
  SmallVector<Access> ins{priorLse, posteriorLse};
  if (op.headPrior)
    ins.push_back(domain.at(op.headPrior, {b, i, h}));
  Access evidence =
      domain.map(ins, domain.empty({b, h, i}, f32), [](Body &b, ValueRange in) {
        Value evidence = b.sub(in[1], in[0]);
        if (in.size() == 3)
          evidence = b.add(evidence, b.log(in[2]));
        return b.select(b.isNegInfinity(in[1]), b.negInfinity(), evidence);
      });
  Softmax softmax = buildSoftmax(domain, evidence, {b, i});
  return domain.map(
      {softmax.exps, softmax.sum}, domain.empty({b, h, i}, f32),
      [](Body &b, ValueRange in) { return divideOrZero(b, in[0], in[1]); });
}

Value mlir::moe::buildPrecision(Domain &domain, const PosteriorOperands &op) {
  Body &b = domain.getBody();
  if (op.sigmaValue)
    return b.div(b.f32(1.0), b.mul(op.sigmaValue, op.sigmaValue));
  return b.f32(1.0 / (op.sigma * op.sigma));
}

Access mlir::moe::buildPriorLogits(Domain &domain,
                                   const AttentionOperands &op) {
  using namespace posterior;
  PairConditions rule;
  rule.origin = buildOrigin(domain, /*origin=*/Value(), i, j);
  rule.visibility = op.visibility;
  rule.keyMask = atIfPresent(domain, op.keyMask, {b, j});
  rule.queryMask = atIfPresent(domain, op.queryMask, {b, i});

  SmallVector<Access> ins{domain.contract(domain.at(op.q, {b, h, i, f}),
                                          domain.at(op.k, {b, h, j, f}),
                                          {b, h, i, j})};
  if (op.bias)
    ins.push_back(domain.at(op.bias, getBiasDims(op.bias, b, h, i, j)));
  return buildVisibleLogits(domain, ins, {b, h, i, j}, i, j, rule,
                            [&](Body &b, ValueRange in) {
                              Value x = b.mul(in[0], b.f32(op.scale));
                              return in.size() == 1 ? x : b.add(x, in[1]);
                            });
}

Access mlir::moe::buildMeans(Domain &domain, const PosteriorOperands &op) {
  using namespace posterior;
  if (op.vp)
    return domain.at(op.vp, {b, h, j, d});
  // v'_hj = wo_h v_hj
  return domain.contract(domain.at(op.v, {b, h, j, c}),
                         domain.at(op.wo, {h, d, c}), {b, h, j, d});
}

Access mlir::moe::buildPosteriorLogits(Domain &domain,
                                       const PosteriorOperands &op,
                                       Access prior, Access means) {
  using namespace posterior;
  Access products =
      domain.contract(domain.at(op.u, {b, i, d}), means, {b, h, i, j});
  Access norms = domain.contract(means, means, {b, h, j});
  Value precision = buildPrecision(domain, op);
  return domain.map({prior, products, norms},
                    domain.empty({b, h, i, j}, domain.getBody().getF32Type()),
                    [&](Body &b, ValueRange in) {
                      Value likelihood = b.mul(
                          precision, b.sub(in[1], b.mul(b.f32(0.5), in[2])));
                      return b.select(b.isNegInfinity(in[0]), in[0],
                                      b.add(in[0], likelihood));
                    });
}

/// out[b, .., ] = values[b, head_b, ..]: `h` is among the dims of `values`
/// only.
static Access selectHead(Domain &domain, Access values, Access head,
                         Access out) {
  int64_t h = posterior::h;
  Body &outer = domain.getBody();
  return domain.reduce({values, head}, domain.fill(out, outer.f32(0.0)),
                       [&](Body &b, ValueRange in, Value acc) {
                         Value isHead = b.equal(
                             b.castInt(b.iteration(h), in[1].getType()), in[1]);
                         return b.select(isHead, in[0], acc);
                       });
}

Access mlir::moe::hideRows(Domain &domain, Access rows, Value queryMask,
                           Value hidden, Access out) {
  SmallVector<Access> ins{rows};
  if (queryMask)
    ins.push_back(domain.at(queryMask, {posterior::b, posterior::i}));
  return domain.map(ins, out, [&](Body &b, ValueRange in) {
    return queryMask ? b.select(in[1], in[0], hidden) : in[0];
  });
}

/// The log-sum-exps of the prior: those that the attention has emitted, or
/// those of `prior`.
static Access buildPriorLse(Domain &domain, AttentionPosteriorOp op,
                            const Softmax &prior, Access out) {
  using namespace posterior;
  if (!op.getRowLse())
    return buildLse(domain, prior, out);
  return hideRows(domain, domain.at(op.getRowLse(), {b, h, i}),
                  op.getQueryMask(), domain.getBody().negInfinity(), out);
}

/// Likewise the entropies.
static Access buildPriorEntropies(Domain &domain, AttentionPosteriorOp op,
                                  Access logits, const Softmax &prior,
                                  Access out) {
  using namespace posterior;
  if (!op.getRowEntropy())
    return buildRowEntropies(domain, logits, prior, out);
  return hideRows(domain, domain.at(op.getRowEntropy(), {b, h, i}),
                  op.getQueryMask(), domain.getBody().f32(0.0), out);
}

/// p_i = sum_h H'_ih mixed_hi (13), with the log-sum-exps of all heads.
static SmallVector<Value> mixAllHeads(Domain &domain, AttentionPosteriorOp op,
                                      const Softmax &prior,
                                      const Softmax &joint, Access mixed) {
  using namespace posterior;
  Body &outer = domain.getBody();
  Access priorLse =
      buildPriorLse(domain, op, prior, domain.at(op.getOuts()[2], {b, h, i}));
  Access posteriorLse =
      buildLse(domain, joint, domain.at(op.getOuts()[3], {b, h, i}));
  Access weights = buildHeadWeights(domain, op, priorLse, posteriorLse);
  Access p = domain.fill(domain.at(op.getOuts()[0], {b, i, e}), outer.f32(0.0));
  p = domain.contract(weights, mixed, p);
  Access none = domain.fill(domain.at(op.getOuts()[1], {b}),
                            outer.constantInt(outer.getI32Type(), -1));
  return {p.value, none.value, priorLse.value, posteriorLse.value};
}

Replacements mlir::moe::decompose(AttentionPosteriorOp op, OpBuilder &builder) {
  using namespace posterior;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Body &outer = domain.getBody();
  Type f32 = builder.getF32Type();

  // A_h and A'_h, the second applied to e.
  Access priorLogits = buildPriorLogits(domain, op);
  Access jointLogits =
      buildPosteriorLogits(domain, op, priorLogits, buildMeans(domain, op));
  Softmax prior = buildSoftmax(domain, priorLogits, {b, h, i});
  Softmax joint = buildSoftmax(domain, jointLogits, {b, h, i});
  Access mixed =
      buildMixed(domain, jointLogits, joint, domain.at(op.getE(), {b, j, e}),
                 domain.empty({b, h, i, e}, f32));
  if (op.getHeadMode() == HeadMode::All)
    return mixAllHeads(domain, op, prior, joint, mixed);

  Access head;
  if (op.getHeadMode() == HeadMode::Fixed)
    head = domain.fill(domain.at(op.getOuts()[1], {b}),
                       outer.constantInt(outer.getI32Type(), *op.getHead()));
  else
    head =
        buildMinEntropyHead(domain, op,
                            buildPriorEntropies(domain, op, priorLogits, prior,
                                                domain.empty({b, h, i}, f32)));

  Access priorLse =
      buildPriorLse(domain, op, prior, domain.empty({b, h, i}, f32));
  Access posteriorLse = buildLse(domain, joint, domain.empty({b, h, i}, f32));
  auto ofHead = [&](Access all, Value out) {
    return selectHead(domain, all, head, domain.at(out, {b, l, i})).value;
  };
  Access p =
      selectHead(domain, mixed, head, domain.at(op.getOuts()[0], {b, i, e}));
  return SmallVector<Value>{p.value, head.value,
                            ofHead(priorLse, op.getOuts()[2]),
                            ofHead(posteriorLse, op.getOuts()[3])};
}

//===----------------------------------------------------------------------===//
// AttentionEntropyOp
//===----------------------------------------------------------------------===//

Access mlir::moe::buildMeanEntropies(Domain &domain, AttentionEntropyOp op,
                                     Access rows) {
  using namespace entropy;
  auto self = [](Body &, ValueRange in) { return in[0]; };
  // Masked rows have entropy 0, so that only the number of rows is left to
  // mask.
  Access sums = domain.sumWide({rows}, {b, h}, self, self);
  Type i64 = domain.getBody().getI64Type();
  Access valid;
  if (Value mask = op.getQueryMask())
    valid = domain.reduce({domain.at(mask, {b, i})}, domain.filled({b}, i64, 0),
                          [&](Body &b, ValueRange in, Value acc) {
                            return b.add(acc,
                                         arith::ExtUIOp::create(b, i64, in[0]));
                          });
  else
    valid = domain.fill(domain.empty({b}, i64),
                        domain.getBody().castInt(domain.getSizeValue(i), i64));
  return domain.map({sums, valid}, domain.at(op.getOuts()[0], {b, h}),
                    [](Body &b, ValueRange in) {
                      return divideOrZero(
                          b, in[0],
                          arith::SIToFPOp::create(b, b.getF32Type(), in[1]));
                    });
}

Replacements mlir::moe::decompose(AttentionEntropyOp op, OpBuilder &builder) {
  using namespace entropy;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Access logits = buildPriorLogits(domain, op);
  Softmax softmax = buildSoftmax(domain, logits, {b, h, i});
  Access rows = buildRowEntropies(domain, logits, softmax,
                                  domain.at(op.getOuts()[1], {b, h, i}));
  Access mean = buildMeanEntropies(domain, op, rows);
  return SmallVector<Value>{mean.value, rows.value};
}
