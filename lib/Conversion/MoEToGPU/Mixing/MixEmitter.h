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

#include "Emit/WarpBuilder.h"

#include "MoE/Dialect/MoE/IR/PairLogits.h"
#include "MoE/Dialect/MoE/Utils/OnlineSoftmax.h"

namespace mlir::moe {

inline ShapedType getShaped(Value value) {
  return cast<ShapedType>(value.getType());
}

/// Values by row and column of those that a thread holds.
using Fragment = SmallVector<SmallVector<Value>>;

/// Which logits of a tile a thread holds.
struct MixLayout {
  /// Queries and keys of a tile.
  int64_t numRows, numKeys;
  /// The thread's queries and keys, i32 within the tile.
  SmallVector<Value> rows, keys;
  /// A row is spread over the lanes whose numbers differ in these bits.
  SmallVector<int64_t> laneBits;
  /// Whether the thread is the first of its rows.
  Value isFirstLane;
};

class MixEmitter {
public:
  MixEmitter(WarpBuilder &b, SoftmaxMixOp op, MixLayout layout);

  /// Calls `emitTile` for every batch, head and tile of queries, with what it
  /// returned for the one before; returns what it does for the last.
  SmallVector<Value>
  forEachTile(ValueRange initial,
              function_ref<SmallVector<Value>(ValueRange carried)> emitTile);
  void forEachTile(function_ref<void()> emitTile);
  /// The keys that some query of the tile may see, as [begin, end).
  std::pair<Value, Value> getKeyRange();

  //===--------------------------------------------------------------------===//
  // Key biases in shared memory
  //===--------------------------------------------------------------------===//

  /// Bytes that the biases, and levels if there are any, of a key tile take.
  static int64_t getBiasBytes(SoftmaxMixOp op, int64_t numKeys);
  /// Writes the biases of the tile at `firstKey`, -inf for a key that nobody
  /// sees. Of the threads, which are numbered from 0, the first ones take a key
  /// each.
  void writeBiases(Value thread, Value firstKey, Value shared);
  /// Whether key `key` (index), which exists, is not masked; null for yes.
  Value isUnmasked(Value key);
  /// Whether key `key` (index, maybe behind the last) exists and is not masked.
  Value isReal(Value key);
  /// `key`, or the last one.
  Value clampKey(Value key);
  Value clampRow(Value row);
  /// Where column `column` of the values of `key` lies.
  SmallVector<Value> getValuePlace(Value key, Value column);

  //===--------------------------------------------------------------------===//
  // The online softmax
  //===--------------------------------------------------------------------===//

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

  WarpBuilder &b;
  SoftmaxMixOp op;
  MixLayout layout;
  /// Of the tile that is being emitted.
  Value batch, head, firstRow;
  Value numQueries, numKeys;

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
  Value positionOf(Value row);
  const PairLogits pairLogits;
  Value origin;
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

/// Whether all batches (dim 0) or heads (dim 1) share the biases.
bool isBiasShared(Value bias, int64_t dim);
/// The bias of a pair, whose dims of 1 are broadcast.
Value loadPairBias(ThreadBuilder &b, Value bias, Value batch, Value head,
                   Value query, Value key);

/// The most columns of the values that registers can accumulate.
inline constexpr int64_t kMaxMixColumns = 256;

/// Threads of a block that runs the kernels, but for that of warpgroups.
inline constexpr int64_t kMixThreads = 128;

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_MIXING_MIXEMITTER_H
