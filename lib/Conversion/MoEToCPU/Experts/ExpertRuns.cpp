//===- ExpertRuns.cpp - The rows of experts -------------------------------===//

#include "ExpertRuns.h"

using namespace mlir;
using namespace mlir::moe;

ExpertRun mlir::moe::readRun(Emitter &e, Value offsets, Value expert,
                             Value numRows) {
  auto read = [&](Value at) {
    Value offset = e.toIndex(e.load(offsets, {at}));
    return e.minSigned(e.maxSigned(offset, e.index(0)), numRows);
  };
  Value begin = read(expert);
  return {begin, e.maxSigned(begin, read(e.add(expert, e.index(1))))};
}

Value mlir::moe::readRow(Emitter &e, Value rows, Value row, Value numSources) {
  if (!rows)
    return row;
  Value source = e.toIndex(e.load(rows, {row}));
  Value last = e.sub(numSources, e.index(1));
  return e.maxSigned(e.minSigned(source, last), e.index(0));
}

Value mlir::moe::isMissing(Emitter &e, Value rows, Value row,
                           Value numSources) {
  if (!rows)
    return {};
  // As an unsigned number a negative one is large.
  return e.compare(arith::CmpIPredicate::uge, e.toIndex(e.load(rows, {row})),
                   numSources);
}

void mlir::moe::forEachBlockOfRows(Emitter &e, Value begin, Value end,
                                   function_ref<void(Value, Value)> body) {
  int64_t rows = e.target.getExpertRows();
  e.loop(begin, end, rows, [&](Value first) {
    body(first, e.minSigned(e.add(first, e.index(rows)), end));
  });
}

Value mlir::moe::makeBlockSums(Emitter &e, const PanelGroup &group) {
  int64_t columns = group.mostPanels * group.numVectors * e.width;
  return e.scratch(
      {e.getIndexAttr(e.target.getExpertRows()), e.getIndexAttr(columns)},
      e.getF32Type());
}

void mlir::moe::forEachVectorOfGroup(
    Emitter &e, const PanelGroup &group, int64_t numVectors, Value numColumns,
    function_ref<void(const GroupVector &)> body) {
  Value end = e.mul(group.numPanels, e.index(numVectors * e.width));
  e.loop(e.index(0), end, e.width, [&](Value place) {
    Value column = e.add(group.column, place), mask;
    if (group.hasTail)
      mask = e.firstLanes(e.sub(numColumns, column));
    body({column, place, mask});
  });
}
