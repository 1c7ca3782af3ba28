//===- OnlineSoftmax.cpp - A softmax over blocks of keys ------------------===//

#include "MoE/Dialect/MoE/Utils/OnlineSoftmax.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;

static constexpr double kInfinity = std::numeric_limits<double>::infinity();

Value mlir::moe::sumTree(ArithmeticBuilder &b, ArrayRef<Value> values) {
  if (values.size() == 1)
    return values.front();
  size_t half = values.size() / 2;
  return b.add(sumTree(b, values.take_front(half)),
               sumTree(b, values.drop_front(half)));
}

/// Whether no key was visible so far.
Value OnlineSoftmax::isEmpty(Value max) {
  return b.compare(CmpFPredicate::OEQ, max, constant(max, -kInfinity));
}

SoftmaxStep OnlineSoftmax::start(Value oldMax, Value newMax) {
  Value zero = constant(newMax, 0.0);
  SoftmaxStep step;
  step.shift = b.select(isEmpty(newMax), zero, newMax);
  Value drop = b.sub(oldMax, step.shift);
  step.decay = b.exp(drop);
  step.drop = b.select(isEmpty(oldMax), zero, drop);
  return step;
}

void OnlineSoftmax::add(SoftmaxSums &sums, const SoftmaxStep &step,
                        MutableArrayRef<Value> logits) {
  SmallVector<Value> moments;
  for (Value &x : logits) {
    Value relative = b.sub(x, step.shift);
    x = b.exp(relative);
    if (!sums.moment)
      continue;
    // 0 ln 0 = 0: a hidden key's relative logit is kept finite.
    double lowest = std::numeric_limits<float>::lowest();
    moments.push_back(b.mul(x, b.max(relative, constant(relative, lowest))));
  }
  if (sums.moment) {
    Value moved = b.mul(b.fma(sums.sum, step.drop, sums.moment), step.decay);
    sums.moment = b.add(moved, sumTree(b, moments));
  }
  sums.sum = b.fma(sums.sum, step.decay, sumTree(b, logits));
}

OnlineSoftmax::Result OnlineSoftmax::finish(Value max, const SoftmaxSums &sums,
                                            Value isReal) {
  Value zero = constant(max, 0.0);
  Result result;
  // A visible key weighs 1 at the maximum, so only a query without one sums to
  // 0. The maximum does not tell: it stays -inf when every logit is NaN (E3).
  result.isEmpty = b.compare(CmpFPredicate::OEQ, sums.sum, zero);
  // E10: a masked query has the results of one that sees no key.
  if (isReal)
    result.isEmpty = b.either(result.isEmpty, b.negate(isReal));
  Value logSum = b.log(sums.sum);
  result.lse =
      b.select(result.isEmpty, constant(max, -kInfinity), b.add(max, logSum));
  if (sums.moment) {
    Value entropy = b.sub(logSum, b.div(sums.moment, sums.sum));
    result.entropy = b.select(result.isEmpty, zero, entropy);
  }
  return result;
}
