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
