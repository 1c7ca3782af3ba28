//===- DecomposeDispatch.cpp - The meaning of dispatch and combine --------===//
//
// dispatch is said without a sort: the row of an assignment inside its expert
// is the number of kept assignments to the same expert that come before it.
// That costs (N k)^2 comparisons, which kernels do not pay; what it buys is
// that order, ties and dropping are one formula each.
//
//===----------------------------------------------------------------------===//

#include "Domain.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"
#include "MoE/Dialect/MoE/IR/DispatchCapacity.h"

#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// DispatchOp
//===----------------------------------------------------------------------===//

namespace {
/// Decomposes one dispatch. `twinN`, `twinK` number the other assignment where
/// two are compared.
class DispatchMeaning {
public:
  DispatchMeaning(OpBuilder &builder, DispatchOp op)
      : op(op), domain(builder, op), i32(builder.getI32Type()),
        i1(builder.getI1Type()), twinN(domain.addTwin(dispatch::n)),
        twinK(domain.addTwin(dispatch::k)) {}

  SmallVector<Value> build();

private:
  Access buildExperts();
  Value buildCapacity();
  Value tokenComesBefore(Body &b, ValueRange priorities);
  Access countBefore(Access experts, ArrayRef<Access> ins,
                     function_ref<Value(Body &, ValueRange)> isCounted);
  Access buildRanks(Access experts, Access *kept);
  Access buildKeptByGate(Access experts, Value capacity);
  Access buildPaddedCounts(Access counts);
  Access clear(Value init, int64_t dim);
  Value castTo(Value init, Access numbers, int64_t dim);

  /// The values of two assignments, or of two tokens, that are compared.
  SmallVector<Access> pairOf(Value value) {
    using namespace dispatch;
    if (cast<ShapedType>(value.getType()).getRank() == 1)
      return {domain.at(value, {n}), domain.at(value, {twinN})};
    return {domain.at(value, {n, k}), domain.at(value, {twinN, twinK})};
  }

  DispatchOp op;
  Domain domain;
  Type i32, i1;
  int64_t twinN, twinK;
};
} // namespace

/// The physical expert of each assignment, -1 for none: masked, out of range,
/// or on another shard.
Access DispatchMeaning::buildExperts() {
  using namespace dispatch;
  Access experts = domain.at(op.getIndices(), {n, k});
  if (Value map = op.getExpertMap()) {
    Type type = experts.getElementType();
    experts = domain.reduce(
        {experts, domain.at(map, {l})},
        domain.filled({n, k}, getElementTypeOrSelf(map.getType()), -1),
        [&](Body &b, ValueRange in, Value acc) {
          Value isLogical = b.equal(in[0], b.castInt(b.iteration(l), type));
          return b.select(isLogical, in[1], acc);
        });
  }
  SmallVector<Access> ins{experts};
  if (op.getMask())
    ins.push_back(domain.at(op.getMask(), {n}));
  Type type = experts.getElementType();
  Value numExperts = domain.getBody().castInt(domain.getSizeValue(e), type);
  return domain.map(
      ins, domain.empty({n, k}, i32), [&](Body &b, ValueRange in) {
        Value isExpert = b.both(b.atMost(b.constantInt(type, 0), in[0]),
                                b.less(in[0], numExperts));
        if (in.size() == 2)
          isExpert = b.both(isExpert, in[1]);
        return b.select(isExpert, b.castInt(in[0], i32),
                        b.constantInt(i32, -1));
      });
}

/// The rows that an expert may have, i32, or null without a bound.
Value DispatchMeaning::buildCapacity() {
  Body &b = domain.getBody();
  if (op.getCapacity())
    return op.getCapacity();
  Value bound = mlir::moe::buildCapacity(
      b, op, domain.getSizeValue(dispatch::n), domain.getSizeValue(dispatch::e),
      domain.getSizeValue(dispatch::k));
  return bound ? b.castInt(bound, i32) : Value();
}

/// Whether the other token comes first; `priorities` are this and the other's.
Value DispatchMeaning::tokenComesBefore(Body &b, ValueRange priorities) {
  Value self = b.iteration(dispatch::n), other = b.iteration(twinN);
  if (priorities.empty())
    return b.less(other, self);
  return comesBefore(b, priorities[1], other, priorities[0], self);
}

/// For each assignment the number of others to the same expert that
/// `isCounted` admits. It sees `ins` behind the two experts.
Access DispatchMeaning::countBefore(
    Access experts, ArrayRef<Access> ins,
    function_ref<Value(Body &, ValueRange)> isCounted) {
  using namespace dispatch;
  SmallVector<Access> all = pairOf(experts.value);
  llvm::append_range(all, ins);
  return domain.reduce(
      all, domain.filled({n, k}, i32, 0),
      [&](Body &b, ValueRange in, Value acc) {
        Value counted =
            b.both(b.equal(in[0], in[1]), isCounted(b, in.drop_front(2)));
        return b.add(acc, arith::ExtUIOp::create(b, i32, counted));
      });
}

/// The assignments that are among the `capacity` ones of their expert with the
/// highest gates, equal ones by order.
Access DispatchMeaning::buildKeptByGate(Access experts, Value capacity) {
  using namespace dispatch;
  Value numTokens = domain.getSizeValue(n);
  Access standing = countBefore(
      experts, pairOf(op.getGates()), [&](Body &b, ValueRange gates) {
        auto position = [&](int64_t choice, int64_t token) {
          return b.add(b.mul(b.iteration(choice), numTokens),
                       b.iteration(token));
        };
        return comesBefore(b, gates[1], position(twinK, twinN), gates[0],
                           position(k, n));
      });
  return domain.map(
      {standing}, domain.empty({n, k}, i1),
      [&](Body &b, ValueRange in) { return b.less(in[0], capacity); });
}

/// The number of assignments to the same expert that come before each one, of
/// those in `kept` where it is given.
Access DispatchMeaning::buildRanks(Access experts, Access *kept) {
  SmallVector<Access> ins;
  if (op.getPriority())
    ins = pairOf(op.getPriority());
  size_t numPriorities = ins.size();
  if (kept)
    ins.push_back(domain.at(kept->value, {twinN, twinK}));
  return countBefore(experts, ins, [&](Body &b, ValueRange in) {
    Value self = b.iteration(dispatch::k), other = b.iteration(twinK);
    Value before =
        b.either(b.less(other, self),
                 b.both(b.equal(other, self),
                        tokenComesBefore(b, in.take_front(numPriorities))));
    return kept ? b.both(before, in.back()) : before;
  });
}

/// counts rounded up to the alignment.
Access DispatchMeaning::buildPaddedCounts(Access counts) {
  if (op.getAlignment() == 1)
    return counts;
  return domain.map(
      {counts}, domain.empty({dispatch::e}, i32), [&](Body &b, ValueRange in) {
        Value block = b.constantInt(i32, op.getAlignment());
        Value blocks = arith::CeilDivUIOp::create(b, in[0], block);
        return b.mul(blocks, block);
      });
}

/// Zeros of i32 in place of `init`, if it can hold them.
Access DispatchMeaning::clear(Value init, int64_t dim) {
  if (getElementTypeOrSelf(init.getType()) != i32)
    return domain.filled({dim}, i32, 0);
  return domain.fill(domain.at(init, {dim}),
                     domain.getBody().constantInt(i32, 0));
}

/// Numbers of i32 as `init` holds them.
Value DispatchMeaning::castTo(Value init, Access numbers, int64_t dim) {
  Type type = getElementTypeOrSelf(init.getType());
  if (type == i32)
    return numbers.value;
  return domain
      .map({numbers}, domain.at(init, {dim}),
           [&](Body &b, ValueRange in) { return b.castInt(in[0], type); })
      .value;
}

SmallVector<Value> DispatchMeaning::build() {
  using namespace dispatch;
  Access experts = buildExperts();
  Value capacity = buildCapacity();
  std::optional<Access> byGate;
  if (op.getDrop() == DropRule::Probs && capacity)
    byGate = buildKeptByGate(experts, capacity);
  Access rank = buildRanks(experts, byGate ? &*byGate : nullptr);

  // kept_nk = the expert exists and has room
  SmallVector<Access> ins{experts, rank};
  if (byGate)
    ins.push_back(*byGate);
  Access kept =
      domain.map(ins, domain.empty({n, k}, i1), [&](Body &b, ValueRange in) {
        Value isKept = b.atMost(b.constantInt(i32, 0), in[0]);
        if (byGate)
          return b.both(isKept, in[2]);
        return capacity ? b.both(isKept, b.less(in[1], capacity)) : isKept;
      });

  // counts_e = sum_nk [expert_nk = e and kept_nk]
  Access counts = clear(op.getCountsInit(), e);
  counts = domain.reduce(
      {experts, kept}, counts, [&](Body &b, ValueRange in, Value acc) {
        Value isOfExpert =
            b.both(b.equal(in[0], b.castInt(b.iteration(e), i32)), in[1]);
        return b.add(acc, arith::ExtUIOp::create(b, i32, isOfExpert));
      });

  // offsets_b = sum_{e < b} padded_e
  Access padded = buildPaddedCounts(counts);
  Access offsets = clear(op.getOffsetsInit(), b);
  offsets = domain.reduce(
      {padded}, offsets, [&](Body &body, ValueRange in, Value acc) {
        return body.select(body.less(body.iteration(e), body.iteration(b)),
                           body.add(acc, in[0]), acc);
      });

  // slots_nk = rank_nk + sum_{e < expert_nk} padded_e, -1 where dropped
  Type type = getElementTypeOrSelf(op.getSlotsInit().getType());
  Access row =
      domain.reduce({experts, padded, rank},
                    domain.map({rank}, domain.empty({n, k}, i32),
                               [](Body &, ValueRange in) { return in[0]; }),
                    [&](Body &b, ValueRange in, Value acc) {
                      Value isBefore =
                          b.less(b.castInt(b.iteration(e), i32), in[0]);
                      return b.select(isBefore, b.add(acc, in[1]), acc);
                    });
  Access slots = domain.map({row, kept}, domain.at(op.getSlotsInit(), {n, k}),
                            [&](Body &b, ValueRange in) {
                              return b.select(in[1], b.castInt(in[0], type),
                                              b.constantInt(type, -1));
                            });
  return {slots.value, castTo(op.getOffsetsInit(), offsets, b),
          castTo(op.getCountsInit(), counts, e)};
}

Replacements mlir::moe::decompose(DispatchOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  return DispatchMeaning(builder, op).build();
}

//===----------------------------------------------------------------------===//
// CombineOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(CombineOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  int64_t d = domain.getNumDims() - 3, k = d + 1, s = d + 2;
  SmallVector<int64_t> n = llvm::to_vector(llvm::seq<int64_t>(0, d));
  Value numRows = domain.getSizeValue(s);

  Access sum = domain.filled(join(n, {d}), 0.0f);
  if (op.getShared())
    sum = domain.map({domain.at(op.getShared(), join(n, {d}))}, sum,
                     [](Body &, ValueRange in) { return in[0]; });
  // sum_nd += gates_nk expert_out[slots_nk, d]
  sum = domain.reduce(
      {domain.at(op.getSlots(), join(n, {k})),
       domain.at(op.getGates(), join(n, {k}))},
      sum, [&](Body &b, ValueRange in, Value acc) {
        Value slot = b.castInt(in[0], b.getIndexType());
        Value zero = b.constantInt(b.getIndexType(), 0);
        Value isRow = b.both(b.atMost(zero, slot), b.less(slot, numRows));
        Value column = b.iteration(d);
        // No row is read where there is none, not even one that is not used.
        auto read = scf::IfOp::create(
            b, isRow,
            [&](OpBuilder &nested, Location loc) {
              Body inner(nested, loc);
              Value row = tensor::ExtractOp::create(inner, op.getExpertOut(),
                                                    ValueRange{slot, column});
              if (row.getType() != inner.getF32Type())
                row = arith::ExtFOp::create(inner, inner.getF32Type(), row);
              scf::YieldOp::create(inner,
                                   inner.add(acc, inner.mul(in[1], row)));
            },
            [&](OpBuilder &nested, Location loc) {
              scf::YieldOp::create(nested, loc, acc);
            });
        return read.getResult(0);
      });

  Type type = getElementTypeOrSelf(op.getOuts()[0].getType());
  Access y = domain.map({sum}, domain.at(op.getOuts()[0], join(n, {d})),
                        [&](Body &b, ValueRange in) -> Value {
                          return type.isF32()
                                     ? in[0]
                                     : arith::TruncFOp::create(b, type, in[0]);
                        });
  return SmallVector<Value>{y.value};
}

//===----------------------------------------------------------------------===//
// SoftDispatchOp
//===----------------------------------------------------------------------===//

/// 1 / max(|x|, eps) over the dims that `row` lacks.
static Access buildInverseNorm(Domain &domain, Access x, ArrayRef<int64_t> row,
                               double eps) {
  Access squares = domain.contract(x, x, row);
  return domain.map(
      {squares}, domain.empty(row, domain.getBody().getF32Type()),
      [&](Body &b, ValueRange in) {
        return b.div(b.f32(1.0),
                     b.maximum(math::SqrtOp::create(b, in[0]), b.f32(eps)));
      });
}

/// exps / sum of a softmax, into `out`.
static Access buildShares(Domain &domain, Softmax softmax, Access out) {
  return domain.map(
      {softmax.exps, softmax.sum}, out,
      [](Body &b, ValueRange in) { return divideOrZero(b, in[0], in[1]); });
}

Replacements mlir::moe::decompose(SoftDispatchOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  Domain domain(builder, op);
  Body &outer = domain.getBody();
  Type f32 = outer.getF32Type();
  int64_t n = domain.getNumDims() - 4, e = n + 1, p = n + 2, d = n + 3;
  SmallVector<int64_t> batch = llvm::to_vector(llvm::seq<int64_t>(0, n));
  SmallVector<int64_t> bn = join(batch, {n}), bnd = join(bn, {d});
  double epsValue = op.getEps().convertToDouble();

  // x^ = metric x / max(|x|, eps), 0 for a masked token whatever it holds
  Access x = domain.at(op.getX(), bnd);
  SmallVector<Access> ins{x, buildInverseNorm(domain, x, bn, epsValue)};
  if (op.getMetric())
    ins.push_back(domain.at(op.getMetric(), bnd));
  if (op.getMask())
    ins.push_back(domain.at(op.getMask(), bn));
  Access token =
      domain.map(ins, domain.empty(bnd, f32), [&](Body &b, ValueRange in) {
        Value unit = b.mul(in[0], in[1]);
        if (op.getMetric())
          unit = b.mul(unit, in[2]);
        return op.getMask() ? b.select(in.back(), unit, b.f32(0.0)) : unit;
      });

  // phi^ = scale phi / max(|phi|, eps)
  Access phi = domain.at(op.getPhi(), {d, e, p});
  double scaleValue = op.getScale().convertToDouble();
  Access slot =
      domain.map({phi, buildInverseNorm(domain, phi, {e, p}, epsValue)},
                 domain.empty({d, e, p}, f32), [&](Body &b, ValueRange in) {
                   Value scale = op.getScaleValue() ? op.getScaleValue()
                                                    : b.f32(scaleValue);
                   return b.mul(b.mul(in[0], in[1]), scale);
                 });

  // l_nep = sum_d x^_nd phi^_dep, -inf for a masked token
  Access logits = domain.contract(token, slot, join(bn, {e, p}));
  if (op.getMask())
    logits =
        domain.map({logits, domain.at(op.getMask(), bn)},
                   domain.empty(logits.dims, f32), [](Body &b, ValueRange in) {
                     return b.select(in[1], in[0], b.negInfinity());
                   });

  Access toSlots =
      buildShares(domain, buildSoftmax(domain, logits, join(batch, {e, p})),
                  domain.at(op.getOuts()[0], logits.dims));
  Access toTokens = buildShares(domain, buildSoftmax(domain, logits, bn),
                                domain.at(op.getOuts()[1], logits.dims));
  return SmallVector<Value>{toSlots.value, toTokens.value};
}
