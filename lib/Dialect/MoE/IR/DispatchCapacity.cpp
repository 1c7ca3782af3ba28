//===- DispatchCapacity.cpp - The bound on an expert's rows ---------------===//

#include "MoE/Dialect/MoE/IR/DispatchCapacity.h"

#include "mlir/Dialect/Arith/IR/Arith.h"

using namespace mlir;
using namespace mlir::moe;

Value mlir::moe::buildCapacity(ArithmeticBuilder &b, DispatchOp op, Value n,
                               Value e, Value k) {
  std::optional<APFloat> factor = op.getCapacityFactor();
  if (!factor)
    return {};
  Type f64 = b.getF64Type(), i64 = b.getI64Type();
  Value share = arith::CeilDivUIOp::create(b, n, e);
  Value wide = arith::SIToFPOp::create(b, f64, b.castInt(share, i64));
  Value scaled = b.mul(wide, b.constant(f64, factor->convertToDouble()));
  // From n on nothing is dropped; a larger product may be no integer of 64
  // bits.
  Value most = arith::SIToFPOp::create(b, f64, b.castInt(n, i64));
  Value bounded = arith::MinimumFOp::create(b, scaled, most);
  Value rows = arith::FPToSIOp::create(b, i64, bounded);
  return b.mul(k, b.castInt(rows, b.getIndexType()));
}
