//===- ArithmeticBuilder.h - Arithmetic by its meaning ----------*- C++ -*-===//
//
// What the bodies of decompositions, the CPU's vectors and a GPU's threads
// compute with. The op follows from the operands: floats or integers, scalars
// or vectors. Where functions differ in what they make of a NaN, the name says
// it.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_UTILS_ARITHMETICBUILDER_H
#define MOE_DIALECT_MOE_UTILS_ARITHMETICBUILDER_H

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/IR/TypeUtilities.h"

namespace mlir::moe {

/// Whether a scalar or the elements of a vector are floats.
inline bool isFloat(Value value) {
  return isa<FloatType>(getElementTypeOrSelf(value.getType()));
}

class ArithmeticBuilder : public ImplicitLocOpBuilder {
public:
  /// Constants are scalars, or vectors of `width` lanes where that is not 0.
  ArithmeticBuilder(Location loc, OpBuilder &builder, int64_t width = 0)
      : ImplicitLocOpBuilder(loc, builder), width(width) {}
  virtual ~ArithmeticBuilder() = default;

  /// The number of lanes of every vector; 0 where values are scalars.
  const int64_t width;

  //===--------------------------------------------------------------------===//
  // Types and constants
  //===--------------------------------------------------------------------===//

  /// `element`, or the vector of it.
  Type lanesOf(Type element);
  Type floats() { return lanesOf(getF32Type()); }
  Type ints() { return lanesOf(getI32Type()); }

  /// A constant of an integer or float type, or a splat of a vector type.
  Value constant(Type type, double value);
  Value constantInt(Type type, int64_t value);
  Value f32(double value) { return constant(floats(), value); }
  Value i32(int64_t value) { return constantInt(ints(), value); }
  Value boolean(bool value) { return constantInt(lanesOf(getI1Type()), value); }
  /// Scalars always.
  Value index(int64_t value);
  Value infinity();
  Value negInfinity();
  Value nan();

  //===--------------------------------------------------------------------===//
  // Floats, or integers of one type
  //===--------------------------------------------------------------------===//

  Value add(Value lhs, Value rhs);
  Value sub(Value lhs, Value rhs);
  Value mul(Value lhs, Value rhs);
  /// Unsigned for integers.
  Value div(Value lhs, Value rhs);
  /// Of floats.
  Value neg(Value x) { return arith::NegFOp::create(*this, x); }
  /// The larger or smaller of two numbers, by the target's cheapest way: where
  /// one is NaN, either of them. For where a NaN shows by other operands.
  virtual Value max(Value lhs, Value rhs) { return maximumNumber(lhs, rhs); }
  virtual Value min(Value lhs, Value rhs) { return minimumNumber(lhs, rhs); }
  /// The larger of two numbers; NaN if either is (IEEE 754-2019 maximum).
  Value maximum(Value lhs, Value rhs);
  /// The larger of two numbers; NaN only if both are (IEEE 754-2019
  /// maximumNumber).
  virtual Value maximumNumber(Value lhs, Value rhs);
  virtual Value minimumNumber(Value lhs, Value rhs);
  /// The larger or smaller; `rhs` where either is NaN. One instruction on x86,
  /// which the other two are not.
  Value maxOrRhs(Value lhs, Value rhs);
  Value minOrRhs(Value lhs, Value rhs);
  /// The larger or smaller of signed integers or indices.
  Value maxSigned(Value lhs, Value rhs);
  Value minSigned(Value lhs, Value rhs);

  //===--------------------------------------------------------------------===//
  // Functions of floats
  //===--------------------------------------------------------------------===//

  virtual Value fma(Value a, Value b, Value c);
  virtual Value exp(Value x);
  virtual Value log(Value x);
  /// ln(1 + x).
  virtual Value log1p(Value x);
  virtual Value sqrt(Value x);
  virtual Value abs(Value x);

  //===--------------------------------------------------------------------===//
  // Conditions
  //===--------------------------------------------------------------------===//

  Value compare(arith::CmpFPredicate predicate, Value lhs, Value rhs) {
    return arith::CmpFOp::create(*this, predicate, lhs, rhs);
  }
  Value compare(arith::CmpIPredicate predicate, Value lhs, Value rhs) {
    return arith::CmpIOp::create(*this, predicate, lhs, rhs);
  }
  Value isNaN(Value x) { return compare(arith::CmpFPredicate::UNO, x, x); }
  Value isNegInfinity(Value x) { return equal(x, negInfinity()); }
  /// False for NaN.
  Value equal(Value lhs, Value rhs);
  /// lhs < rhs, signed for integers, false for NaN.
  Value less(Value lhs, Value rhs);
  /// lhs <= rhs, signed for integers; true for NaN.
  Value atMost(Value lhs, Value rhs) { return negate(less(rhs, lhs)); }
  /// Conjunction and disjunction where null means that there is no condition.
  Value both(Value lhs, Value rhs);
  Value either(Value lhs, Value rhs);
  Value negate(Value condition);
  Value select(Value condition, Value ifTrue, Value ifFalse) {
    return arith::SelectOp::create(*this, condition, ifTrue, ifFalse);
  }

  //===--------------------------------------------------------------------===//
  // Casts
  //===--------------------------------------------------------------------===//

  /// The same bits in another type of the same width.
  Value bitcast(Value value, Type element);
  /// Indices and signed integers as one another, extended or cut.
  Value castInt(Value value, Type element);
  Value toIndex(Value value) { return castInt(value, getIndexType()); }
  Value toI32(Value value) { return castInt(value, getI32Type()); }
};

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_UTILS_ARITHMETICBUILDER_H
