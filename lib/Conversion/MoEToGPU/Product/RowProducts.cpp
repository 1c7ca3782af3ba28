//===- RowProducts.cpp - Products of rows on tensor cores -----------------===//
//
// Four warps stand in a grid, left rows x columns. Each keeps the products of
// its 16 rows and its columns in registers, while chunks of 64 features of both
// sides go through shared memory: one chunk is multiplied, the next is on its
// way (cp.async, two stages).
//
//===----------------------------------------------------------------------===//

#include "RowProducts.h"
#include "FeatureChunks.h"

#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Interfaces/ViewLikeInterface.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

static constexpr int64_t kWarps = 4;
static_assert(kProductThreads == kWarps * kWarpSize);
static constexpr int64_t kStages = 2;
/// Columns of a warp whose sums leave registers for the rest.
static constexpr int64_t kMaxWarpColumns = 128;

//===----------------------------------------------------------------------===//
// Plan
//===----------------------------------------------------------------------===//

int64_t RowProductPlan::getTransposedRowBytes() const {
  // Widths that a swizzle stays within.
  return 2 * (getColumns() < 64 ? llvm::PowerOf2Ceil(getColumns())
                                : llvm::alignTo(getColumns(), 64));
}

int64_t RowProductPlan::getStageBytes() const {
  return getRows() * kChunkBytes + (isTransposed
                                        ? kChunk * getTransposedRowBytes()
                                        : getColumns() * kChunkBytes);
}

int64_t RowProductPlan::getSharedBytes() const {
  return kStages * getStageBytes();
}

int64_t mlir::moe::getProductRows(int64_t numColumns) {
  return numColumns <= 128 ? 64 : numColumns <= 256 ? 32 : 16;
}

std::optional<RowProductPlan>
mlir::moe::planRowProducts(Value left, Value right, bool isTransposed,
                           int64_t maxRows, BlockShape block) {
  auto leftType = cast<ShapedType>(left.getType());
  auto rightType = cast<ShapedType>(right.getType());
  Type element = leftType.getElementType();
  if (block.numThreads != kProductThreads || leftType.getRank() < 2 ||
      rightType.getRank() != 2 || element != rightType.getElementType() ||
      !(element.isBF16() || element.isF16()) || !rightType.hasStaticShape() ||
      !canCopyRows(left) || !canCopyRows(right))
    return std::nullopt;
  RowProductPlan plan;
  plan.isTransposed = isTransposed;
  plan.numColumns = rightType.getDimSize(isTransposed ? 1 : 0);
  plan.numFeatures = rightType.getDimSize(isTransposed ? 0 : 1);
  constexpr int64_t unit = kUnitBytes / 2;
  if (plan.numColumns == 0 || plan.numFeatures == 0 ||
      plan.numFeatures % unit != 0 ||
      (isTransposed && plan.numColumns % unit != 0))
    return std::nullopt;
  plan.rowWarps = maxRows > 32 ? 4 : maxRows > 16 ? 2 : 1;
  plan.columnWarps = kWarps / plan.rowWarps;
  // Columns that do not fit are taken tile by tile. The rest of the block's ops
  // may fill the static part of the memory.
  int64_t granule = 16 * plan.columnWarps;
  for (int64_t tiles = 1;; ++tiles) {
    int64_t columns =
        llvm::alignTo(llvm::divideCeil(plan.numColumns, tiles), granule);
    plan.warpColumns = columns / plan.columnWarps;
    if (plan.warpColumns <= kMaxWarpColumns &&
        plan.getSharedBytes() + ::moe::kMaxStaticSharedBytes <=
            block.sharedBytes)
      return plan;
    if (columns == granule)
      return std::nullopt;
  }
}

//===----------------------------------------------------------------------===//
// Emitter
//===----------------------------------------------------------------------===//

namespace {
class RowProducts {
public:
  using Store = function_ref<void(Value, Value, Value)>;

  RowProducts(WarpBuilder &b, Value left, Value right,
              const RowProductPlan &plan, Store store);

  void emit();

private:
  void emitTile();
  void copyStage(Value chunk, Value stage);
  void copyTransposedRows(Value chunk, Value shared);
  SmallVector<Value> multiplyChunk(Value stage, ValueRange totals);
  void storeProducts(ValueRange totals);

  WarpBuilder &b;
  Value left, right;
  const RowProductPlan plan;
  const Store store;
  const Type element;
  Value thread, lane;
  ChunkCopies copies;
  /// The warp's first row and column in the tile.
  Value warpRow, warpColumn;
  Value stages, numRows;
  /// Of the tile that is being emitted.
  Value firstRow, firstColumn;
  SmallVector<ChunkCopies::Row> leftRows;
};
} // namespace

RowProducts::RowProducts(WarpBuilder &b, Value left, Value right,
                         const RowProductPlan &plan, Store store)
    : b(b), left(left), right(right), plan(plan), store(store),
      element(getElementTypeOrSelf(left.getType())), thread(b.thread()),
      lane(b.lane()), copies{b, plan.numFeatures, thread, kProductThreads} {
  Value warp = b.div(thread, kWarpSize);
  warpRow = b.mul(b.div(warp, plan.columnWarps), b.i32(16));
  warpColumn = b.mul(b.rem(warp, plan.columnWarps), b.i32(plan.warpColumns));
  stages = b.reserveShared(plan.getSharedBytes());
  numRows = getNumRows(b, left, /*numInner=*/1);
}

//===----------------------------------------------------------------------===//
// Copies
//===----------------------------------------------------------------------===//

/// Starts copying the columns of the tile of a chunk of features.
void RowProducts::copyTransposedRows(Value chunk, Value shared) {
  constexpr int64_t unitColumns = kUnitBytes / 2;
  int64_t units = plan.getColumns() / unitColumns;
  Value zero = b.index(0), firstFeature = b.mul(chunk, b.i32(kChunk));
  Value base = b.addressOf(right, {zero, zero});
  for (int64_t i = 0; i < kChunk * units; i += kProductThreads) {
    Value number = b.add(thread, b.i32(i));
    Value place = b.op<arith::DivUIOp>(number, b.i32(units));
    Value unit = b.op<arith::RemUIOp>(number, b.i32(units));
    Value feature = b.add(firstFeature, place);
    Value column = b.add(firstColumn, b.mul(unit, b.i32(unitColumns)));
    Value exists = b.both(b.less(feature, b.i32(plan.numFeatures)),
                          b.less(column, b.i32(plan.numColumns)));
    feature = b.minSigned(feature, b.i32(plan.numFeatures - 1));
    column = b.minSigned(column, b.i32(plan.numColumns - unitColumns));
    Value element = b.add(b.mul(b.toIndex(feature), b.index(plan.numColumns)),
                          b.toIndex(column));
    Value offset = arith::IndexCastOp::create(b, b.getI64Type(),
                                              b.mul(element, b.index(2)));
    b.copyAsync(
        b.at(shared, b.swizzle(place, unit, plan.getTransposedRowBytes())),
        b.at(base, offset), exists);
  }
}

void RowProducts::copyStage(Value chunk, Value stage) {
  Value shared = b.at(stages, b.mul(stage, b.i32(plan.getStageBytes())));
  copies.copy(leftRows, shared, chunk);
  shared = b.at(shared, plan.getRows() * kChunkBytes);
  if (plan.isTransposed)
    return copyTransposedRows(chunk, shared);
  Value zero = b.index(0);
  Value base = b.addressOf(right, {zero, zero});
  bool hangsOver = plan.numColumns % plan.getColumns() != 0;
  auto getRow = [&](Value place) -> ChunkCopies::Row {
    Value row = b.add(firstColumn, place), exists = b.boolean(true);
    if (hangsOver) {
      exists = b.less(row, b.i32(plan.numColumns));
      row = b.minSigned(row, b.i32(plan.numColumns - 1));
    }
    return {base, copies.offsetOf(b.toIndex(row)), exists};
  };
  copies.copy(copies.getRows(plan.getColumns(), getRow), shared, chunk);
}

//===----------------------------------------------------------------------===//
// Products
//===----------------------------------------------------------------------===//

/// Adds the products of one chunk to `totals`, by fragment of 8 columns.
SmallVector<Value> RowProducts::multiplyChunk(Value stage, ValueRange totals) {
  Value rows = b.at(stages, b.mul(stage, b.i32(plan.getStageBytes())));
  Value columns = b.at(rows, plan.getRows() * kChunkBytes);
  auto loadLeft = [&](int64_t, int64_t step) {
    return b.loadLeft(rows, warpRow, b.i32(2 * step), kChunkBytes);
  };
  auto loadRight = [&](int64_t pair, int64_t step) {
    if (plan.isTransposed)
      return b.loadTransposedRight(
          columns, b.i32(16 * step),
          b.add(b.div(warpColumn, kUnitBytes / 2), b.i32(2 * pair)),
          plan.getTransposedRowBytes());
    return b.loadRight(columns, warpColumn, b.i32(2 * step), kChunkBytes,
                       pair * 16 * kChunkBytes);
  };
  return addChunkProducts(b, element, /*numLeft=*/1, loadLeft,
                          plan.warpColumns / 16, loadRight, totals);
}

void RowProducts::storeProducts(ValueRange totals) {
  Value laneRow = b.add(warpRow, b.div(lane, 4));
  Value laneColumn =
      b.add(b.add(firstColumn, warpColumn), b.mul(b.rem(lane, 4), b.i32(2)));
  for (int64_t half = 0; half < 2; ++half) {
    Value row = b.add(firstRow, b.toIndex(b.add(laneRow, b.i32(8 * half))));
    b.ifThen(b.less(row, numRows), [&] {
      for (int64_t i = 0, e = plan.warpColumns / 4; i < e; ++i) {
        // Two neighbouring columns of each fragment of 8.
        Value column = b.add(laneColumn, b.i32(8 * (i / 2) + i % 2));
        Value product = totals[4 * (i / 2) + 2 * half + i % 2];
        b.ifThen(b.less(column, b.i32(plan.numColumns)),
                 [&] { store(row, b.toIndex(column), product); });
      }
    });
  }
}

//===----------------------------------------------------------------------===//
// Tiles
//===----------------------------------------------------------------------===//

void RowProducts::emitTile() {
  Value zero = b.i32(0), one = b.i32(1);
  // Whoever still reads the last tile's memory does so before this.
  b.barrier();
  copyStage(zero, zero);
  b.commitCopies();
  SmallVector<Value> carried{zero};
  carried.append(plan.warpColumns / 2, b.f32(0.0));
  Value numChunks = b.index(llvm::divideCeil(plan.numFeatures, kChunk));
  SmallVector<Value> totals =
      b.loop(b.index(0), numChunks, 1, carried,
             [&](Value chunk, ValueRange old) -> SmallVector<Value> {
               b.waitForCopies(0);
               b.barrier();
               Value other = b.op<arith::XOrIOp>(old[0], one);
               Value following = b.add(chunk, b.index(1));
               b.ifThen(b.less(following, numChunks),
                        [&] { copyStage(b.toI32(following), other); });
               b.commitCopies();
               SmallVector<Value> next{other};
               next.append(multiplyChunk(old[0], old.drop_front()));
               return next;
             });
  storeProducts(ValueRange(totals).drop_front());
}

void RowProducts::emit() {
  b.loop(b.index(0), numRows, plan.getRows(), [&](Value row) {
    firstRow = row;
    Value last = b.sub(numRows, b.index(1));
    auto getRow = [&](Value place) -> ChunkCopies::Row {
      Value mine = b.add(firstRow, b.toIndex(place));
      SmallVector<Value> indices =
          getRowIndices(b, left, /*numInner=*/1, b.minSigned(mine, last));
      indices.push_back(b.index(0));
      return {b.addressOf(left, indices), /*offset=*/{}, b.less(mine, numRows)};
    };
    leftRows = copies.getRows(plan.getRows(), getRow);
    b.loop(b.index(0), b.index(plan.numColumns), plan.getColumns(),
           [&](Value column) {
             firstColumn = b.toI32(column);
             emitTile();
           });
  });
}

void mlir::moe::emitRowProducts(
    WarpBuilder &b, Value left, Value right, const RowProductPlan &plan,
    function_ref<void(Value row, Value column, Value product)> store) {
  RowProducts(b, left, right, plan, store).emit();
}
