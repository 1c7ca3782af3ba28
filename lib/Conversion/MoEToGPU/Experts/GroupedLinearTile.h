//===- GroupedLinearTile.h - Tiles of experts of many rows ------*- C++ -*-===//
//
// What the parts of the kernel on warpgroups know of a tile: its sizes, which
// follow from the op, and where it lies.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEARTILE_H
#define MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEARTILE_H

#include "Emit/Ring.h"
#include "Product/FeatureChunks.h"

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "llvm/Support/MathExtras.h"

namespace mlir::moe {

inline constexpr int64_t kConsumers = 2;
inline constexpr int64_t kTileRows = kConsumers * kWgmmaRows;
inline constexpr int64_t kThreads = (kConsumers + 1) * kWarpgroupSize;
inline constexpr int64_t kChunkSlots = 4, kTileSlots = 2;
/// What is said of a tile: five i32.
inline constexpr int64_t kTileSlotBytes = 32;

/// What follows from the op alone.
struct TilePlan {
  explicit TilePlan(GroupedLinearOp op)
      : isExact(getElementTypeOrSelf(op.getOuts()[0]).isF32()),
        isTransposed(op.getTransposed()), isGated(op.isGated()),
        hasPairs(isTransposed && op.getGate() == GateLayout::Interleaved),
        columns(isExact ? 128 : 256),
        numFeatures(cast<ShapedType>(op.getX().getType()).getDimSize(1)),
        numOfY(cast<ShapedType>(op.getOuts()[0].getType()).getDimSize(1)) {}

  bool isExact, isTransposed, isGated;
  /// Whether gates and their factors are neighbours in a tile, too.
  bool hasPairs;
  /// Rows of the weight that a tile has.
  int64_t columns;
  int64_t numFeatures, numOfY;

  int64_t getNumChunks() const { return llvm::divideCeil(numFeatures, kChunk); }
  /// Columns of y that a tile has.
  int64_t getWidth() const { return isGated ? columns / 2 : columns; }
  int64_t getNumColumnTiles() const {
    return llvm::divideCeil(numOfY, getWidth());
  }
  /// Whether the last tile has columns that y does not have.
  bool hasRest() const { return numOfY % getWidth() != 0; }

  int64_t getLeftBytes() const { return kTileRows * kChunkBytes; }
  int64_t getSlotBytes() const {
    return getLeftBytes() + columns * kChunkBytes;
  }
  /// Slots come first, for they are aligned.
  int64_t getTilePlace() const { return kChunkSlots * getSlotBytes(); }
  int64_t getBarrierPlace() const {
    return getTilePlace() + kTileSlots * kTileSlotBytes;
  }
  int64_t getBytes() const {
    return getBarrierPlace() + Ring::getBarrierBytes(kChunkSlots + kTileSlots);
  }
};

/// The rows and columns of a tile: i32, and whether an expert has the rows.
struct TileOfRows {
  Value expert, begin, end, isOfExpert, columnTile;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEARTILE_H
