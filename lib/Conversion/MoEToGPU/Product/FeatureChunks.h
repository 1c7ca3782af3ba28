//===- FeatureChunks.h - Chunks of features in shared memory ----*- C++ -*-===//
//
// left right^T on tensor cores goes over the features in chunks: a chunk of the
// rows of both sides is copied into shared memory, where a row takes
// kChunkBytes that `SharedMemoryBuilder::swizzle` permutes, and multiplied
// there. It is summed from 0 and then added, because tensor cores truncate: in
// long sums of theirs bits would be lost.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_FEATURECHUNKS_H
#define MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_FEATURECHUNKS_H

#include "Emit/WarpBuilder.h"

namespace mlir::moe {

/// Features of a chunk, and the bytes of its rows.
inline constexpr int64_t kChunk = 64, kChunkBytes = 2 * kChunk;

/// Whether rows follow each other without gaps, so that they are aligned; of a
/// tensor that is not known yet.
bool hasWholeRows(Value value);
/// Whether such rows lie in global memory, too, from where units are copied,
/// and begin at one; of a tensor that is assumed.
bool canCopyRows(Value rows);

/// Copies chunks of rows of 16-bit elements by `numThreads` threads.
struct ChunkCopies {
  /// A row's first feature in global memory, `offset` bytes (i64, null for
  /// none) behind what it shares with others, and whether it is to be read.
  struct Row {
    Value base, offset, isReal;
  };

  /// How many rows the threads copy at once.
  int64_t rowsAtOnce() { return numThreads / (kChunkBytes / kUnitBytes); }
  /// The offset of row `row` (index) of rows without gaps.
  Value offsetOf(Value row);
  /// Of `numRows` rows, by their numbers (i32), those of which the thread
  /// copies a unit a chunk.
  SmallVector<Row> getRows(int64_t numRows,
                           function_ref<Row(Value row)> getRow);
  /// Starts copying chunk `chunk` of the rows to `shared`; zeros for rows that
  /// are not real and behind the last feature.
  void copy(ArrayRef<Row> rows, Value shared, Value chunk);

  WarpBuilder &b;
  int64_t numFeatures;
  /// The thread's number among the threads, i32.
  Value thread;
  int64_t numThreads;
};

/// Loads the operand number `number` of one side of a product, at the `step`-th
/// 16 features of a chunk.
using LoadOperand =
    function_ref<SmallVector<Value>(int64_t number, int64_t step)>;

/// Adds the products of a chunk to `totals`, which are fragments by left
/// operands, of 16 rows, and by right ones, of 8. `loadRight` brings two of
/// them at once, of which there are `numPairs`.
SmallVector<Value> addChunkProducts(WarpBuilder &b, Type element,
                                    int64_t numLeft, LoadOperand loadLeft,
                                    int64_t numPairs, LoadOperand loadRight,
                                    ValueRange totals);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_FEATURECHUNKS_H
