//===- FeatureChunks.cpp - Chunks of features in shared memory ------------===//

#include "FeatureChunks.h"

#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Utils/StaticValueUtils.h"
#include "mlir/Interfaces/ViewLikeInterface.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Copies
//===----------------------------------------------------------------------===//

static constexpr int64_t kUnits = kChunkBytes / kUnitBytes;

bool mlir::moe::hasWholeRows(Value value) {
  auto type = dyn_cast<MemRefType>(value.getType());
  if (!type)
    return true;
  SmallVector<int64_t> strides;
  int64_t offset, rank = type.getRank();
  return succeeded(type.getStridesAndOffset(strides, offset)) &&
         strides[rank - 1] == 1 &&
         strides[rank - 2] == type.getDimSize(rank - 1);
}

/// Whether the first element of `buffer` lies at a multiple of a unit, as those
/// of the buffers do of which it is a view: views may begin anywhere along all
/// dims but the last, if the rows are whole units.
static bool startsAtUnit(Value buffer) {
  constexpr int64_t unit = kUnitBytes / 2;
  while (Operation *op = buffer.getDefiningOp()) {
    if (auto view = dyn_cast<memref::SubViewOp>(op)) {
      int64_t width = view.getSourceType().getShape().back();
      std::optional<int64_t> begin =
          getConstantIntValue(view.getMixedOffsets().back());
      if (!begin || *begin % unit != 0 || ShapedType::isDynamic(width) ||
          width % unit != 0)
        return false;
      buffer = view.getSource();
    } else if (isa<ViewLikeOpInterface, UnrealizedConversionCastOp>(op)) {
      buffer = op->getOperand(0);
    } else {
      return true;
    }
  }
  return true;
}

/// Whether `buffer` may lie in global memory. Of a tensor that is not known
/// yet, and assumed.
static bool isGlobal(Value buffer) {
  while (Operation *op = buffer.getDefiningOp()) {
    auto type = dyn_cast<MemRefType>(buffer.getType());
    if (type && gpu::GPUDialect::hasWorkgroupMemoryAddressSpace(type))
      return false;
    // Buffers of a block will lie in workgroup memory.
    if (isa<memref::AllocOp>(op) && op->getParentOfType<scf::ForallOp>())
      return false;
    if (!isa<ViewLikeOpInterface, UnrealizedConversionCastOp>(op))
      return true;
    buffer = op->getOperand(0);
  }
  auto type = dyn_cast<MemRefType>(buffer.getType());
  return !type || !gpu::GPUDialect::hasWorkgroupMemoryAddressSpace(type);
}

bool mlir::moe::canCopyRows(Value rows) {
  return !isa<MemRefType>(rows.getType()) ||
         (hasWholeRows(rows) && isGlobal(rows) && startsAtUnit(rows));
}

Value ChunkCopies::offsetOf(Value row) {
  return b.castInt(b.mul(row, b.index(2 * numFeatures)), b.getI64Type());
}

SmallVector<ChunkCopies::Row>
ChunkCopies::getRows(int64_t numRows, function_ref<Row(Value)> getRow) {
  SmallVector<Row> rows;
  for (int64_t i = 0; i < numRows; i += rowsAtOnce())
    rows.push_back(getRow(b.add(b.div(thread, kUnits), b.i32(i))));
  return rows;
}

void ChunkCopies::copy(ArrayRef<Row> rows, Value shared, Value chunk) {
  Value unit = b.rem(thread, kUnits);
  Value place =
      b.at(shared, b.swizzle(b.div(thread, kUnits), unit, kChunkBytes));
  Value column =
      b.add(b.mul(chunk, b.i32(kChunkBytes)), b.mul(unit, b.i32(kUnitBytes)));
  for (auto [i, row] : llvm::enumerate(rows)) {
    Value isReal = row.isReal;
    if (numFeatures % kChunk != 0)
      isReal = b.both(isReal, b.less(column, b.i32(2 * numFeatures)));
    Value from = b.at(row.base, column);
    b.copyAsync(b.at(place, i * rowsAtOnce() * kChunkBytes),
                row.offset ? b.at(from, row.offset) : from, isReal);
  }
}

//===----------------------------------------------------------------------===//
// Products
//===----------------------------------------------------------------------===//

SmallVector<Value>
mlir::moe::addChunkProducts(WarpBuilder &b, Type element, int64_t numLeft,
                            LoadOperand loadLeft, int64_t numPairs,
                            LoadOperand loadRight, ValueRange totals) {
  constexpr int64_t steps = kChunk / 16;
  SmallVector<SmallVector<Value>> left;
  for (int64_t i = 0; i < numLeft; ++i)
    for (int64_t step = 0; step < steps; ++step)
      left.push_back(loadLeft(i, step));
  // One pair at a time: fewer sums of the chunk are alive than with the
  // features outermost.
  SmallVector<Value> next(totals);
  for (int64_t pair = 0; pair < numPairs; ++pair) {
    SmallVector<SmallVector<Value>> sums(2 * numLeft,
                                         SmallVector<Value>(4, b.f32(0.0)));
    for (int64_t step = 0; step < steps; ++step) {
      SmallVector<Value> right = loadRight(pair, step);
      for (auto [number, sum] : llvm::enumerate(sums))
        sum = b.multiplyAdd(left[number / 2 * steps + step],
                            ArrayRef(right).slice(number % 2 * 2, 2), sum,
                            element);
    }
    for (auto [number, sum] : llvm::enumerate(sums)) {
      int64_t fragment = 2 * (number / 2 * numPairs + pair) + number % 2;
      for (int64_t part = 0; part < 4; ++part)
        next[4 * fragment + part] = b.add(next[4 * fragment + part], sum[part]);
    }
  }
  return next;
}
