//===- ExpertActivations.cpp - What an expert's layer ends with -----------===//

#include "MoE/Dialect/MoE/IR/ExpertActivations.h"

#include "mlir/Dialect/Math/IR/Math.h"

#include <numbers>

using namespace mlir;
using namespace mlir::moe;

static Value constantLike(ArithmeticBuilder &b, Value x, double value) {
  return b.constant(x.getType(), value);
}

static Value identity(ArithmeticBuilder &, Value x, double) { return x; }

static Value relu(ArithmeticBuilder &b, Value x, double) {
  return b.maxOrRhs(constantLike(b, x, 0.0), x);
}

static Value relu2(ArithmeticBuilder &b, Value x, double alpha) {
  Value positive = relu(b, x, alpha);
  return b.mul(positive, positive);
}

static Value halfOnePlus(ArithmeticBuilder &b, Value x, Value y) {
  return b.mul(b.mul(constantLike(b, x, 0.5), x),
               b.add(constantLike(b, x, 1.0), y));
}

static Value gelu(ArithmeticBuilder &b, Value x, double) {
  // x (1 + erf(x / sqrt 2)) / 2
  Value scaled = b.mul(x, constantLike(b, x, std::numbers::sqrt2 / 2.0));
  return halfOnePlus(b, x, math::ErfOp::create(b, scaled));
}

static Value geluTanh(ArithmeticBuilder &b, Value x, double) {
  // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
  constexpr double scale = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;
  Value cube = b.mul(b.mul(x, x), x);
  Value inner = b.add(x, b.mul(constantLike(b, x, 0.044715), cube));
  Value scaled = b.mul(constantLike(b, x, scale), inner);
  return halfOnePlus(b, x, math::TanhOp::create(b, scaled));
}

/// numerator sigmoid(alpha x), which is not NaN where exp overflows.
static Value timesSigmoid(ArithmeticBuilder &b, Value numerator, Value x,
                          double alpha) {
  Value exponent = b.mul(x, constantLike(b, x, -alpha));
  return b.div(numerator, b.add(constantLike(b, x, 1.0), b.exp(exponent)));
}

static Value silu(ArithmeticBuilder &b, Value x, double alpha) {
  return timesSigmoid(b, x, x, alpha);
}

using Activation = Value (*)(ArithmeticBuilder &b, Value x, double alpha);

static Activation getRow(ExpertActivation activation) {
  switch (activation) {
  case ExpertActivation::None:
    return identity;
  case ExpertActivation::Relu:
    return relu;
  case ExpertActivation::Relu2:
    return relu2;
  case ExpertActivation::Gelu:
    return gelu;
  case ExpertActivation::GeluTanh:
    return geluTanh;
  case ExpertActivation::Silu:
    return silu;
  }
  llvm_unreachable("unknown activation");
}

Value mlir::moe::buildActivation(ArithmeticBuilder &b, GroupedLinearOp op,
                                 Value x) {
  return getRow(op.getActivation())(b, x, op.getAlpha().convertToDouble());
}

//===----------------------------------------------------------------------===//
// Gates
//===----------------------------------------------------------------------===//

/// At most `limit`.
static Value clampAbove(ArithmeticBuilder &b, Value x, double limit) {
  return b.minOrRhs(constantLike(b, x, limit), x);
}

static Value softcap(ArithmeticBuilder &b, Value x, double limit) {
  Value scaled = b.div(x, constantLike(b, x, limit));
  return b.mul(math::TanhOp::create(b, scaled), constantLike(b, x, limit));
}

static Value buildFactor(ArithmeticBuilder &b, GroupedLinearOp op, Value up) {
  std::optional<APFloat> limit =
      op.getUpLimit() ? op.getUpLimit() : op.getLimit();
  if (limit) {
    double value = limit->convertToDouble();
    up =
        op.getBound() == GateBound::Softcap
            ? softcap(b, up, value)
            : b.maxOrRhs(constantLike(b, up, -value), clampAbove(b, up, value));
  }
  double offset = op.getUpOffset().convertToDouble();
  return offset == 0.0 ? up : b.add(up, constantLike(b, up, offset));
}

Value mlir::moe::buildGatedActivation(ArithmeticBuilder &b, GroupedLinearOp op,
                                      Value gate, Value up) {
  Value factor = buildFactor(b, op, up);
  std::optional<APFloat> limit = op.getLimit();
  if (!limit)
    return b.mul(buildActivation(b, op, gate), factor);
  double value = limit->convertToDouble();
  switch (op.getBound()) {
  case GateBound::Clamp:
    return b.mul(buildActivation(b, op, clampAbove(b, gate, value)), factor);
  case GateBound::ClampActivated:
    return b.mul(clampAbove(b, buildActivation(b, op, gate), value), factor);
  case GateBound::Softcap:
    return b.mul(timesSigmoid(b, softcap(b, gate, value), gate,
                              op.getAlpha().convertToDouble()),
                 factor);
  }
  llvm_unreachable("unknown bound");
}
