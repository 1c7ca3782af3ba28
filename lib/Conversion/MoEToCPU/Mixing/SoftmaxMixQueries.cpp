//===- SoftmaxMixQueries.cpp - Queries whose lse are alike ----------------===//

#include "SoftmaxMixQueries.h"

using namespace mlir;
using namespace mlir::moe;

/// How far lse may be from their middle. An exponent as large as this is
/// rounded by 2e-6, and as much of a weight is lost.
static constexpr double kNear = 32.0;

ScaledQueries::ScaledQueries(Emitter &e, KernelBuffers &buffers,
                             Value paddedTokens, OpFoldResult numValues)
    : lse(buffers.allocate({paddedTokens})),
      delta(buffers.allocate({paddedTokens})),
      cotangents(buffers.allocate({paddedTokens, padToVectors(e, numValues)})),
      numValues(numValues), factors(buffers.allocate({paddedTokens})) {}

Value ScaledQueries::getCotangents(Emitter &e) const {
  SmallVector<OpFoldResult> offsets(2, e.getIndexAttr(0));
  SmallVector<OpFoldResult> sizes{e.dim(cotangents, 0), numValues};
  SmallVector<OpFoldResult> strides(2, e.getIndexAttr(1));
  return memref::SubViewOp::create(e, cotangents, offsets, sizes, strides);
}

static Value isEmpty(Emitter &e, Value lse) {
  return e.compare(arith::CmpFPredicate::OEQ, lse, e.negInfinity());
}

/// The middle of all lse; sets whether they are near to it.
Value ScaledQueries::findMiddle(Emitter &e, Value from) {
  Value numTokens = e.dim(from, 0), hidden = e.negInfinity();
  Values start{hidden, hidden, e.f32(0.0)};
  Values ends =
      e.loop(e.index(0), numTokens, e.width, start,
             [&](Value token, ValueRange old) -> Values {
               Value exists = e.firstLanes(e.sub(numTokens, token));
               Value values = e.loadFloats(from, {token}, exists, -kInfinity);
               // Queries without a key do not count.
               Value none = isEmpty(e, values);
               Value negated =
                   e.select(none, hidden, e.sub(e.f32(0.0), values));
               Value finite = e.select(none, e.f32(0.0), values);
               return {e.maxOrRhs(values, old[0]), e.maxOrRhs(negated, old[1]),
                       e.fma(finite, e.f32(0.0), old[2])};
             });
  Type f32 = e.getF32Type();
  Value highest = e.reduceMax(ends[0]);
  Value lowest = e.sub(e.constant(f32, 0.0), e.reduceMax(ends[1]));
  Value isNear = e.compare(arith::CmpFPredicate::OLE, e.sub(highest, lowest),
                           e.constant(f32, 2 * kNear));
  // A maximum may miss what is not a number; this sum is none then.
  Value areNumbers = e.compare(arith::CmpFPredicate::OEQ, e.reduceAdd(ends[2]),
                               e.constant(f32, 0.0));
  isShared = e.both(isNear, areNumbers);
  return e.mul(e.add(highest, lowest), e.constant(f32, 0.5));
}

void ScaledQueries::scaleRow(Emitter &e, const GradientRole &role, Value row) {
  Value values = role.rows.values;
  Value numTokens = e.dim(values, 0), size = e.dim(values, 1);
  Value token = e.minSigned(row, e.sub(numTokens, e.index(1)));
  Value isReal = e.both(e.compare(arith::CmpIPredicate::slt, row, numTokens),
                        role.isRowReal(token));
  Value factor = e.splat(e.load(factors, {row}));
  e.loop(e.index(0), size, e.width, [&](Value element) {
    Value mask = e.firstLanes(e.sub(size, element));
    Value value = e.mul(e.loadFloats(values, {token, element}, mask), factor);
    // That of a masked query may be anything.
    e.storeVector(e.select(isReal, value, e.f32(0.0)), cotangents,
                  {row, element});
  });
}

void ScaledQueries::fill(Emitter &e, const GradientRole &role, bool mayShare) {
  Value numTokens = e.dim(role.rows.values, 0), zero = e.index(0);
  Value middle = mayShare ? e.splat(findMiddle(e, role.getLse())) : Value();
  e.loop(zero, e.dim(lse, 0), e.width, [&](Value token) {
    Value exists =
        e.firstLanes(e.maxSigned(e.sub(numTokens, token), e.index(0)));
    Value own = e.loadFloats(role.getLse(), {token}, exists, -kInfinity);
    Value factor = e.f32(1.0), common = own;
    if (middle) {
      factor = e.select(isShared, e.exp(e.sub(middle, own)), factor);
      common = e.select(isShared, e.select(isEmpty(e, own), own, middle), own);
    }
    e.storeVector(common, lse, {token});
    e.storeVector(factor, factors, {token});
    e.storeVector(e.mul(e.loadFloats(role.getDelta(), {token}, exists), factor),
                  delta, {token});
  });
  e.loop(zero, e.dim(lse, 0), 1, [&](Value row) { scaleRow(e, role, row); });
}
