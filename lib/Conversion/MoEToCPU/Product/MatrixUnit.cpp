//===- MatrixUnit.cpp - Tiles that one instruction multiplies -------------===//

#include "MatrixUnit.h"

#include "mlir/Dialect/AMX/AMXDialect.h"

using namespace mlir;
using namespace mlir::moe;

Values mlir::moe::getZeroTiles(Emitter &e, int64_t count) {
  auto type =
      amx::TileType::get({kUnitTileSize, kUnitTileSize}, e.getF32Type());
  Values zeros;
  for (int64_t i = 0; i < count; ++i)
    zeros.push_back(amx::TileZeroOp::create(e, type));
  return zeros;
}

/// Registers hold the operand that has fewer tiles, and one tile of the other.
Values mlir::moe::multiplyTiles(Emitter &e, ArrayRef<TileSource> left,
                                ArrayRef<TileSource> right, Value k,
                                ValueRange sums) {
  auto type = amx::TileType::get({kUnitTileSize, kTileKs}, e.getBF16Type());
  Value packedK = arith::DivSIOp::create(e, k, e.index(2));
  auto load = [&](const TileSource &source, Value at) -> Value {
    return amx::TileLoadOp::create(e, type, source.memref, source.at(at),
                                   source.stride);
  };
  bool isLeftHeld = left.size() <= right.size();
  Values held;
  for (const TileSource &source : isLeftHeld ? left : right)
    held.push_back(load(source, isLeftHeld ? k : packedK));
  Values next(sums);
  for (auto [i, source] : llvm::enumerate(isLeftHeld ? right : left)) {
    Value tile = load(source, isLeftHeld ? packedK : k);
    for (auto [j, other] : llvm::enumerate(held)) {
      auto [row, column] = isLeftHeld ? std::pair(j, i) : std::pair(i, j);
      Value &sum = next[row * right.size() + column];
      sum = amx::TileMulFOp::create(e, sum.getType(), isLeftHeld ? other : tile,
                                    isLeftHeld ? tile : other, sum);
    }
  }
  return next;
}

void mlir::moe::storeTiles(Emitter &e, ValueRange sums, int64_t numRight,
                           Value memref, int64_t firstLine, int64_t firstLane,
                           Value stride) {
  for (auto [i, sum] : llvm::enumerate(sums)) {
    int64_t line = firstLine + i / numRight * kUnitTileSize;
    int64_t lane = firstLane + i % numRight * kUnitTileSize;
    amx::TileStoreOp::create(
        e, memref, ValueRange{e.index(line), e.index(lane)}, sum, stride);
  }
}
