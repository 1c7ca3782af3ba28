//===- SoftmaxMixCopies.h - Operands to shared memory -----------*- C++ -*-===//
//
// What the kernels of softmax_mix on tensor cores have in common before their
// products: features and values of a tile on their way to shared memory, in
// rows that `SharedMemoryBuilder::swizzle` permutes.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIXCOPIES_H
#define MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIXCOPIES_H

#include "MixTiles.h"
#include "Product/FeatureChunks.h"

namespace mlir::moe {

/// How the values of a key tile lie in shared memory: as bf16, in terms whose
/// sum they are, each cut into blocks of columns.
struct ValueTile {
  int64_t numKeys = 0, numColumns = 0;
  /// Columns that memory is reserved for, and those of a block.
  int64_t width = 0, blockColumns = 0;
  int64_t terms = 0;

  /// For `numColumns` columns of the values of `op`, none if it has none, with
  /// weights that are sums of `weightTerms` bf16.
  ValueTile(SoftmaxMixOp op, int64_t numColumns, int64_t numKeys,
            int64_t weightTerms, int64_t maxBlockColumns);
  ValueTile() = default;

  int64_t getRowBytes() const { return 2 * blockColumns; }
  int64_t getBlockBytes() const { return numKeys * getRowBytes(); }
  int64_t getTermBytes() const { return 2 * numKeys * width; }
  int64_t getBytes() const { return terms * getTermBytes(); }
};

/// bf16 whose sum stands for a weight.
int64_t getWeightTerms(SoftmaxMixOp op);

/// Whether q and k are of one 16-bit type, with a static number of features
/// that fill whole units, and the values have a static number of columns.
bool hasTensorTypes(SoftmaxMixOp op);

/// Writes unit `unit` of the row of `values` that begins at `row` to `place`,
/// as bf16 terms; 0 if the row is not real, and behind the last column.
void storeValueUnit(WarpBuilder &b, const ValueTile &tile, Value values,
                    SmallVector<Value> row, Value isReal, Value unit,
                    Value place);

class MixCopies {
public:
  /// Copies by `numThreads` threads, each with its number `thread` (i32).
  MixCopies(MixTiles &mix, Value thread, int64_t numThreads);

  /// Starts copying chunk `chunk` of the features of `numRows` rows from row
  /// `first` on; zeros for masked keys and for what lies behind the last row or
  /// feature.
  void copyChunk(Value memref, Value shared, int64_t numRows, Value first,
                 Value chunk, bool areKeys);
  /// Brings the values of a key tile to shared memory, or starts to; 0 for keys
  /// that nobody sees.
  void copyValues(const ValueTile &tile, Value firstKey, Value shared);

  const Value thread;
  const int64_t numThreads;

private:
  WarpBuilder &b;
  MixTiles &mix;
  ChunkCopies features;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIXCOPIES_H
