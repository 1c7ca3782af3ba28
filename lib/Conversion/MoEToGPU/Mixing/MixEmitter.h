//===- MixEmitter.h - What the kernels of softmax_mix share -----*- C++ -*-===//
//
// A block takes a tile of queries and goes through the keys in tiles, whose
// logits are spread over the registers of its threads. How they are computed
// and where they lie differs between the kernels; what happens to them does
// not: they go into an online softmax (OnlineSoftmax.h), each lane for its own
// keys. Key tiles start at multiples of their size, and one without a visible
// key changes no bit: a query's result does not depend on its place in a tile,
// and skipping is free.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_MIXING_MIXEMITTER_H
#define MOE_LIB_CONVERSION_MOETOGPU_MIXING_MIXEMITTER_H

#include "MixTiles.h"

#include "MoE/Dialect/MoE/Utils/OnlineSoftmax.h"

namespace mlir::moe {

/// The online softmax of the tiles.
class MixEmitter : public MixTiles {
public:
  using MixTiles::MixTiles;

  /// The state before the first key.
  SmallVector<Value> getInitialState();
  int64_t getStateSize() { return layout.rows.size() * getRowStateSize(); }
  /// Takes the products q.k of a tile into `state`; they become the weights p.
  /// Returns the factor a of each row.
  SmallVector<Value> update(SmallVectorImpl<Value> &state, Fragment &products,
                            Value firstKey, Value biases);
  /// Writes lse and entropy; returns 1 / l of each row, 0 where the query sees
  /// nothing.
  SmallVector<Value> finish(ValueRange state);
  /// Writes `value` times `factor` as column `column` of a row of the tile;
  /// with a factor of 0 it is 0, whatever the value.
  void storeMixed(Value value, Value factor, Value row, Value column);

private:
  int64_t getRowStateSize() { return op.getWithEntropy() ? 3 : 2; }
  /// Of the state of a row.
  static SoftmaxSums getSums(ArrayRef<Value> row) {
    return {row[1], row.size() > 2 ? row[2] : Value()};
  }
  SmallVector<Value> getLogits(unsigned row, ArrayRef<Value> products,
                               Value firstKey, ArrayRef<Value> biases,
                               ArrayRef<Value> levels);
  Value reduceRow(Value value, function_ref<Value(Value, Value)> combine);
};

/// The layout of logits that `multiplyAdd` sums: a warp has the fragments of 16
/// rows that follow each other.
MixLayout getFragmentLayout(WarpBuilder &b, Value warp, int64_t rowFragments,
                            int64_t numRows, int64_t numKeys);
/// The weights of two rows of a thread, 8 apart, as the left operands of the
/// product with the values of the `step`-th 16 keys: one a term.
Fragment splitWeights(WarpBuilder &b, ArrayRef<SmallVector<Value>> rows,
                      int64_t step, int64_t numTerms);
/// Ends a tile: writes the results of rows in fragments, of which `sums` are
/// those of the values, by rows, then columns.
void finishFragments(MixEmitter &mix, ValueRange state, ValueRange sums);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_MIXING_MIXEMITTER_H
