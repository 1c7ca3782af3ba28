//===- SoftmaxMixCopies.cpp - Operands to shared memory -------------------===//

#include "SoftmaxMixCopies.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

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

ValueTile::ValueTile(SoftmaxMixOp op, int64_t numColumns, int64_t numKeys,
                     int64_t weightTerms, int64_t maxBlockColumns)
    : numKeys(numKeys), numColumns(numColumns) {
  Value v = op.getV();
  if (!v)
    return;
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

MixCopies::MixCopies(MixTiles &mix, Value thread, int64_t numThreads)
    : thread(thread), numThreads(numThreads), b(mix.b), mix(mix),
      features{b, getShaped(mix.op.getQ()).getDimSize(3), thread, numThreads} {}

void MixCopies::copyChunk(Value memref, Value shared, int64_t numRows,
                          Value first, Value chunk, bool areKeys) {
  Value zero = b.index(0);
  Value base = b.addressOf(memref, {mix.batch, mix.head, zero, zero});
  auto getRow = [&](Value number) -> ChunkCopies::Row {
    Value row = b.add(first, b.toIndex(number));
    if (areKeys)
      return {base, features.offsetOf(mix.clampKey(row)), mix.isReal(row)};
    return {base, features.offsetOf(mix.clampRow(row)),
            b.less(row, mix.numQueries)};
  };
  features.copy(features.getRows(numRows, getRow), shared, chunk);
}

//===----------------------------------------------------------------------===//
// Values
//===----------------------------------------------------------------------===//

void mlir::moe::storeValueUnit(WarpBuilder &b, const ValueTile &tile,
                               Value values, SmallVector<Value> row,
                               Value isReal, Value unit, Value place) {
  SmallVector<Value> columns;
  for (int64_t i = 0; i < 8; ++i) {
    Value column = b.toIndex(b.add(b.mul(unit, b.i32(8)), b.i32(i)));
    Value exists = b.less(column, b.index(tile.numColumns));
    row.back() = b.minSigned(column, b.index(tile.numColumns - 1));
    columns.push_back(
        b.select(b.both(isReal, exists), b.loadF32(values, row), b.f32(0.0)));
  }
  b.storeSplit(columns, place, tile.terms, tile.getTermBytes());
}

void MixCopies::copyValues(const ValueTile &tile, Value firstKey,
                           Value shared) {
  Value v = mix.op.getV();
  int64_t units = tile.blockColumns / 8;
  bool isCopy = getShaped(v).getElementType().isBF16() &&
                tile.numColumns % 8 == 0 && canCopyRows(v);
  auto copyUnit = [&](Value number, int64_t block) {
    Value row = b.div(number, units), unit = b.rem(number, units);
    Value key = b.add(firstKey, b.toIndex(row));
    Value isReal = mix.isReal(key);
    key = mix.clampKey(key);
    Value place = b.at(shared, b.swizzle(row, unit, tile.getRowBytes()));
    place = b.at(place, block * tile.getBlockBytes());
    unit = b.add(unit, b.i32(block * units));
    if (!isCopy)
      return storeValueUnit(b, tile, v, mix.getValuePlace(key, b.index(0)),
                            isReal, unit, place);
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
