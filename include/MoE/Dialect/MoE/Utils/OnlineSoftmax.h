//===- OnlineSoftmax.h - A softmax over blocks of keys ----------*- C++ -*-===//
//
// A kernel that takes the keys of a query block by block keeps, of those
// before,
//
//   m' = max(m, max_j x_j)                          the running maximum
//   a  = exp(m - m'),  p_j = exp(x_j - m')          the weights of the block
//   l' = a l + sum_j p_j
//   t' = a (t + (m - m') l) + sum_j p_j (x_j - m')
//   o' = a o + sum_j p_j v_j                        left to the kernel
//
// so that at the end mixed = o / l, lse = m + ln l, entropy = ln l - t / l.
// With t relative to the maximum the entropy is exact where logits are large. A
// block without a visible key changes no bit of (m, l, t, o).
//
// A value is what the kernel's target has of a query: a register of a thread, a
// vector of logits of one query, or a vector of one logit a query.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_UTILS_ONLINESOFTMAX_H
#define MOE_DIALECT_MOE_UTILS_ONLINESOFTMAX_H

#include "MoE/Dialect/MoE/Utils/ArithmeticBuilder.h"

namespace mlir::moe {

/// A sum in a fixed order, that of a balanced tree.
Value sumTree(ArithmeticBuilder &b, ArrayRef<Value> values);

/// l and, where the entropy is asked for, t.
struct SoftmaxSums {
  Value sum, moment;
};

/// How a new maximum changes what was summed before.
struct SoftmaxStep {
  /// What logits are relative to from now on: the maximum, or 0 as long as no
  /// key was visible.
  Value shift;
  /// a, and m - m' or, as long as no key was visible, 0.
  Value decay, drop;
};

class OnlineSoftmax {
public:
  explicit OnlineSoftmax(ArithmeticBuilder &b) : b(b) {}

  /// The larger of two maxima; where `x` is NaN, the other one.
  Value updateMax(Value x, Value max) { return b.max(x, max); }
  SoftmaxStep start(Value oldMax, Value newMax);
  /// p of a logit.
  Value weigh(Value x, Value shift) { return b.exp(b.sub(x, shift)); }
  /// Adds the logits of a block, which become their weights.
  void add(SoftmaxSums &sums, const SoftmaxStep &step,
           MutableArrayRef<Value> logits);

  /// What becomes of a query. One that sees no key, as one that is masked (not
  /// `isReal`; null: it is real), has lse -inf and entropy 0.
  struct Result {
    Value isEmpty, lse, entropy;
  };
  Result finish(Value max, const SoftmaxSums &sums, Value isReal);

private:
  /// A constant of the type of `like`.
  Value constant(Value like, double value) {
    return b.constant(like.getType(), value);
  }
  Value isEmpty(Value max);

  ArithmeticBuilder &b;
};

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_UTILS_ONLINESOFTMAX_H
