//===- RegisterTile.cpp - Sums of products in registers -------------------===//

#include "RegisterTile.h"

using namespace mlir;
using namespace mlir::moe;

Values RegisterTile::getZeros() const {
  return Values(numRows * numVectors, e.f32(0.0));
}

Values RegisterTile::multiplyAdd(function_ref<Value(int64_t)> getRow,
                                 ArrayRef<Value> columns,
                                 ValueRange sums) const {
  Values next;
  auto sum = sums.begin();
  for (int64_t row = 0; row < numRows; ++row) {
    Value lanes = getRow(row);
    for (Value column : columns) {
      next.push_back(usesBf16Dot ? e.dotPairs(lanes, column, *sum)
                                 : e.fma(lanes, column, *sum));
      ++sum;
    }
  }
  return next;
}

Values RegisterTile::getRow(ValueRange sums, int64_t row) const {
  return Values(sums.slice(row * numVectors, numVectors));
}

void RegisterTile::forEachSum(
    ValueRange sums, function_ref<void(int64_t, int64_t, Value)> body) const {
  for (int64_t row = 0; row < numRows; ++row)
    for (int64_t vector = 0; vector < numVectors; ++vector)
      body(row, vector, sums[row * numVectors + vector]);
}

//===----------------------------------------------------------------------===//
// The loop over k
//===----------------------------------------------------------------------===//

Values mlir::moe::loopOverK(Emitter &e, const KBlocks &blocks,
                            ValueRange carried,
                            function_ref<void(Value)> prefetch,
                            function_ref<Values(Value, ValueRange)> body) {
  if (!prefetch)
    return e.loop(blocks.first, blocks.end, 1, carried, body);
  return e.loop(blocks.first, blocks.end, blocks.size, carried,
                [&](Value first, ValueRange carried) -> Values {
                  prefetch(first);
                  Value end = e.add(first, e.index(blocks.size));
                  if (!blocks.areWhole)
                    end = e.minSigned(end, blocks.end);
                  return e.loop(first, end, 1, carried, body);
                });
}

void mlir::moe::prefetchLine(Emitter &e, Value memref, ValueRange indices,
                             unsigned locality, bool isWrite) {
  memref::PrefetchOp::create(e, memref, indices, isWrite, locality,
                             /*isDataCache=*/true);
}
