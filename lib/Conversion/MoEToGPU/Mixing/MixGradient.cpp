//===- MixGradient.cpp - What the gradient's kernels share ----------------===//

#include "MixGradient.h"
#include "MixEmitter.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

MixGradient::MixGradient(SoftmaxMixBackwardDqOp op)
    : op(op), ofQueries(true), lse(op.getLse()), delta(op.getDelta()),
      v(op.getV()), dmixed(op.getDmixed()), origin(op.getOrigin()),
      scale(op.getScale().convertToDouble()), gradient(op.getOut("dq")),
      total(op.getWithSums() ? op.getOut("sums") : Value()),
      dbias(op.getWithDbias() ? op.getOut("dbias") : Value()) {}

MixGradient::MixGradient(SoftmaxMixBackwardDkvOp op)
    : op(op), ofQueries(false), lse(op.getLse()), delta(op.getDelta()),
      v(op.getV()), dmixed(op.getDmixed()), origin(op.getOrigin()),
      scale(op.getScale().convertToDouble()), gradient(op.getOut("dk")),
      dv(op.getV() ? op.getOut("dv") : Value()),
      total(op.getWithSums() ? op.getOut("sums") : Value()) {}

void mlir::moe::storeBiasGradient(ThreadBuilder &b, Value dbias,
                                  SmallVector<Value, 4> place, Value exists,
                                  Value gradient) {
  Value zero = b.index(0), isFirst = b.boolean(true);
  for (int64_t dim = 0; dim < 2; ++dim)
    if (isBiasShared(dbias, dim)) {
      Value isZero = b.compare(CmpIPredicate::eq, place[dim], zero);
      isFirst = b.both(isFirst, isZero);
      place[dim] = zero;
    }
  b.ifThen(exists, [&] {
    b.ifThen(isFirst,
             [&] { memref::StoreOp::create(b, gradient, dbias, place); });
    b.ifThen(b.negate(isFirst), [&] {
      Value old = memref::LoadOp::create(b, dbias, place);
      memref::StoreOp::create(b, b.add(old, gradient), dbias, place);
    });
  });
}
