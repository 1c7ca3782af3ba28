//===- DecomposeSelection.cpp - The meaning of the selections -------------===//
//
// The order of the experts is total, so a selection needs no sort: the rank of
// an expert is the number of experts that come before it, the k-th choice is
// the expert of rank k, and each of the two is one reduction. Groups are
// chosen in the same way. The price is E^2 comparisons a token, which kernels
// do not pay; what it buys is that NaN, -inf and ties have no special case.
//
//===----------------------------------------------------------------------===//

#include "Domain.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"
#include "MoE/Dialect/MoE/IR/ChoiceOrder.h"
#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"

#include "mlir/Dialect/Math/IR/Math.h"
#include "llvm/ADT/STLExtras.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

namespace {
/// The dims of a selection, and the accesses that several steps read.
struct Selection {
  Selection(OpBuilder &builder, TopKRenormOp op)
      : op(op), domain(builder, op), e(domain.getNumDims() - 2), k(e + 1),
        n(llvm::to_vector(llvm::seq<int64_t>(0, e))), ne(join(n, {e})),
        nk(join(n, {k})), x(domain.at(op.getScores(), ne)),
        f32(builder.getF32Type()), i32(builder.getI32Type()),
        i1(builder.getI1Type()) {}

  TopKRenormOp op;
  Domain domain;
  int64_t e, k;
  SmallVector<int64_t> n, ne, nk;
  Access x;
  Type f32, i32, i1;
};
} // namespace

//===----------------------------------------------------------------------===//
// Scores
//===----------------------------------------------------------------------===//

static Access buildScores(Selection &t) {
  ScoreFunction function = t.op.getScoreFunction();
  Access s = t.domain.empty(t.ne, t.f32);
  if (isElementwise(function))
    return t.domain.map({t.x}, s, [&](Body &b, ValueRange in) {
      return buildScore(b, function, in[0]);
    });
  Softmax softmax = buildSoftmax(t.domain, t.x, t.n);
  return t.domain.map(
      {softmax.exps, softmax.sum}, s,
      [](Body &b, ValueRange in) { return divideOrZero(b, in[0], in[1]); });
}

/// ln s up to a constant of the row.
static Access buildLogScores(Selection &t) {
  ScoreFunction function = t.op.getScoreFunction();
  if (function == ScoreFunction::Softmax)
    return t.x;
  return t.domain.map({t.x}, t.domain.empty(t.ne, t.f32),
                      [&](Body &b, ValueRange in) {
                        return buildLogScore(b, function, in[0]);
                      });
}

//===----------------------------------------------------------------------===//
// Choice
//===----------------------------------------------------------------------===//

/// The group of the expert that the nest is at.
static Value groupOf(Body &b, int64_t expert, Value groupSize) {
  return b.div(b.iteration(expert), groupSize);
}

/// rank[row, candidate] = the number of `candidate`s of the row that come
/// before it, among those that `isCounted` admits. It sees `facts` of the other
/// one.
static Access buildRanks(
    Selection &t, Access values, int64_t candidate,
    function_ref<Value(Body &, int64_t other, ValueRange facts)> isCounted = {},
    ArrayRef<Access> facts = {}) {
  int64_t other = t.domain.addTwin(candidate);
  SmallVector<Access> ins{values, values};
  llvm::append_range(ins, facts);
  for (Access &in : MutableArrayRef(ins).drop_front())
    llvm::replace(in.dims, candidate, other);
  return t.domain.reduce(
      ins, t.domain.filled(values.dims, t.i32, 0),
      [&](Body &b, ValueRange in, Value acc) {
        Value counts = comesBefore(b, in[1], b.iteration(other), in[0],
                                   b.iteration(candidate));
        if (isCounted)
          counts = b.both(counts, isCounted(b, other, in.drop_front(2)));
        return b.add(acc, arith::ExtUIOp::create(b, t.i32, counts));
      });
}

/// The value of each group: its largest choice score, or the sum of its two
/// largest ones.
static Access buildGroupValues(Selection &t, Access c, int64_t group,
                               Value groupSize) {
  Access rankInGroup =
      buildRanks(t, c, t.e, [&](Body &b, int64_t other, ValueRange) {
        return b.equal(groupOf(b, t.e, groupSize),
                       groupOf(b, other, groupSize));
      });
  int64_t numSummed = t.op.getGroupScore() == GroupScore::Top2Sum ? 2 : 1;
  return t.domain.reduce(
      {c, rankInGroup}, t.domain.filled(join(t.n, {group}), 0.0f),
      [&](Body &b, ValueRange in, Value acc) {
        Value isSummed =
            b.both(b.equal(groupOf(b, t.e, groupSize), b.iteration(group)),
                   b.less(in[1], b.constantInt(t.i32, numSummed)));
        Value c = b.select(b.isNaN(in[0]), b.negInfinity(), in[0]);
        return b.select(isSummed, b.add(acc, c), acc);
      });
}

/// Whether an expert is of one of the topk_group best groups.
static Access buildKept(Selection &t, Access c) {
  Body &b = t.domain.getBody();
  int64_t group = t.domain.addDim(b.getIndexAttr(t.op.getNGroup()));
  Value groupSize =
      b.div(t.domain.getSizeValue(t.e), t.domain.getSizeValue(group));
  Access rank = buildRanks(t, buildGroupValues(t, c, group, groupSize), group);
  return t.domain.reduce(
      {rank}, t.domain.fill(t.domain.empty(t.ne, t.i1), b.boolean(false)),
      [&](Body &b, ValueRange in, Value acc) {
        Value isOfGroup =
            b.equal(groupOf(b, t.e, groupSize), b.iteration(group));
        Value isKept = b.less(in[0], b.constantInt(t.i32, t.op.getTopkGroup()));
        return b.either(acc, b.both(isOfGroup, isKept));
      });
}

/// The scores that order the experts: x itself, which does not saturate, or
/// the biased scores. Forced ids need no order.
static Access buildChoiceScores(Selection &t, Access s) {
  if (t.op.getForced())
    return t.x;
  Access c = isOrderedByGivenScores(t.op) ? t.x : s;
  if (t.op.getSelectBias())
    c = t.domain.map({c, t.domain.at(t.op.getSelectBias(), {t.e})},
                     t.domain.empty(t.ne, t.f32), [](Body &b, ValueRange in) {
                       return b.add(in[0], in[1]);
                     });
  return c;
}

/// The expert of each choice, before padding is taken out.
static Access buildChoices(Selection &t, Access c) {
  if (t.op.getForced())
    return t.domain.at(t.op.getForced(), t.nk);
  // choice_nk = sum_e [rank_ne = k] e, over the experts of the best groups
  Type type = getElementTypeOrSelf(t.op.getIndicesInit().getType());
  SmallVector<Access> kept;
  if (t.op.getNGroup() > 1)
    kept.push_back(buildKept(t, c));
  Access ranks = buildRanks(
      t, c, t.e,
      [](Body &b, int64_t, ValueRange kept) {
        return kept.empty() ? b.boolean(true) : kept[0];
      },
      kept);
  SmallVector<Access> ins{ranks};
  llvm::append_range(ins, kept);
  return t.domain.reduce(
      ins, t.domain.filled(t.nk, type, 0),
      [&](Body &b, ValueRange in, Value acc) {
        Value isChoice = b.equal(in[0], b.castInt(b.iteration(t.k), t.i32));
        if (!kept.empty())
          isChoice = b.both(isChoice, in[1]);
        return b.select(isChoice, b.castInt(b.iteration(t.e), type), acc);
      });
}

//===----------------------------------------------------------------------===//
// Gates
//===----------------------------------------------------------------------===//

/// values[n, choices[n, k]], and `none` for a choice that is no expert or has
/// value or choice score -inf.
static Access gatherChosen(Selection &t, Access values, Access c,
                           Access choices, Value none) {
  return t.domain.reduce(
      {values, c, choices}, t.domain.fill(t.domain.empty(t.nk, t.f32), none),
      [&](Body &b, ValueRange in, Value acc) {
        Value isChoice = b.both(
            b.equal(in[2], b.castInt(b.iteration(t.e), in[2].getType())),
            b.negate(b.either(b.isNegInfinity(in[0]), b.isNegInfinity(in[1]))));
        return b.select(isChoice, in[0], acc);
      });
}

/// The gates of the choices before route_scale.
static Access buildGates(Selection &t, Access s, Access c, Access choices) {
  Body &outer = t.domain.getBody();
  Access gates = t.domain.empty(t.nk, t.f32);
  double eps = t.op.getEps().convertToDouble();

  // v / sum v = softmax over the chosen of ln s
  if (t.op.getRenorm() && eps == 0.0 && hasLogScore(t.op.getScoreFunction())) {
    Access logs =
        gatherChosen(t, buildLogScores(t), c, choices, outer.negInfinity());
    Softmax softmax = buildSoftmax(t.domain, logs, t.n);
    return t.domain.map(
        {softmax.exps, softmax.sum}, gates,
        [](Body &b, ValueRange in) { return divideOrZero(b, in[0], in[1]); });
  }

  Access v = gatherChosen(t, s, c, choices, outer.f32(0.0));
  if (!t.op.getRenorm())
    return v;
  Access sum = t.domain.reduce(
      {v}, t.domain.filled(t.n, 0.0f),
      [](Body &b, ValueRange in, Value acc) { return b.add(acc, in[0]); });
  return t.domain.map({v, sum}, gates, [&](Body &b, ValueRange in) {
    return divideOrZero(b, in[0], b.add(in[1], b.f32(eps)));
  });
}

/// Tokens whose gates are NaN: a NaN among the scores shows in all gates of
/// the row, whether it is chosen or not (E3).
static Access buildPoisoned(Selection &t) {
  Access none = t.domain.fill(t.domain.empty(t.n, t.i1),
                              t.domain.getBody().boolean(false));
  return t.domain.reduce({t.x}, none, [](Body &b, ValueRange in, Value acc) {
    return b.either(acc, b.isNaN(in[0]));
  });
}

/// Tokens that are real: not masked, and before num_valid in the order of
/// their flat positions.
static Access buildReal(Selection &t) {
  SmallVector<Access> ins;
  if (t.op.getMask())
    ins.push_back(t.domain.at(t.op.getMask(), t.n));
  SmallVector<Value> sizes = llvm::map_to_vector(
      t.n, [&](int64_t dim) { return t.domain.getSizeValue(dim); });
  return t.domain.map(
      ins, t.domain.empty(t.n, t.i1), [&](Body &b, ValueRange in) -> Value {
        Value real = in.empty() ? b.boolean(true) : in[0];
        if (!t.op.getNumValid())
          return real;
        Value flat = b.constantInt(b.getIndexType(), 0);
        for (auto [dim, size] : llvm::zip_equal(t.n, sizes))
          flat = b.add(b.mul(flat, size), b.iteration(dim));
        Value numValid = b.castInt(t.op.getNumValid(), b.getIndexType());
        return b.both(real, b.less(flat, numValid));
      });
}

Operation *TopKRenormOp::makeExplicit(OpBuilder &builder) {
  if (!getNumValid() || !hasPureTensorSemantics())
    return *this;
  // A tile does not know where in the problem it lies: num_valid becomes part
  // of the mask, which is cut like any operand.
  Selection t(builder, *this);
  Access real = buildReal(t);
  auto explicitOp = cast<TopKRenormOp>(builder.clone(**this));
  explicitOp.getMaskMutable().assign(real.value);
  explicitOp.getNumValidMutable().clear();
  return explicitOp;
}

/// Whether a forced id names an expert.
static Value isExpert(Body &b, Value id, Value numExperts) {
  Value bound = b.castInt(numExperts, id.getType());
  return b.both(b.atMost(b.constantInt(id.getType(), 0), id),
                b.less(id, bound));
}

/// An id in the type of the indices; -1 where that does not hold it: cut off,
/// it could name an expert.
static Value buildIndex(Body &b, Value id, Type type) {
  Value index = b.castInt(id, type);
  if (id.getType().getIntOrFloatBitWidth() <= type.getIntOrFloatBitWidth())
    return index;
  Value fits = b.equal(b.castInt(index, id.getType()), id);
  return b.select(fits, index, b.constantInt(type, -1));
}

Replacements mlir::moe::decompose(TopKRenormOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Selection t(builder, op);
  Access s = buildScores(t);
  Access c = buildChoiceScores(t, s);
  Access choices = buildChoices(t, c);
  Access shares = buildGates(t, s, c, choices);
  Access poisoned = buildPoisoned(t);
  Access real = buildReal(t);

  double scale = op.getRouteScale().convertToDouble();
  Value numExperts = t.domain.getSizeValue(t.e);
  Access gates = t.domain.map(
      {shares, poisoned, real, choices}, t.domain.at(op.getGatesInit(), t.nk),
      [&](Body &b, ValueRange in) {
        Value gate = b.mul(in[0], b.f32(scale));
        Value nan = b.f32(std::numeric_limits<double>::quiet_NaN());
        gate = b.select(in[1], nan, gate);
        // A place that is forced to be none has gate 0 in any row, whatever the
        // sum of the gates is.
        Value hasGate = in[2];
        if (op.getForced())
          hasGate = b.both(hasGate, isExpert(b, in[3], numExperts));
        return b.select(hasGate, gate, b.f32(0.0));
      });
  Type type = getElementTypeOrSelf(op.getIndicesInit().getType());
  Access indices =
      t.domain.map({choices, real}, t.domain.at(op.getIndicesInit(), t.nk),
                   [&](Body &b, ValueRange in) {
                     Value none = b.constantInt(type, -1);
                     return b.select(in[1], buildIndex(b, in[0], type), none);
                   });
  return SmallVector<Value>{gates.value, indices.value};
}

//===----------------------------------------------------------------------===//
// ThresholdRenormOp
//===----------------------------------------------------------------------===//

/// Whether any expert of the row holds for `test`.
static Access buildAny(Domain &domain, Access x, ArrayRef<int64_t> row,
                       function_ref<Value(Body &, Value)> test) {
  return domain.reduce({x}, domain.filled(row, false),
                       [&](Body &b, ValueRange in, Value acc) {
                         return b.either(acc, test(b, in[0]));
                       });
}

/// The first expert of the row in E1's order, index `[n]`. A row of NaN alone
/// gives the first.
static Access buildBest(Domain &domain, Access p, ArrayRef<int64_t> row,
                        int64_t e) {
  Body &outer = domain.getBody();
  Access max = domain.reduce(
      {p},
      domain.fill(domain.empty(row, outer.getF32Type()), outer.negInfinity()),
      [](Body &b, ValueRange in, Value acc) {
        // False for NaN, which so never becomes the maximum.
        return b.select(b.less(acc, in[0]), in[0], acc);
      });
  Type index = outer.getIndexType();
  Access none = domain.fill(domain.empty(row, index), domain.getSizeValue(e));
  Access first =
      domain.reduce({p, max}, none, [&](Body &b, ValueRange in, Value acc) {
        Value isBest =
            b.both(b.equal(in[0], in[1]), b.less(b.iteration(e), acc));
        return b.select(isBest, b.iteration(e), acc);
      });
  Value size = domain.getSizeValue(e);
  return domain.map(
      {first}, domain.empty(row, index), [&](Body &b, ValueRange in) {
        return b.select(b.equal(in[0], size), b.constantInt(index, 0), in[0]);
      });
}

Replacements mlir::moe::decompose(ThresholdRenormOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Type f32 = builder.getF32Type(), i1 = builder.getI1Type(),
       i32 = builder.getI32Type();
  int64_t e = domain.getNumDims() - 1;
  SmallVector<int64_t> n = llvm::to_vector(llvm::seq<int64_t>(0, e));
  SmallVector<int64_t> ne = join(n, {e});
  Access p = domain.at(op.getP(), ne);

  // selected = p > theta, or the best expert where there is none (E20)
  double thetaValue = op.getTheta().convertToDouble();
  auto isAbove = [&](Body &b, Value value) {
    Value theta = op.getThetaValue() ? op.getThetaValue() : b.f32(thetaValue);
    return b.less(theta, value);
  };
  Access selected = domain.map(
      {p, buildAny(domain, p, n, isAbove), buildBest(domain, p, n, e)},
      domain.empty(ne, i1), [&](Body &b, ValueRange in) {
        return b.select(in[1], isAbove(b, in[0]),
                        b.equal(b.iteration(e), in[2]));
      });

  // gates = p on the selected, by their sum
  Access weights = domain.map(
      {p, selected}, domain.empty(ne, f32), [](Body &b, ValueRange in) {
        // -inf is outside of the support (E5).
        Value counts = b.both(in[1], b.negate(b.isNegInfinity(in[0])));
        return b.select(counts, in[0], b.f32(0.0));
      });
  Access sum = domain.reduce(
      {weights}, domain.filled(n, 0.0f),
      [](Body &b, ValueRange in, Value acc) { return b.add(acc, in[0]); });
  Access poisoned = buildAny(
      domain, p, n, [](Body &b, Value value) { return b.isNaN(value); });
  SmallVector<Access> ins{weights, sum, poisoned};
  if (op.getMask())
    ins.push_back(domain.at(op.getMask(), n));
  Access gates = domain.map(
      ins, domain.at(op.getOuts()[0], ne), [&](Body &b, ValueRange in) {
        Value gate = op.getRenorm() ? divideOrZero(b, in[0], in[1]) : in[0];
        Value nan = b.f32(std::numeric_limits<double>::quiet_NaN());
        gate = b.select(in[2], nan, gate);
        return op.getMask() ? b.select(in[3], gate, b.f32(0.0)) : gate;
      });

  ins = {selected};
  if (op.getMask())
    ins.push_back(domain.at(op.getMask(), n));
  Access count = domain.fill(domain.at(op.getOuts()[1], n),
                             domain.getBody().constantInt(i32, 0));
  count = domain.reduce(ins, count, [&](Body &b, ValueRange in, Value acc) {
    Value counts = op.getMask() ? b.both(in[0], in[1]) : in[0];
    return b.add(acc, arith::ExtUIOp::create(b, i32, counts));
  });
  return SmallVector<Value>{gates.value, count.value};
}

//===----------------------------------------------------------------------===//
// DensifyOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(DensifyOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  int64_t e = domain.getNumDims() - 2, k = e + 1;
  SmallVector<int64_t> n = llvm::to_vector(llvm::seq<int64_t>(0, e));
  Access dense = domain.fill(domain.at(op.getOuts()[0], join(n, {e})),
                             domain.getBody().f32(0.0));
  dense =
      domain.reduce({domain.at(op.getGates(), join(n, {k})),
                     domain.at(op.getIndices(), join(n, {k}))},
                    dense, [&](Body &b, ValueRange in, Value acc) {
                      Value isHere = b.equal(
                          in[1], b.castInt(b.iteration(e), in[1].getType()));
                      return b.select(isHere, b.add(acc, in[0]), acc);
                    });
  return SmallVector<Value>{dense.value};
}

//===----------------------------------------------------------------------===//
// MakeFiniteOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(MakeFiniteOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  int64_t e = domain.getNumDims() - 1;
  SmallVector<int64_t> ne = llvm::to_vector(llvm::seq<int64_t>(0, e + 1));
  SmallVector<int64_t> row;
  if (op.getScope() == FiniteScope::Row)
    row.append(ne.begin(), ne.end() - 1);
  auto isFinite = [](Body &b, Value x) {
    // x - x is 0 for a finite x and NaN otherwise.
    return b.equal(b.sub(x, x), b.f32(0.0));
  };

  Access scores = domain.at(op.getScores(), ne);
  Body &outer = domain.getBody();
  Value inf = outer.f32(std::numeric_limits<double>::infinity());
  Access least = domain.reduce(
      {scores}, domain.fill(domain.empty(row, outer.getF32Type()), inf),
      [&](Body &b, ValueRange in, Value acc) {
        Value isLess = b.both(isFinite(b, in[0]), b.less(in[0], acc));
        return b.select(isLess, in[0], acc);
      });
  Access finite =
      domain.map({scores, least}, domain.at(op.getOuts()[0], ne),
                 [&](Body &b, ValueRange in) {
                   Value replacement =
                       b.select(isFinite(b, in[1]), in[1], b.f32(0.0));
                   return b.select(isFinite(b, in[0]), in[0], replacement);
                 });
  return SmallVector<Value>{finite.value};
}
