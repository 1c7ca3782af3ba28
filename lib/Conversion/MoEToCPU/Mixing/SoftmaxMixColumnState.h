//===- SoftmaxMixColumnState.h - The online softmax of columns --*- C++ -*-===//
//
// Where tokens mix with themselves, a block of columns takes all rows before it
// at once. Tokens are lanes here, so nothing is reduced over lanes:
//
//   m_j' = max(m_j, max_i x_ij), p_ij = exp(x_ij - m_j'),
//   l_j' = a_j l_j + sum_i p_ij, o_j' = a_j o_j + sum_i p_ij v_i.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXCOLUMNSTATE_H
#define MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXCOLUMNSTATE_H

#include "SoftmaxMixSplits.h"

#include "MoE/Dialect/MoE/Utils/OnlineSoftmax.h"

namespace mlir::moe {

/// What a block of rows has for columns: x, in place of which p is written, and
/// values as wide as `numValues`.
struct ColumnUpdate {
  Value logits, values, numRows;
  OpFoldResult numValues;
};

/// (m, l, o) of all tokens as columns, for each split.
class ColumnState {
public:
  ColumnState(Emitter &e, PairSplits &splits, OnlineSoftmax &softmax)
      : e(e), splits(splits), softmax(softmax) {}

  void allocate(OpFoldResult paddedValues);
  /// Views at one batch and head: of one split, and of all where it is null.
  void takeViews(Value slot, Value split);
  void clear() const;
  /// Takes the logits of some rows into the state of a block of columns.
  void update(Value firstColumn, const ColumnUpdate &rows) const;

  // Of a vector of tokens in one split, where views are of all.
  Value loadMax(Value split, Value first) const;
  Value loadSum(Value split, Value first) const;
  /// The block of columns that tokens are in, and where they are in it.
  Value getBlock(Value split, Value first) const;
  Value getOffset(Value first) const;
  Value loadMixed(Value block, Value value, Value offset) const;

private:
  Values findMax(const ColumnUpdate &rows) const;
  Values sumWeights(ArrayRef<Value> shifts, const ColumnUpdate &rows) const;
  void mixValues(Value firstColumn, ArrayRef<Value> decays,
                 const ColumnUpdate &rows, Value firstValue,
                 int64_t numValues) const;
  Value at(Value first, int64_t vector) const {
    return e.add(first, e.index(vector * e.width));
  }
  Value getBlock(Value token) const;
  Value inSplit(Value split, Value token) const;

  Emitter &e;
  PairSplits &splits;
  OnlineSoftmax &softmax;
  /// `mixed` is `[block, value, column]`.
  Value allMax, allSums, allMixed, max, sum, mixed;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXCOLUMNSTATE_H
