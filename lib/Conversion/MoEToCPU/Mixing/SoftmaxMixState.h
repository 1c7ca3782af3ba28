//===- SoftmaxMixState.h - The online softmax of a group of rows -*- C++ -*-==//
//
// A block of keys is packed once for many queries: transposed, so that a vector
// holds one feature of neighbouring keys, with zeros for masked keys (E11).
// Queries are multiplied with it in groups of six, each with the state of an
// online softmax (OnlineSoftmax.h), whose sums are one a lane.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXSTATE_H
#define MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXSTATE_H

#include "SoftmaxMixTiles.h"

#include "MoE/Dialect/MoE/Utils/OnlineSoftmax.h"

namespace mlir::moe {

/// The keys of one batch and head; null where absent.
struct MixKeys {
  Value features, values, bias, mask, level;
};

/// A packed block of as many keys as a register tile has columns.
class KeyBlock {
public:
  /// `all` are the operands of all batches and heads. With `pairValues` values
  /// of bf16 lie in pairs of keys where the target multiplies these.
  KeyBlock(Emitter &e, Value queries, const MixKeys &all,
           bool pairValues = false);

  /// Packs the keys from `firstKey` on. A key that nobody sees, and one behind
  /// the last, has bias -inf; where it is masked its features are 0.
  void pack(Emitter &e, const MixKeys &keys, Value firstKey) const;

  /// Transposed features, a bias and a level a key, values row by row.
  Value features, bias, level, values;
};

/// (m, l, t, o) of rows; `moment` and `mixed` may be null.
struct RowState {
  Value max, sum, moment, mixed;

  /// Forgets all keys of rows `first` to `end`.
  void clear(Emitter &e, Value first, Value end) const;
  /// Takes logits of the rows from `slot` on and writes their weights p to the
  /// rows of `weights`, if there is one, in its type; returns the factors a of
  /// what came before, splat.
  Values update(Emitter &e, Value slot, ArrayRef<Values> logits,
                Value weights) const;

private:
  Values updateVector(Emitter &e, Value slot, ArrayRef<Values> logits,
                      Value weights, int64_t firstRow) const;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXSTATE_H
