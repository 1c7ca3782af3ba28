//===- SoftmaxMixCopies.cpp - Operands to shared memory -------------------===//

#include "SoftmaxMixCopies.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

static ShapedType getShaped(Value value) {
  return cast<ShapedType>(value.getType());
}

int64_t mlir::moe::getWeightTerms(SoftmaxMixOp op) {
  return op.getPrecision() == Precision::IEEE ? 3 : 2;
}

bool mlir::moe::hasTensorTypes(SoftmaxMixOp op) {
  auto q = getShaped(op.getQ()), k = getShaped(op.getK());
  Type element = q.getElementType();
  int64_t features = q.getDimSize(3);
  constexpr int64_t unit = kUnitBytes / 2;
  if (element != k.getElementType() || !(element.isBF16() || element.isF16()) ||
      ShapedType::isDynamic(features) || features % unit != 0)
    return false;
  return !op.getV() ||
         !ShapedType::isDynamic(getShaped(op.getV()).getShape().back());
}

ValueTile::ValueTile(SoftmaxMixOp op, int64_t numKeys, int64_t weightTerms,
                     int64_t maxBlockColumns)
    : numKeys(numKeys) {
  Value v = op.getV();
  if (!v)
    return;
  numColumns = getShaped(v).getShape().back();
  Type element = getShaped(v).getElementType();
  terms = element.isBF16() ? 1 : element.isF16() ? 2 : 3;
  terms = std::min(terms, weightTerms);
  blockColumns = llvm::PowerOf2Ceil(std::max<int64_t>(numColumns, 16));
  blockColumns = std::min(blockColumns, maxBlockColumns);
  width = llvm::alignTo(numColumns, blockColumns);
}

//===----------------------------------------------------------------------===//
// Features
//===----------------------------------------------------------------------===//

void MixCopies::copyChunk(Value memref, Value shared, int64_t numRows,
                          Value first, Value chunk, bool areKeys) {
  constexpr int64_t units = kChunkBytes / kUnitBytes;
  int64_t step = numThreads / units;
  int64_t rowBytes = 2 * getShaped(memref).getDimSize(3);
  Value unit = b.rem(thread, units), firstRow = b.div(thread, units);
  Value column =
      b.add(b.mul(chunk, b.i32(kChunkBytes)), b.mul(unit, b.i32(kUnitBytes)));
  Value zero = b.index(0);
  Value base = b.addressOf(memref, {mix.batch, mix.head, zero, zero});
  base = b.at(base, column);
  Value place = b.at(shared, b.swizzle(firstRow, unit, kChunkBytes));
  for (int64_t i = 0; i < numRows; i += step) {
    Value row = b.add(first, b.toIndex(b.add(firstRow, b.i32(i))));
    Value isReal = areKeys ? mix.isReal(row) : b.less(row, mix.numQueries);
    if (rowBytes % kChunkBytes != 0)
      isReal = b.both(isReal, b.less(column, b.i32(rowBytes)));
    row = areKeys ? mix.clampKey(row) : mix.clampRow(row);
    Value offset = b.castInt(b.mul(row, b.index(rowBytes)), b.getI64Type());
    b.copyAsync(b.at(place, i * kChunkBytes), b.at(base, offset), isReal);
  }
}

//===----------------------------------------------------------------------===//
// Values
//===----------------------------------------------------------------------===//

/// Eight values of a key as bf16 terms, 0 behind the last column.
void MixCopies::convertUnit(const ValueTile &tile, Value key, Value isReal,
                            Value unit, Value place) {
  SmallVector<Value> columns;
  for (int64_t i = 0; i < 8; ++i) {
    Value column = b.toIndex(b.add(b.mul(unit, b.i32(8)), b.i32(i)));
    Value exists = b.less(column, b.index(tile.numColumns));
    column = b.minSigned(column, b.index(tile.numColumns - 1));
    Value value = b.loadF32(mix.op.getV(), mix.getValuePlace(key, column));
    columns.push_back(b.select(b.both(isReal, exists), value, b.f32(0.0)));
  }
  b.storeSplit(columns, place, tile.terms, tile.getTermBytes());
}

void MixCopies::copyValues(const ValueTile &tile, Value firstKey,
                           Value shared) {
  Value v = mix.op.getV();
  int64_t units = tile.blockColumns / 8;
  bool isCopy = getShaped(v).getElementType().isBF16() &&
                tile.numColumns % 8 == 0 && hasWholeRows(v);
  auto copyUnit = [&](Value number, int64_t block) {
    Value row = b.div(number, units), unit = b.rem(number, units);
    Value key = b.add(firstKey, b.toIndex(row));
    Value isReal = mix.isReal(key);
    key = mix.clampKey(key);
    Value place = b.at(shared, b.swizzle(row, unit, tile.getRowBytes()));
    place = b.at(place, block * tile.getBlockBytes());
    unit = b.add(unit, b.i32(block * units));
    if (!isCopy)
      return convertUnit(tile, key, isReal, unit, place);
    Value column = b.mul(unit, b.i32(8));
    isReal = b.both(isReal, b.less(column, b.i32(tile.numColumns)));
    Value global = b.addressOf(v, mix.getValuePlace(key, b.toIndex(column)));
    b.copyAsync(place, global, isReal);
  };
  int64_t count = tile.numKeys * units;
  for (int64_t block = 0; block < tile.width / tile.blockColumns; ++block)
    for (int64_t i = 0; i < count; i += numThreads) {
      Value number = b.add(thread, b.i32(i));
      if (count - i >= numThreads)
        copyUnit(number, block);
      else
        b.ifThen(b.less(number, b.i32(count)),
                 [&] { copyUnit(number, block); });
    }
}
