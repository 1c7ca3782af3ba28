//===- DecomposeLosses.cpp - The meaning of the losses --------------------===//
//
// Sums over tokens are formed in f64: there are many tokens, and a loss is one
// number. Counts are integers.
//
//===----------------------------------------------------------------------===//

#include "Domain.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"

#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

static Value f64(Body &b, double value) {
  return arith::ConstantOp::create(b, b.getF64FloatAttr(value));
}
static Value toF64(Body &b, Value value) {
  if (isa<FloatType>(value.getType()))
    return arith::ExtFOp::create(b, b.getF64Type(), value);
  return arith::SIToFPOp::create(b, b.getF64Type(), value);
}
static Value toF32(Body &b, Value value) {
  return arith::TruncFOp::create(b, b.getF32Type(), value);
}
/// numerator / denominator, and 0 where the denominator is 0.
static Value divideOrZero64(Body &b, Value numerator, Value denominator) {
  Value zero = f64(b, 0.0);
  return b.select(b.equal(denominator, zero), zero,
                  b.div(numerator, denominator));
}

static Access zeros64(Domain &domain, ArrayRef<int64_t> dims) {
  return domain.fill(domain.empty(dims, domain.getBody().getF64Type()),
                     f64(domain.getBody(), 0.0));
}

/// The number of tokens that are real, i64 `[]`.
static Access countTokens(Domain &domain, Value mask, int64_t n) {
  Type i64 = domain.getBody().getI64Type();
  if (!mask)
    return domain.fill(domain.empty({}, i64),
                       domain.getBody().castInt(domain.getSizeValue(n), i64));
  return domain.reduce({domain.at(mask, {n})}, domain.filled({}, i64, 0),
                       [&](Body &b, ValueRange in, Value acc) {
                         return b.add(acc,
                                      arith::ExtUIOp::create(b, i64, in[0]));
                       });
}

//===----------------------------------------------------------------------===//
// BalanceLossOp
//===----------------------------------------------------------------------===//

/// load_e = the number of assignments of real tokens to e, into `out`.
static Access buildLoad(Domain &domain, BalanceLossOp op) {
  using namespace balance;
  Type i32 = domain.getBody().getI32Type();
  SmallVector<Access> ins{domain.at(op.getIndices(), {n, k})};
  if (op.getMask())
    ins.push_back(domain.at(op.getMask(), {n}));
  Access load = domain.fill(domain.at(op.getOuts()[1], {e}),
                            domain.getBody().constantInt(i32, 0));
  return domain.reduce(ins, load, [&](Body &b, ValueRange in, Value acc) {
    Value isChosen = b.equal(in[0], b.castInt(b.iteration(e), in[0].getType()));
    if (in.size() == 2)
      isChosen = b.both(isChosen, in[1]);
    return b.add(acc, arith::ExtUIOp::create(b, i32, isChosen));
  });
}

Replacements mlir::moe::decompose(BalanceLossOp op, OpBuilder &builder) {
  using namespace balance;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Type i64 = builder.getI64Type();
  Access load = buildLoad(domain, op);
  Access total = domain.reduce({load}, domain.filled({}, i64, 0),
                               [&](Body &b, ValueRange in, Value acc) {
                                 return b.add(acc, b.castInt(in[0], i64));
                               });

  // sums_e = sum_n p_ne over the real tokens
  SmallVector<Access> ins{domain.at(op.getP(), {n, e})};
  if (op.getMask())
    ins.push_back(domain.at(op.getMask(), {n}));
  Access sums = domain.reduce(
      ins, zeros64(domain, {e}), [](Body &b, ValueRange in, Value acc) {
        Value sum = b.add(acc, toF64(b, in[0]));
        return in.size() == 2 ? b.select(in[1], sum, acc) : sum;
      });

  // loss = E sum_e (load_e / total) (sums_e / (tokens [k]))
  Value numPlaces = domain.getSizeValue(k), numExperts = domain.getSizeValue(e);
  Access weighted = domain.reduce({load, total, sums}, zeros64(domain, {}),
                                  [](Body &b, ValueRange in, Value acc) {
                                    Value share = divideOrZero64(
                                        b, toF64(b, in[0]), toF64(b, in[1]));
                                    return b.add(acc, b.mul(share, in[2]));
                                  });
  Access loss = domain.map(
      {weighted, countTokens(domain, op.getMask(), n)},
      domain.at(op.getOuts()[0], {}), [&](Body &b, ValueRange in) {
        Value divisor = in[1];
        if (op.getDivisor() == LossDivisor::Assignments)
          divisor = b.mul(divisor, b.castInt(numPlaces, i64));
        Value experts = toF64(b, b.castInt(numExperts, i64));
        return toF32(
            b, b.mul(experts, divideOrZero64(b, in[0], toF64(b, divisor))));
      });
  return SmallVector<Value>{loss.value, load.value};
}

//===----------------------------------------------------------------------===//
// ZLossOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(ZLossOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  int64_t n = 0, e = 1;
  Softmax softmax = buildSoftmax(domain, domain.at(op.getZ(), {n, e}), {n});
  SmallVector<Access> ins{softmax.shift, softmax.sum};
  if (op.getMask())
    ins.push_back(domain.at(op.getMask(), {n}));
  // lse = shift + ln sum; ln 0 is the -inf of a token without support
  Access lse = domain.map(
      ins, domain.at(op.getOuts()[1], {n}), [](Body &b, ValueRange in) {
        Value lse = b.add(in[0], b.log(in[1]));
        return in.size() == 3 ? b.select(in[2], lse, b.negInfinity()) : lse;
      });
  Access squares = domain.reduce(
      {lse}, zeros64(domain, {}), [](Body &b, ValueRange in, Value acc) {
        Value wide = toF64(b, in[0]);
        return b.select(b.isNegInfinity(in[0]), acc,
                        b.add(acc, b.mul(wide, wide)));
      });
  Access loss =
      domain.map({squares, countTokens(domain, op.getMask(), n)},
                 domain.at(op.getOuts()[0], {}), [](Body &b, ValueRange in) {
                   return toF32(b, divideOrZero64(b, in[0], toF64(b, in[1])));
                 });
  return SmallVector<Value>{loss.value, lse.value};
}

//===----------------------------------------------------------------------===//
// BiasUpdateOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(BiasUpdateOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Type i64 = builder.getI64Type();
  Access counts = domain.at(op.getCounts(), {0});
  Access total = domain.reduce({counts}, domain.filled({}, i64, 0),
                               [&](Body &b, ValueRange in, Value acc) {
                                 return b.add(acc, b.castInt(in[0], i64));
                               });
  double gamma = op.getGamma().convertToDouble();
  Value numExperts = domain.getBody().castInt(domain.getSizeValue(0), i64);
  Access updated =
      domain.map({domain.at(op.getBias(), {0}), counts, total},
                 domain.at(op.getOuts()[0], {0}), [&](Body &b, ValueRange in) {
                   // sign(total - E count)
                   Value own = b.mul(b.castInt(in[1], i64), numExperts);
                   Value step =
                       b.select(b.less(own, in[2]), b.f32(gamma), b.f32(0.0));
                   step = b.select(b.less(in[2], own), b.f32(-gamma), step);
                   return b.add(in[0], step);
                 });
  return SmallVector<Value>{updated.value};
}
