//===- SoftmaxMixSplitSums.h - A gradient, summed by splits -----*- C++ -*-===//
//
// Each split has sums of its own of a gradient of all tokens. They are added in
// order, so that bits do not depend on the threads. The first split's are the
// gradient itself where they can be.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXSPLITSUMS_H
#define MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXSPLITSUMS_H

#include "SoftmaxMixSplits.h"

namespace mlir::moe {

class SplitSums {
public:
  /// `out` is the gradient of all batches and heads, `[b, h, i, f]`.
  SplitSums(Emitter &e, PairSplits &splits, Value out)
      : e(e), splits(splits), out(out) {}

  void allocate();
  void takeView(const PairSplits::Task &task);
  /// The sums of a split, of a task's batch and head.
  Value get(const PairSplits::Task &task, Value split) const;

  /// Rows `first` to `end`, which the first `numSplits` splits have taken.
  struct Rows {
    Value first, end, numSplits;
  };
  /// Which rows have a gradient: not masked ones, if there `exists` a mask.
  struct TokenMask {
    bool exists;
    std::function<Value(Value row)> isReal;
  };
  /// Writes `scale` times the sums of some rows, 0 for masked ones.
  void write(const PairSplits::Task &task, const Rows &rows,
             const TokenMask &mask, double scale) const;

  /// The gradient at one batch and head.
  Value gradient;

private:
  Value holdsSums(Type type) const;
  void writeRow(Value row, Value numSplits, Value firstSums, Value sums,
                Value isReal, double scale) const;

  Emitter &e;
  PairSplits &splits;
  Value out, all;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXSPLITSUMS_H
