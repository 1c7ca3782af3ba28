//===- MixTiles.cpp - Tiles of queries and keys ---------------------------===//

#include "MixTiles.h"

#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"

using namespace mlir;
using namespace mlir::moe;

static Value getDim(ThreadBuilder &b, Value memref, int64_t dim) {
  return b.createOrFold<memref::DimOp>(memref, dim);
}

MixTiles::MixTiles(WarpBuilder &b, SoftmaxMixOp op, MixLayout layout)
    : b(b), op(op), layout(std::move(layout)), pairLogits(op) {
  numQueries = getDim(b, op.getQ(), 2);
  numKeys = getDim(b, op.getK(), 2);
  origin = op.getOrigin() ? op.getOrigin() : b.sub(numKeys, numQueries);
}

SmallVector<Value>
MixTiles::forEachTile(ValueRange initial,
                      function_ref<SmallVector<Value>(ValueRange)> emitTile) {
  Value zero = b.index(0);
  auto emitRows = [&](Value row, ValueRange carried) {
    firstRow = row;
    return emitTile(carried);
  };
  auto emitHead = [&](Value index, ValueRange carried) {
    head = index;
    return b.loop(zero, numQueries, layout.numRows, carried, emitRows);
  };
  auto emitBatch = [&](Value index, ValueRange carried) {
    batch = index;
    return b.loop(zero, getDim(b, op.getQ(), 1), 1, carried, emitHead);
  };
  return b.loop(zero, getDim(b, op.getQ(), 0), 1, initial, emitBatch);
}

void MixTiles::forEachTile(function_ref<void()> emitTile) {
  forEachTile(ValueRange(), [&](ValueRange) -> SmallVector<Value> {
    emitTile();
    return {};
  });
}

std::pair<Value, Value> MixTiles::getKeyRange() {
  Value rows =
      b.minSigned(b.sub(numQueries, firstRow), b.index(layout.numRows));
  return pairLogits.rule.getColumns(b, b.add(origin, firstRow), rows, numKeys,
                                    layout.numKeys);
}

Value MixTiles::clampKey(Value key) {
  return b.minSigned(key, b.sub(numKeys, b.index(1)));
}

Value MixTiles::clampRow(Value row) {
  return b.minSigned(row, b.sub(numQueries, b.index(1)));
}

SmallVector<Value> MixTiles::getValuePlace(Value key, Value column) {
  if (areValuesPerHead(op.getV()))
    return {batch, head, key, column};
  return {batch, key, column};
}

Value MixTiles::positionOf(Value row) {
  return b.add(b.toI32(b.add(origin, firstRow)), row);
}

//===----------------------------------------------------------------------===//
// Key biases
//===----------------------------------------------------------------------===//

int64_t MixTiles::getBiasBytes(SoftmaxMixOp op, int64_t numKeys) {
  return numKeys * sizeof(float) * (op.getKeyLevel() ? 2 : 1);
}

Value MixTiles::isUnmasked(Value key) {
  if (!op.getKeyMask())
    return {};
  return memref::LoadOp::create(b, op.getKeyMask(), ValueRange{batch, key});
}

Value MixTiles::isReal(Value key) {
  Value exists = b.less(key, numKeys);
  Value unmasked = isUnmasked(clampKey(key));
  return unmasked ? b.both(exists, unmasked) : exists;
}

void MixTiles::writeBiases(Value thread, Value firstKey, Value shared) {
  b.ifThen(b.less(thread, b.i32(layout.numKeys)), [&] {
    Value key = b.add(firstKey, b.toIndex(thread));
    Value bias = op.getKeyBias()
                     ? b.loadF32(op.getKeyBias(), {batch, head, clampKey(key)})
                     : b.f32(0.0);
    bias = b.select(isReal(key), bias, b.negInfinity());
    Value place = b.at(shared, b.mul(thread, b.i32(sizeof(float))));
    b.store(bias, place, sizeof(float));
    if (op.getKeyLevel())
      b.store(b.loadF32(op.getKeyLevel(), {batch, clampKey(key)}),
              b.at(place, layout.numKeys * sizeof(float)), sizeof(float));
  });
}

bool mlir::moe::isBiasShared(Value bias, int64_t dim) {
  return cast<MemRefType>(bias.getType()).getDimSize(dim) == 1;
}

Value mlir::moe::loadPairBias(ThreadBuilder &b, Value bias, Value batch,
                              Value head, Value query, Value key) {
  Value zero = b.index(0);
  return b.loadF32(bias, {isBiasShared(bias, 0) ? zero : batch,
                          isBiasShared(bias, 1) ? zero : head, query, key});
}
