//===- ArithmeticBuilder.cpp - Arithmetic by its meaning ------------------===//

#include "MoE/Dialect/MoE/Utils/ArithmeticBuilder.h"

#include "mlir/Dialect/Math/IR/Math.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Types and constants
//===----------------------------------------------------------------------===//

/// `element` with the shape that `type` has.
static Type withShapeOf(Type type, Type element) {
  if (auto vector = dyn_cast<VectorType>(type))
    return vector.clone(element);
  return element;
}

static Value splat(ArithmeticBuilder &b, Type type, TypedAttr value) {
  if (auto vector = dyn_cast<VectorType>(type))
    value = DenseElementsAttr::get(vector, value);
  return arith::ConstantOp::create(b, value);
}

Type ArithmeticBuilder::lanesOf(Type element) {
  return width == 0 ? element : VectorType::get({width}, element);
}

Value ArithmeticBuilder::constant(Type type, double value) {
  return splat(*this, type, getFloatAttr(getElementTypeOrSelf(type), value));
}

Value ArithmeticBuilder::constantInt(Type type, int64_t value) {
  Type element = getElementTypeOrSelf(type);
  if (element.isIndex())
    return splat(*this, type, getIndexAttr(value));
  APInt bits(element.getIntOrFloatBitWidth(), value, /*isSigned=*/true,
             /*implicitTrunc=*/true);
  return splat(*this, type, IntegerAttr::get(element, bits));
}

Value ArithmeticBuilder::index(int64_t value) {
  return arith::ConstantIndexOp::create(*this, value);
}

Value ArithmeticBuilder::infinity() {
  return f32(std::numeric_limits<double>::infinity());
}

Value ArithmeticBuilder::negInfinity() {
  return f32(-std::numeric_limits<double>::infinity());
}

Value ArithmeticBuilder::nan() {
  return f32(std::numeric_limits<double>::quiet_NaN());
}

//===----------------------------------------------------------------------===//
// Floats or integers
//===----------------------------------------------------------------------===//

Value ArithmeticBuilder::add(Value lhs, Value rhs) {
  if (isFloat(lhs))
    return arith::AddFOp::create(*this, lhs, rhs);
  return arith::AddIOp::create(*this, lhs, rhs);
}

Value ArithmeticBuilder::sub(Value lhs, Value rhs) {
  if (isFloat(lhs))
    return arith::SubFOp::create(*this, lhs, rhs);
  return arith::SubIOp::create(*this, lhs, rhs);
}

Value ArithmeticBuilder::mul(Value lhs, Value rhs) {
  if (isFloat(lhs))
    return arith::MulFOp::create(*this, lhs, rhs);
  return arith::MulIOp::create(*this, lhs, rhs);
}

Value ArithmeticBuilder::div(Value lhs, Value rhs) {
  if (isFloat(lhs))
    return arith::DivFOp::create(*this, lhs, rhs);
  return arith::DivUIOp::create(*this, lhs, rhs);
}

Value ArithmeticBuilder::maximum(Value lhs, Value rhs) {
  return arith::MaximumFOp::create(*this, lhs, rhs);
}

Value ArithmeticBuilder::maximumNumber(Value lhs, Value rhs) {
  return arith::MaxNumFOp::create(*this, lhs, rhs);
}

Value ArithmeticBuilder::minimumNumber(Value lhs, Value rhs) {
  return arith::MinNumFOp::create(*this, lhs, rhs);
}

Value ArithmeticBuilder::maxOrRhs(Value lhs, Value rhs) {
  return select(compare(arith::CmpFPredicate::OGT, lhs, rhs), lhs, rhs);
}

Value ArithmeticBuilder::minOrRhs(Value lhs, Value rhs) {
  return select(compare(arith::CmpFPredicate::OLT, lhs, rhs), lhs, rhs);
}

Value ArithmeticBuilder::maxSigned(Value lhs, Value rhs) {
  return arith::MaxSIOp::create(*this, lhs, rhs);
}

Value ArithmeticBuilder::minSigned(Value lhs, Value rhs) {
  return arith::MinSIOp::create(*this, lhs, rhs);
}

//===----------------------------------------------------------------------===//
// Functions of floats
//===----------------------------------------------------------------------===//

Value ArithmeticBuilder::fma(Value a, Value b, Value c) {
  return math::FmaOp::create(*this, a, b, c);
}

Value ArithmeticBuilder::exp(Value x) { return math::ExpOp::create(*this, x); }

Value ArithmeticBuilder::log(Value x) { return math::LogOp::create(*this, x); }

Value ArithmeticBuilder::log1p(Value x) {
  return math::Log1pOp::create(*this, x);
}

Value ArithmeticBuilder::sqrt(Value x) {
  return math::SqrtOp::create(*this, x);
}

Value ArithmeticBuilder::abs(Value x) { return math::AbsFOp::create(*this, x); }

//===----------------------------------------------------------------------===//
// Conditions
//===----------------------------------------------------------------------===//

Value ArithmeticBuilder::equal(Value lhs, Value rhs) {
  if (isFloat(lhs))
    return compare(arith::CmpFPredicate::OEQ, lhs, rhs);
  return compare(arith::CmpIPredicate::eq, lhs, rhs);
}

Value ArithmeticBuilder::less(Value lhs, Value rhs) {
  if (isFloat(lhs))
    return compare(arith::CmpFPredicate::OLT, lhs, rhs);
  return compare(arith::CmpIPredicate::slt, lhs, rhs);
}

Value ArithmeticBuilder::both(Value lhs, Value rhs) {
  if (!lhs || !rhs)
    return lhs ? lhs : rhs;
  return arith::AndIOp::create(*this, lhs, rhs);
}

Value ArithmeticBuilder::either(Value lhs, Value rhs) {
  if (!lhs || !rhs)
    return lhs ? lhs : rhs;
  return arith::OrIOp::create(*this, lhs, rhs);
}

Value ArithmeticBuilder::negate(Value condition) {
  return arith::XOrIOp::create(*this, condition,
                               constantInt(condition.getType(), 1));
}

//===----------------------------------------------------------------------===//
// Casts
//===----------------------------------------------------------------------===//

Value ArithmeticBuilder::bitcast(Value value, Type element) {
  return arith::BitcastOp::create(*this, withShapeOf(value.getType(), element),
                                  value);
}

Value ArithmeticBuilder::castInt(Value value, Type element) {
  Type from = getElementTypeOrSelf(value.getType());
  Type type = withShapeOf(value.getType(), element);
  if (from == element)
    return value;
  if (from.isIndex() || element.isIndex())
    return arith::IndexCastOp::create(*this, type, value);
  if (from.getIntOrFloatBitWidth() < element.getIntOrFloatBitWidth())
    return arith::ExtSIOp::create(*this, type, value);
  return arith::TruncIOp::create(*this, type, value);
}
