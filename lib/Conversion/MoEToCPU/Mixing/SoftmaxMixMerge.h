//===- SoftmaxMixMerge.h - Results from the states of splits ----*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXMERGE_H
#define MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXMERGE_H

#include "SoftmaxMixColumnState.h"
#include "SoftmaxMixState.h"

namespace mlir::moe {

/// Merges the states of tokens, as rows and as columns of each split, in the
/// order of splits, at one batch and head.
class StateMerge {
public:
  StateMerge(Emitter &e, PairSplits &splits, OnlineSoftmax &softmax,
             const RowState &rows, const ColumnState &columns,
             const MixKeys &tokens)
      : e(e), splits(splits), softmax(softmax), rows(rows), columns(columns),
        tokens(tokens) {}

  /// Writes the results of a vector of tokens. `factors`, a vector a split, is
  /// where the factors of the splits' states are kept meanwhile.
  void writeResults(Value first, Value factors, Value mixed, Value lse) const;

private:
  Value findMax(Value first) const;
  Value addSums(Value own, Value first, Value factors) const;
  void writeMixed(Value first, ArrayRef<Value> own, ArrayRef<Value> sums,
                  ArrayRef<Value> isEmpty, Value factors, Value mixed) const;

  Emitter &e;
  PairSplits &splits;
  OnlineSoftmax &softmax;
  const RowState &rows;
  const ColumnState &columns;
  const MixKeys &tokens;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXMERGE_H
