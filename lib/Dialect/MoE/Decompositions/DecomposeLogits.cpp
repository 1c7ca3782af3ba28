//===- DecomposeLogits.cpp - The meaning of the logits --------------------===//
//
// router_logits, cosine_logits, hyper_router and ac_logits: products, with
// something done to the operands or the result of all but the first. What is
// done to a token is done before the product, one row at a time, so that a tile
// of rows needs no memory beyond itself; what is done to an expert is a factor
// of the result's column, so that tiles do not repeat it on the expert's
// features.
//
//===----------------------------------------------------------------------===//

#include "Domain.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"

#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// The numbers of the free leading dims n0, n1, .. of an op over tokens, when
/// its own dims start at `first`.
static SmallVector<int64_t> getLeadingDims(int64_t first) {
  return llvm::to_vector(llvm::seq<int64_t>(0, first));
}

//===----------------------------------------------------------------------===//
// RouterLogitsOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(RouterLogitsOp op, OpBuilder &builder) {
  Domain domain(builder, op);
  int64_t e = domain.getNumDims() - 2, d = e + 1;
  SmallVector<int64_t> n = llvm::to_vector(llvm::seq<int64_t>(0, e));

  // z_ne = bias_e
  Access z = domain.at(op.getOuts()[0], join(n, {e}));
  if (op.getBias())
    z = domain.map({domain.at(op.getBias(), {e})}, z,
                   [](Body &b, ValueRange in) { return in[0]; });
  else
    z = domain.fill(z, domain.getBody().f32(0.0));

  // z_ne += sum_d h_nd weight_ed
  z = domain.contract(domain.at(op.getH(), join(n, {d})),
                      domain.at(op.getWeight(), {e, d}), z);
  // On buffers nothing is replaced.
  if (op->getNumResults() == 0)
    return SmallVector<Value>{};
  return SmallVector<Value>{z.value};
}

//===----------------------------------------------------------------------===//
// CosineLogitsOp
//===----------------------------------------------------------------------===//

/// max(|x_row|, eps) along the last dim of `x`.
static Access buildNorms(Domain &domain, Access x, double eps) {
  SmallVector<int64_t> row(ArrayRef<int64_t>(x.dims).drop_back());
  // Squares in f64, in the sum itself: an f32 square may overflow.
  Body &outer = domain.getBody();
  Access squares = domain.reduce(
      {x}, domain.fill(domain.empty(row, outer.getF64Type()), outer.f64(0.0)),
      [](Body &b, ValueRange in, Value acc) {
        Value wide = b.toF64(in[0]);
        return b.add(acc, b.mul(wide, wide));
      });
  return domain.map({squares}, domain.empty(row, outer.getF32Type()),
                    [&](Body &b, ValueRange in) -> Value {
                      Value norm =
                          b.maximum(math::SqrtOp::create(b, in[0]), b.f64(eps));
                      return arith::TruncFOp::create(b, b.getF32Type(), norm);
                    });
}

/// z_ne *= 1 / (max(|emb_e|, eps) tau), whichever of the two factors there are.
static Access scaleByExpert(Domain &domain, CosineLogitsOp op, Access emb,
                            Access z) {
  Value tau = op.getTauValue();
  double constantTau = op.getTau().convertToDouble();
  if (!op.getNormEmb() && !tau && constantTau == 1.0)
    return z;
  SmallVector<Access> ins{z};
  if (op.getNormEmb())
    ins.push_back(buildNorms(domain, emb, op.getEps().convertToDouble()));
  return domain.map(ins, z, [&](Body &b, ValueRange in) {
    Value value = in[0];
    if (in.size() == 2)
      value = b.div(value, in[1]);
    return b.div(value, tau ? tau : b.f32(constantTau));
  });
}

Replacements mlir::moe::decompose(CosineLogitsOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  int64_t e = domain.getNumDims() - 3, c = e + 1, d = e + 2;
  SmallVector<int64_t> n = getLeadingDims(e);
  int64_t feature = op.getOmega() ? c : d;

  // x = omega h, then x / max(|x|, eps)
  Access x = domain.at(op.getH(), join(n, {d}));
  if (op.getOmega())
    x = domain.contract(x, domain.at(op.getOmega(), {c, d}), join(n, {c}));
  if (op.getNormToken())
    x = domain.map({x, buildNorms(domain, x, op.getEps().convertToDouble())},
                   domain.empty(x.dims, builder.getF32Type()),
                   [](Body &b, ValueRange in) { return b.div(in[0], in[1]); });

  // z_ne = x_n . emb_e / (max(|emb_e|, eps) tau)
  Access emb = domain.at(op.getEmb(), {e, feature});
  Access z = domain.fill(domain.at(op.getOuts()[0], join(n, {e})),
                         domain.getBody().f32(0.0));
  z = domain.contract(x, emb, z);
  return SmallVector<Value>{scaleByExpert(domain, op, emb, z).value};
}

//===----------------------------------------------------------------------===//
// HyperRouterOp
//===----------------------------------------------------------------------===//

/// A new tensor over `dims` with the values of `vector`.
static Access copyOf(Domain &domain, Access vector) {
  return domain.map({vector},
                    domain.empty(vector.dims, domain.getBody().getF32Type()),
                    [](Body &b, ValueRange in) { return in[0]; });
}

Replacements mlir::moe::decompose(HyperRouterOp op, OpBuilder &builder) {
  using namespace hyper;
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);

  // hidden_h = relu(b1_h + sum_c w1_hc e_c)
  Access hidden =
      domain.contract(domain.at(op.getW1(), {h, c}), domain.at(op.getE(), {c}),
                      copyOf(domain, domain.at(op.getB1(), {h})));
  hidden = domain.map({hidden}, hidden, [](Body &b, ValueRange in) {
    return b.maximum(in[0], b.f32(0.0));
  });
  // rows_g = b2_g + sum_h w2_gh hidden_h
  Access rows = domain.contract(domain.at(op.getW2(), {g, h}), hidden,
                                copyOf(domain, domain.at(op.getB2(), {g})));

  // weight_ed = rows[e (d + 1) + d], bias_e = rows[e (d + 1) + d_max]
  Value width = domain.getSizeValue(d);
  auto read = [&](Body &b, Value column) -> Value {
    Value stride = b.add(width, b.constantInt(b.getIndexType(), 1));
    Value row = b.add(b.mul(b.iteration(e), stride), column);
    return tensor::ExtractOp::create(b, rows.value, row);
  };
  Access weight =
      domain.map({}, domain.at(op.getOuts()[0], {e, d}),
                 [&](Body &b, ValueRange) { return read(b, b.iteration(d)); });
  Access bias = domain.map({}, domain.at(op.getOuts()[1], {e}),
                           [&](Body &b, ValueRange) { return read(b, width); });
  return SmallVector<Value>{weight.value, bias.value};
}

//===----------------------------------------------------------------------===//
// ACLogitsOp
//===----------------------------------------------------------------------===//

namespace {
/// The dims of ac_logits and what reads the previous routing.
struct Metric {
  Metric(OpBuilder &builder, ACLogitsOp op)
      : op(op), domain(builder, op), e(domain.getNumDims() - 4), l(e + 1),
        r(e + 2), d(e + 3), n(getLeadingDims(e)), nr(join(n, {r})),
        nd(join(n, {d})), index(domain.at(op.getPrevIdx(), nr)),
        numClusters(domain.getSizeValue(l)) {}

  /// Whether `expert` is one of the previous layer's.
  Value isRouted(Body &b, Value expert) {
    Value size = b.castInt(numClusters, expert.getType());
    return b.both(b.atMost(b.constantInt(expert.getType(), 0), expert),
                  b.less(expert, size));
  }
  /// m[expert, d], and of no matter which expert where that one is none.
  Value readWeight(Body &b, Value expert, Value routed) {
    Value row = b.select(routed, expert, b.constantInt(expert.getType(), 0));
    return tensor::ExtractOp::create(
        b, op.getM(),
        ValueRange{b.castInt(row, b.getIndexType()), b.iteration(d)});
  }

  ACLogitsOp op;
  Domain domain;
  int64_t e, l, r, d;
  SmallVector<int64_t> n, nr, nd;
  Access index;
  Value numClusters;
};
} // namespace

/// h_nd m[prev_idx_n, d], h where the token has no previous expert.
static Access scaleByOne(Metric &t) {
  return t.domain.map({t.domain.at(t.op.getH(), t.nd), t.index},
                      t.domain.empty(t.nd, t.domain.getBody().getF32Type()),
                      [&](Body &b, ValueRange in) {
                        Value routed = t.isRouted(b, in[1]);
                        Value weight = t.readWeight(b, in[1], routed);
                        return b.select(routed, b.mul(in[0], weight), in[0]);
                      });
}

/// h_nd sum_a gates_na m[prev_idx_na, d] / sum_a gates_na over the places that
/// have an expert, h where these gates are all 0.
static Access scaleByMix(Metric &t) {
  Type f32 = t.domain.getBody().getF32Type();
  Access shares =
      t.domain.map({t.domain.at(t.op.getPrevGates(), t.nr), t.index},
                   t.domain.empty(t.nr, f32), [&](Body &b, ValueRange in) {
                     return b.select(t.isRouted(b, in[1]), in[0], b.f32(0.0));
                   });
  Access total = t.domain.reduce(
      {shares}, t.domain.filled(t.n, 0.0f),
      [](Body &b, ValueRange in, Value acc) { return b.add(acc, in[0]); });
  Access alpha =
      t.domain.map({shares, total}, shares, [](Body &b, ValueRange in) {
        return divideOrZero(b, in[0], in[1]);
      });
  Access mixed = t.domain.reduce(
      {alpha, t.index}, t.domain.filled(t.nd, 0.0f),
      [&](Body &b, ValueRange in, Value acc) {
        // A place without an expert has alpha 0, but 0 times an infinite
        // weight would be NaN.
        Value routed = t.isRouted(b, in[1]);
        Value weight = t.readWeight(b, in[1], routed);
        return b.select(routed, b.add(acc, b.mul(in[0], weight)), acc);
      });
  return t.domain.map({t.domain.at(t.op.getH(), t.nd), mixed, total}, mixed,
                      [](Body &b, ValueRange in) {
                        Value isMixed = b.negate(b.equal(in[2], b.f32(0.0)));
                        return b.select(isMixed, b.mul(in[0], in[1]), in[0]);
                      });
}

Replacements mlir::moe::decompose(ACLogitsOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Metric t(builder, op);
  Domain &domain = t.domain;
  Access x = op.getPrevGates() ? scaleByMix(t) : scaleByOne(t);

  // z_ne = bias_e + sum_d x_nd emb_ed
  Access z = domain.at(op.getOuts()[0], join(t.n, {t.e}));
  if (op.getBias())
    z = domain.map({domain.at(op.getBias(), {t.e})}, z,
                   [](Body &b, ValueRange in) { return in[0]; });
  else
    z = domain.fill(z, domain.getBody().f32(0.0));
  z = domain.contract(x, domain.at(op.getEmb(), {t.e, t.d}), z);
  return SmallVector<Value>{z.value};
}
