//===- MatrixUnit.h - Tiles that one instruction multiplies -----*- C++ -*-===//
//
// The instructions of AMX on pairs of bf16: 16 rows of 32 ks are multiplied
// with 16 columns of pairs of ks and added to 16 by 16 sums. There are eight
// registers, each of which keeps its shape for all of a function: a tile of
// another shape would take one from these.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_MATRIXUNIT_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_MATRIXUNIT_H

#include "Emit/Emitter.h"

namespace mlir::moe {

/// The rows, columns and packed ks of a tile, and its ks.
inline constexpr int64_t kUnitTileSize = 16, kTileKs = 2 * kUnitTileSize;
/// So many tiles of sums leave registers for what is multiplied.
inline constexpr int64_t kMostTiles = 4;

/// Where tiles are read: rows of a left operand, from a k on, or columns of a
/// right one, from a packed k on. Lines are `stride` elements apart, null for
/// those of the last dim but one.
struct TileSource {
  Value memref;
  std::function<Values(Value k)> at;
  Value stride = {};
};
using TileSources = SmallVector<TileSource>;

Values getZeroTiles(Emitter &e, int64_t count);
/// `sums`, those of a left tile with each right one side by side, with the
/// products of 32 ks from `k` on added.
Values multiplyTiles(Emitter &e, ArrayRef<TileSource> left,
                     ArrayRef<TileSource> right, Value k, ValueRange sums);
/// Stores such sums from a line and a lane of `memref` on.
void storeTiles(Emitter &e, ValueRange sums, int64_t numRight, Value memref,
                int64_t firstLine, int64_t firstLane, Value stride = {});

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_MATRIXUNIT_H
