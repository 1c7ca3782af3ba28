//===- LayerSums.cpp - The sums of a layer of experts ---------------------===//

#include "LayerSums.h"

#include "MoE/Dialect/MoE/IR/ExpertActivations.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Columns
//===----------------------------------------------------------------------===//

Value mlir::moe::getNumColumns(Emitter &e, GroupedLinearOp op) {
  Value numColumns = e.dim(op.getOuts()[0], 1);
  if (op.getGate() != GateLayout::Interleaved)
    return numColumns;
  std::optional<int64_t> constant = getConstantIntValue(numColumns);
  return constant ? e.index(2 * *constant) : e.mul(numColumns, e.index(2));
}

PanelPlace mlir::moe::findInPanels(Emitter &e, GroupedLinearOp op,
                                   Value numColumns, Value column) {
  int64_t columns = *op.getPacked();
  Value behind;
  if (op.hasPanelsOfHalves()) {
    columns /= 2;
    Value isFactor = e.compare(arith::CmpIPredicate::sge, column, numColumns);
    Value zero = e.index(0);
    column = e.sub(column, e.select(isFactor, numColumns, zero));
    behind = e.select(isFactor, e.index(columns), zero);
  }
  Value size = e.index(columns);
  Value last = e.sub(e.dim(op.getW(), 1), e.index(1));
  Value panel = arith::DivUIOp::create(e, column, size);
  Value lane = arith::RemUIOp::create(e, column, size);
  return {e.minSigned(panel, last), behind ? e.add(lane, behind) : lane};
}

//===----------------------------------------------------------------------===//
// What comes before and after the sums
//===----------------------------------------------------------------------===//

void LayerSums::allocate(const PanelGroup &group) {
  secondHalf = group.mostPanels * group.numVectors * e.width / 2;
  if (!isDirect())
    buffer = makeBlockSums(e, group);
}

ProductSums LayerSums::get(const LayerPart &part) {
  if (isDirect())
    return {y,
            [](Value row, Value column, bool) { return Values{row, column}; }};
  return {buffer, [=, this](Value row, Value column, bool isSecond) {
            Value place = e.sub(column, part.group.column);
            return Values{e.sub(row, part.firstRow),
                          e.add(place, e.index(isSecond ? secondHalf : 0))};
          }};
}

/// Calls `body` for the vectors of a group, or of a half of its columns.
void LayerSums::forEachVector(const LayerPart &part, bool isSecond,
                              function_ref<void(const Vector &vector)> body) {
  forEachVectorOfGroup(
      e, part.group, part.group.numVectors / (hasHalves() ? 2 : 1), numColumns,
      [&](const GroupVector &vector) {
        Value column = vector.column;
        if (isSecond)
          column = e.add(column, numColumns);
        body({column, vector.mask,
              e.add(vector.place, e.index(isSecond ? secondHalf : 0))});
      });
}

Value LayerSums::loadBias(const LayerPart &part, const Vector &vector) {
  if (!op.getBias())
    return e.f32(0.0);
  return e.loadFloats(op.getBias(), {part.expert, vector.column}, vector.mask);
}

void LayerSums::start(const LayerPart &part) {
  e.loop(part.firstRow, part.endRow, 1, [&](Value row) {
    for (bool isSecond : {false, true})
      if (!isSecond || hasHalves())
        forEachVector(part, isSecond, [&](const Vector &vector) {
          Value bias = loadBias(part, vector);
          if (isDirect())
            storeY(bias, row, vector.column, vector.mask);
          else
            e.storeVector(bias, buffer,
                          {e.sub(row, part.firstRow), vector.sums});
        });
  });
}

void LayerSums::storeY(Value values, Value row, Value column, Value mask) {
  Type element = getElementType(y);
  if (!element.isF32())
    values = arith::TruncFOp::create(e, e.vectorOf(element), values);
  e.storeVector(values, y, {row, column}, mask);
}

/// The sums of a row; without a row of x they are the bias.
Value LayerSums::loadSums(const LayerPart &part, Value row,
                          const Vector &vector) {
  Value sum = e.loadVector(buffer, {e.sub(row, part.firstRow), vector.sums});
  if (Value missing = isMissing(e, op.getRows(), row, numSources))
    sum = e.select(missing, loadBias(part, vector), sum);
  return sum;
}

/// Gates and factors that alternate, apart.
static std::pair<Value, Value> deinterleave(Emitter &e, Value a, Value b) {
  SmallVector<int64_t> even, odd;
  for (int64_t lane = 0; lane < e.width; ++lane) {
    even.push_back(2 * lane);
    odd.push_back(2 * lane + 1);
  }
  return {vector::ShuffleOp::create(e, a, b, even),
          vector::ShuffleOp::create(e, a, b, odd)};
}

void LayerSums::finishRow(const LayerPart &part, Value row) {
  switch (op.getGate()) {
  case GateLayout::None:
    return forEachVector(part, false, [&](const Vector &vector) {
      storeY(buildActivation(e, op, loadSums(part, row, vector)), row,
             vector.column, vector.mask);
    });
  case GateLayout::Concatenated:
    return forEachVector(part, false, [&](const Vector &gate) {
      Vector up{e.add(gate.column, numColumns), gate.mask,
                e.add(gate.sums, e.index(secondHalf))};
      storeY(buildGatedActivation(e, op, loadSums(part, row, gate),
                                  loadSums(part, row, up)),
             row, gate.column, gate.mask);
    });
  case GateLayout::Interleaved:
    break;
  }
  Value two = e.index(2), width = e.index(e.width);
  Value end =
      e.mul(part.group.numPanels, e.index(part.group.numVectors * e.width));
  e.loop(e.index(0), end, 2 * e.width, [&](Value offset) {
    Values halves;
    for (Value place : {offset, e.add(offset, width)}) {
      Value column = e.add(part.group.column, place);
      Value mask = part.group.hasTail ? e.firstLanes(e.sub(numColumns, column))
                                      : Value();
      halves.push_back(loadSums(part, row, {column, mask, place}));
    }
    auto [gate, up] = deinterleave(e, halves[0], halves[1]);
    Value column =
        arith::DivSIOp::create(e, e.add(part.group.column, offset), two);
    Value mask =
        part.group.hasTail ? e.firstLanes(e.sub(e.dim(y, 1), column)) : Value();
    storeY(buildGatedActivation(e, op, gate, up), row, column, mask);
  });
}

void LayerSums::finish(const LayerPart &part) {
  if (isDirect() && !op.getRows())
    return;
  e.loop(part.firstRow, part.endRow, 1, [&](Value row) {
    if (!isDirect())
      return finishRow(part, row);
    e.ifThen(isMissing(e, op.getRows(), row, numSources), [&] {
      forEachVector(part, false, [&](const Vector &vector) {
        storeY(loadBias(part, vector), row, vector.column, vector.mask);
      });
    });
  });
}

void LayerSums::clearRows(Value begin, Value end) {
  Value width = e.dim(y, 1);
  e.loop(begin, end, 1, [&](Value row) {
    e.loop(e.index(0), width, e.width, [&](Value column) {
      storeY(e.f32(0.0), row, column, e.firstLanes(e.sub(width, column)));
    });
  });
}
