//===- ScoreFunctions.cpp - What a score function is ----------------------===//

#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
/// Null where there is none.
struct ScoreRow {
  Value (*score)(ArithmeticBuilder &b, Value x);
  Value (*log)(ArithmeticBuilder &b, Value x);
  Value (*logSlope)(ArithmeticBuilder &b, Value x);
};
} // namespace

static Value constantLike(ArithmeticBuilder &b, Value x, double value) {
  return b.constant(x.getType(), value);
}

/// exp(-|x|), which does not overflow.
static Value expOfMinusAbs(ArithmeticBuilder &b, Value x) {
  return b.exp(b.neg(b.abs(x)));
}

static Value identity(ArithmeticBuilder &, Value x) { return x; }

static Value sigmoid(ArithmeticBuilder &b, Value x) {
  // With t = exp(-|x|): sigmoid(x) = (x >= 0 ? 1 : t) / (1 + t)
  Value one = constantLike(b, x, 1.0), t = expOfMinusAbs(b, x);
  Value isNegative = b.less(x, constantLike(b, x, 0.0));
  return b.div(b.select(isNegative, t, one), b.add(one, t));
}

static Value logSigmoid(ArithmeticBuilder &b, Value x) {
  // ln sigmoid(x) = min(x, 0) - ln(1 + exp(-|x|))
  return b.sub(b.min(x, constantLike(b, x, 0.0)), b.log1p(expOfMinusAbs(b, x)));
}

static Value slopeOfLogSigmoid(ArithmeticBuilder &b, Value x) {
  return sigmoid(b, b.neg(x));
}

/// Below, ln(1 + exp(x)) is exp(x) to f32's last bit.
static constexpr double kSmallSoftplus = -17.0;

static Value sqrtSoftplus(ArithmeticBuilder &b, Value x) {
  // ln(1 + exp(x)) = max(x, 0) + ln(1 + exp(-|x|)). The root of exp(x) is taken
  // in the exponent: exp(x / 2) does not underflow where exp(x) does.
  Value softplus =
      b.add(b.max(x, constantLike(b, x, 0.0)), b.log1p(expOfMinusAbs(b, x)));
  Value isSmall = b.less(x, constantLike(b, x, kSmallSoftplus));
  Value half = b.exp(b.mul(x, constantLike(b, x, 0.5)));
  return b.select(isSmall, half, b.sqrt(softplus));
}

static Value slopeOfLogSqrtSoftplus(ArithmeticBuilder &b, Value x) {
  // sigmoid(x) / (2 softplus(x)), which is 1/2 where both are exp(x).
  Value root = sqrtSoftplus(b, x);
  Value slope =
      b.div(sigmoid(b, x), b.mul(constantLike(b, x, 2.0), b.mul(root, root)));
  Value isSmall = b.less(x, constantLike(b, x, kSmallSoftplus));
  return b.select(isSmall, constantLike(b, x, 0.5), slope);
}

static ScoreRow getRow(ScoreFunction function) {
  switch (function) {
  case ScoreFunction::None:
    return {identity, nullptr, nullptr};
  case ScoreFunction::Softmax:
    return {nullptr, identity, nullptr};
  case ScoreFunction::Sigmoid:
    return {sigmoid, logSigmoid, slopeOfLogSigmoid};
  case ScoreFunction::SqrtSoftplus:
    return {sqrtSoftplus, nullptr, slopeOfLogSqrtSoftplus};
  }
  llvm_unreachable("unknown score function");
}

bool mlir::moe::isElementwise(ScoreFunction function) {
  return getRow(function).score;
}

bool mlir::moe::hasLogScore(ScoreFunction function) {
  return getRow(function).log;
}

Value mlir::moe::buildScore(ArithmeticBuilder &b, ScoreFunction function,
                            Value x) {
  return getRow(function).score(b, x);
}

Value mlir::moe::buildLogScore(ArithmeticBuilder &b, ScoreFunction function,
                               Value x) {
  return getRow(function).log(b, x);
}

Value mlir::moe::buildLogSlope(ArithmeticBuilder &b, ScoreFunction function,
                               Value x) {
  return getRow(function).logSlope(b, x);
}
