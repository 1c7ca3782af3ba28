//===- PanelShape.cpp - How columns are cut into panels -------------------===//

#include "PanelShape.h"

#include "MoE/Transforms/Transforms.h"

using namespace mlir;
using namespace mlir::moe;

int64_t PanelShape::getNumVectors() const {
  return numVectors ? numVectors : e.target.getProductVectors();
}

int64_t PanelShape::getNumColumns() const {
  return getNumVectors() * e.width / (pairOffset ? 2 : 1);
}

int64_t PanelShape::getMostPanels() const {
  return e.target.getProductPanels();
}

Value PanelShape::getNumPanels() const {
  if (std::optional<int64_t> constant = getConstantIntValue(numColumns))
    return e.index(llvm::divideCeil(*constant, getNumColumns()));
  return arith::CeilDivSIOp::create(e, numColumns, e.index(getNumColumns()));
}

void PanelShape::forEachGroup(
    Value first, Value end, function_ref<void(const PanelGroup &)> body) const {
  int64_t columns = getNumColumns();
  auto forEach = [&](Value begin, Value bound, int64_t numVectors, int64_t most,
                     bool hasTail) {
    e.loop(begin, bound, most, [&](Value number) {
      Value count = most == 1
                        ? e.index(1)
                        : e.minSigned(e.sub(bound, number), e.index(most));
      body({e.mul(number, e.index(columns)), count, most, numVectors, hasTail});
    });
  };
  std::optional<int64_t> constant = getConstantIntValue(numColumns);
  // Of an unknown number of columns the last panel is as wide as the others.
  if (!constant)
    return forEach(first, end, getNumVectors(), 1, /*hasTail=*/true);
  Value wholeEnd = e.index(*constant / columns);
  if (*constant >= columns)
    forEach(first, e.minSigned(end, wholeEnd), getNumVectors(),
            std::min(getMostPanels(), *constant / columns), /*hasTail=*/false);
  int64_t rest = *constant % columns;
  if (rest == 0)
    return;
  int64_t vectors = llvm::divideCeil(rest, e.width);
  if (pairOffset)
    vectors *= 2;
  else if (areEven)
    vectors = llvm::alignTo(vectors, 2);
  forEach(e.maxSigned(first, wholeEnd), end, vectors, 1, /*hasTail=*/true);
}

Value PanelShape::getColumn(Value column, int64_t numVectors,
                            int64_t vector) const {
  if (!pairOffset || vector < numVectors / 2)
    return e.add(column, e.index(vector * e.width));
  return e.add(e.add(column, pairOffset),
               e.index((vector - numVectors / 2) * e.width));
}

std::pair<Value, Value>
PanelShape::getColumnAt(Value column, int64_t numVectors, Value offset) const {
  column = e.add(column, offset);
  Value last = e.sub(numColumns, e.index(1));
  if (!pairOffset)
    return {column, last};
  Value half = e.index(numVectors / 2 * e.width);
  Value isSecond = e.compare(arith::CmpIPredicate::sge, offset, half);
  Value shift = e.select(isSecond, e.sub(pairOffset, half), e.index(0));
  Value behind = e.select(isSecond, pairOffset, e.index(0));
  return {e.add(column, shift), e.add(last, behind)};
}

Values PanelShape::getMasks(Value column, int64_t numVectors) const {
  Values masks;
  for (int64_t vector = 0; vector < numVectors; ++vector) {
    int64_t position = pairOffset ? vector % (numVectors / 2) : vector;
    Value first = e.add(column, e.index(position * e.width));
    masks.push_back(e.firstLanes(e.sub(numColumns, first)));
  }
  return masks;
}

void mlir::moe::forEachPartOfPanels(
    Emitter &e, Value numMatrices, Value numPanels,
    function_ref<void(Value matrix, Value first, Value end)> body) {
  // Each thread has two chunks of the loop, one as far from its start as the
  // other from its end: with a part of every matrix for each thread these are
  // equal panels of all matrices. Rows are copied for each part.
  Value parts = e.index(1);
  if (Value threads = buildThreadCount(e))
    parts = e.minSigned(numPanels, threads);
  e.parallel(e.mul(numMatrices, parts), [&](Value task) {
    Value part = arith::DivSIOp::create(e, task, numMatrices);
    Value matrix = arith::RemSIOp::create(e, task, numMatrices);
    auto bound = [&](Value number) -> Value {
      return arith::DivSIOp::create(e, e.mul(number, numPanels), parts);
    };
    body(matrix, bound(part), bound(e.add(part, e.index(1))));
  });
}
