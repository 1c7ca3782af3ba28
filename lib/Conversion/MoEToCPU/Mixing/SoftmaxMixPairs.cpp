//===- SoftmaxMixPairs.cpp - A tile's operands and pairs ------------------===//

#include "SoftmaxMixPairs.h"

using namespace mlir;
using namespace mlir::moe;

Value mlir::moe::viewTokens(Emitter &e, Value memref, Value batch, Value head) {
  if (!memref)
    return {};
  return head ? sliceLeading(e, memref, {batch, head})
              : sliceLeading(e, memref, {batch});
}

Value mlir::moe::viewBias(Emitter &e, Value memref, Value batch, Value head) {
  if (!memref)
    return {};
  auto type = cast<MemRefType>(memref.getType());
  Value zero = e.index(0);
  return sliceLeading(e, memref,
                      {type.getDimSize(0) == 1 ? zero : batch,
                       type.getDimSize(1) == 1 ? zero : head});
}

Value mlir::moe::isTileVisible(Emitter &e, const PairRule &rule, Value position,
                               Value firstColumn) {
  int64_t numColumns = getColumnVectors(e) * e.width;
  return rule.isBlockVisible(
      e, position, e.add(position, e.index(kGroupRows - 1)), firstColumn,
      e.add(firstColumn, e.index(numColumns - 1)));
}

PairTerms mlir::moe::makePairs(Emitter &e, const PairRule &rule, Value position,
                               Value firstColumn, Value rowLevel,
                               Value columnLevels) {
  PairTerms pair;
  if (!rule.admitsAll()) {
    pair.row = e.splat(e.toI32(position));
    pair.column = e.add(e.splat(e.toI32(firstColumn)), e.iota());
  }
  if (rowLevel) {
    pair.rowLevel = e.splat(rowLevel);
    pair.columnLevel = columnLevels;
  }
  return pair;
}
