//===- MixTiles.h - Tiles of queries and keys -------------------*- C++ -*-===//
//
// A block takes a tile of queries and goes through the keys in tiles. Here is
// where it stands, which keys exist, and what belongs to them beside their
// features.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_MIXING_MIXTILES_H
#define MOE_LIB_CONVERSION_MOETOGPU_MIXING_MIXTILES_H

#include "Emit/WarpBuilder.h"

#include "MoE/Dialect/MoE/IR/PairLogits.h"

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

/// The tiles of a block: of queries, and of the keys that they see.
class MixTiles {
public:
  MixTiles(WarpBuilder &b, SoftmaxMixOp op, MixLayout layout);

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

  WarpBuilder &b;
  SoftmaxMixOp op;
  MixLayout layout;
  /// Of the tile that is being emitted.
  Value batch, head, firstRow;
  Value numQueries, numKeys;

protected:
  /// The key position of a row of the tile, as i32.
  Value positionOf(Value row);

  const PairLogits pairLogits;

private:
  Value origin;
};

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

#endif // MOE_LIB_CONVERSION_MOETOGPU_MIXING_MIXTILES_H
