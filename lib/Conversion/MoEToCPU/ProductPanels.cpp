//===- ProductPanels.cpp - Weights as panels of columns -------------------===//

#include "ProductCore.h"
#include "StepLoop.h"

#include "MoE/Transforms/Transforms.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// How columns are cut
//===----------------------------------------------------------------------===//

int64_t PanelShape::getNumVectors() const {
  return e.target.getProductVectors();
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
                     bool mayEnd) {
    e.loop(begin, bound, most, [&](Value number) {
      Value count = most == 1
                        ? e.index(1)
                        : e.minSigned(e.sub(bound, number), e.index(most));
      body({e.mul(number, e.index(columns)), count, most, numVectors, mayEnd});
    });
  };
  std::optional<int64_t> constant = getConstantIntValue(numColumns);
  // Of an unknown number of columns the last panel is as wide as the others.
  if (!constant)
    return forEach(first, end, getNumVectors(), 1, /*mayEnd=*/true);
  Value wholeEnd = e.index(*constant / columns);
  if (*constant >= columns)
    forEach(first, e.minSigned(end, wholeEnd), getNumVectors(),
            std::min(getMostPanels(), *constant / columns), /*mayEnd=*/false);
  int64_t rest = *constant % columns;
  if (rest == 0)
    return;
  int64_t vectors = llvm::divideCeil(rest, e.width);
  if (pairOffset)
    vectors *= 2;
  else if (areEven)
    vectors = llvm::alignTo(vectors, 2);
  forEach(e.maxSigned(first, wholeEnd), end, vectors, 1, /*mayEnd=*/true);
}

void mlir::moe::forEachPartOfPanels(
    Emitter &e, Value numMatrices, Value numPanels,
    function_ref<void(Value matrix, Value first, Value end)> body) {
  // A thread that is late keeps the others waiting for a part at most.
  constexpr int64_t kPartsPerThread = 4;
  Value parts = e.index(1);
  if (Value threads = buildThreadCount(e)) {
    Value isAlone = e.compare(arith::CmpIPredicate::eq, threads, e.index(1));
    Value most =
        e.minSigned(numPanels, e.mul(threads, e.index(kPartsPerThread)));
    parts = e.select(isAlone, e.index(1), most);
  }
  e.parallel(e.mul(numMatrices, parts), [&](Value task) {
    Value part = arith::DivSIOp::create(e, task, numMatrices);
    Value matrix = arith::RemSIOp::create(e, task, numMatrices);
    auto bound = [&](Value number) -> Value {
      return arith::DivSIOp::create(e, e.mul(number, numPanels), parts);
    };
    body(matrix, bound(part), bound(e.add(part, e.index(1))));
  });
}

//===----------------------------------------------------------------------===//
// Panels
//===----------------------------------------------------------------------===//

/// The first column of a vector of the panel from `column` on.
Value ProductCore::getColumn(Value column, int64_t numVectors, int64_t vector) {
  if (!pairOffset || vector < numVectors / 2)
    return e.add(column, e.index(vector * e.width));
  return e.add(e.add(column, pairOffset),
               e.index((vector - numVectors / 2) * e.width));
}

/// The steps from `step` on of a panel of a group: where they lie, or in the
/// buffer that `fillPanel` fills.
ProductCore::Panel ProductCore::makePanel(const PanelGroup &group, Value slot,
                                          Value step) {
  int64_t numVectors = group.numVectors;
  Value column =
      e.add(group.column, e.mul(slot, e.index(shape.getNumColumns())));
  Panel panel{column, step, slot, numVectors, Values(numVectors), packed, {}};
  if (group.mayEnd)
    for (int64_t vector = 0; vector < numVectors; ++vector) {
      int64_t place = pairOffset ? vector % (numVectors / 2) : vector;
      Value first = e.add(column, e.index(place * e.width));
      panel.masks[vector] = e.firstLanes(e.sub(numColumns, first));
    }
  if (packed) {
    panel.at = [=, this](Value place, int64_t vector) {
      return Values{slot, place, e.index(vector * e.width)};
    };
    return panel;
  }
  Value first = arith::DivSIOp::create(e, step, e.index(getStepsOfPlace()));
  panel.memref = right.memref;
  panel.at = [=, this](Value place, int64_t vector) {
    return right.at(e.add(first, place), getColumn(column, numVectors, vector));
  };
  return panel;
}

void ProductCore::fillPanel(const Panel &panel, Value count) {
  switch (right.layout) {
  case ProductLayout::AlongColumns:
    return packColumns(panel, count);
  case ProductLayout::AlongSteps:
    return packSteps(panel, count);
  case ProductLayout::Panels:
    return; // which are read where they lie
  }
}

/// Vectors of two steps each as two of f32: a bf16 is the upper half of one.
std::pair<Value, Value> ProductCore::splitPairs(Value pairs) {
  Value low = arith::ShLIOp::create(e, pairs, e.i32(16));
  Value high = arith::AndIOp::create(e, pairs, e.i32(0xffff0000));
  return {e.bitcast(low, e.getF32Type()), e.bitcast(high, e.getF32Type())};
}

/// Lines of pairs, if they are any, as two of f32 each.
Values ProductCore::splitLines(ValueRange lines) {
  if (!getElementType(right.memref).isBF16() || inPairs)
    return Values(lines);
  Values split;
  for (Value line : lines) {
    auto [low, high] = splitPairs(line);
    split.append({low, high});
  }
  return split;
}

/// How the lines of memory that a chain of a group takes follow each other.
ProductCore::Lines ProductCore::getLines(const PanelGroup &group) const {
  constexpr int64_t kLineBytes = 64;
  int64_t bytes = getElementType(right.memref).getIntOrFloatBitWidth() / 8;
  int64_t columns = group.numVectors * e.width, steps = getStepsOfPlace();
  if (right.layout == ProductLayout::AlongSteps)
    return {columns, 1, kLineBytes / bytes};
  int64_t perLine = kLineBytes / (bytes * steps);
  return {int64_t(llvm::divideCeil(columns, perLine)), perLine, steps};
}

/// How many steps share a place of what tiles read.
int64_t ProductCore::getPlaceSteps() const {
  return inPairs ? 2 : getStepsOfPlace();
}

/// How many steps share an index of the right operand.
int64_t ProductCore::getStepsOfPlace() const {
  bool isPair = right.layout == ProductLayout::Panels &&
                getElementType(right.memref).isBF16();
  return isPair ? 2 : 1;
}

/// Brings lines of what is read next nearer while the block of places `number`
/// of a chain is multiplied: of the same columns in the chain that follows, or
/// of the next group's in the first one. The hardware does not foresee such
/// short runs, nor does it read on while tiles are multiplied that lie in
/// cache. Panels are as near as memory is fast when there are few tiles: two
/// ask for all that comes next. Once all lines were asked for, nothing is left
/// to do.
void ProductCore::prefetchNextGroup(const PanelGroup &group, Value step,
                                    Value number) {
  Lines lines = getLines(group);
  int64_t perBlock = right.layout == ProductLayout::Panels
                         ? std::max<int64_t>(lines.inARow * e.width / 2, 1)
                         : e.width;
  auto divide = [&](Value value, int64_t by) -> std::pair<Value, Value> {
    return {arith::DivUIOp::create(e, value, e.index(by)),
            arith::RemUIOp::create(e, value, e.index(by))};
  };
  // Blocks have `e.width` places.
  Value numLines = divide(e.mul(number, e.index(perBlock)), e.width).first;
  auto [slot, line] =
      divide(numLines, lines.inARow * (chainLength / lines.steps));
  Value isAny = e.compare(arith::CmpIPredicate::slt, slot, group.numPanels);
  auto [place, inARow] = divide(line, lines.inARow);
  Value size = e.index(shape.getNumColumns());
  Value first = e.add(group.column, e.mul(slot, size));
  step = e.add(step, e.index(chainLength));
  Value isLast = e.compare(arith::CmpIPredicate::sge, step, numSteps);
  step = e.select(isLast, e.index(0), step);
  Value across = e.select(isLast, e.mul(group.numPanels, size), e.index(0));
  step = e.add(step, e.mul(place, e.index(lines.steps)));
  step = divide(step, getStepsOfPlace()).first;
  // A block begins with a row of lines, unless rows are longer than blocks, and
  // lines of one vector lie side by side.
  Value begin = e.mul(inARow, e.index(lines.columns));
  e.ifThen(isAny, [&] {
    for (int64_t i = 0; i < perBlock; ++i) {
      int64_t offset = i % lines.inARow * lines.columns;
      int64_t lane = offset % e.width;
      Value vector = getColumnAt(first, group.numVectors,
                                 e.add(begin, e.index(offset - lane)))
                         .first;
      Value column = e.add(e.add(vector, e.index(lane)), across);
      prefetchLine(e, right.memref,
                   right.at(e.add(step, e.index(i / lines.inARow)), column),
                   kSecondCache);
    }
  });
}

/// How many places of a panel share a line of memory; 0 where a place takes
/// several, or where panels are buffers.
int64_t ProductCore::getPlacesOfLine(int64_t numVectors) const {
  constexpr int64_t kLineBytes = 64;
  int64_t bytes = getElementType(right.memref).getIntOrFloatBitWidth() / 8;
  int64_t placeBytes = numVectors * e.width * getStepsOfPlace() * bytes;
  return packed ? 0 : kLineBytes / placeBytes;
}

/// Brings a block of places of a panel nearer, or of what lies behind it, long
/// enough before it is read. Few rows wait for memory: a core that looks ahead
/// over some hundred instructions has 10 to 20 lines on their way where each
/// step takes one, and needs twice as many. With four lines a step it has them.
void ProductCore::prefetchAhead(const Panel &panel, Value place) {
  constexpr int64_t kLinesAhead = 64;
  int64_t places = getPlacesOfLine(panel.numVectors);
  for (int64_t i = 0; i < e.width; i += places)
    prefetchLine(e, right.memref,
                 panel.at(e.add(place, e.index(kLinesAhead * places + i)), 0),
                 kFirstCache);
}

/// From columns that lie side by side.
void ProductCore::packColumns(const Panel &panel, Value count) {
  auto load = [&](Value place, int64_t vector) {
    Value column = getColumn(panel.column, panel.numVectors, vector);
    Value step = e.add(panel.step, place);
    Value floats =
        e.loadFloats(right.memref, right.at(step, column), panel.masks[vector]);
    if (right.isMissing)
      floats = e.select(right.isMissing(step), e.f32(0.0), floats);
    return floats;
  };
  if (!inPairs) {
    e.loop(e.index(0), count, 1, [&](Value place) {
      for (int64_t vector = 0; vector < panel.numVectors; ++vector)
        e.storeVector(load(place, vector), panel.memref,
                      panel.at(place, vector));
    });
    return;
  }
  // The upper halves of two f32 are what they were as bf16.
  Value last = e.sub(count, e.index(1));
  Value numPairs = arith::CeilDivSIOp::create(e, count, e.index(2));
  e.loop(e.index(0), numPairs, 1, [&](Value pair) {
    Value first = e.mul(pair, e.index(2)), second = e.add(first, e.index(1));
    Value exists = e.compare(arith::CmpIPredicate::sle, second, last);
    second = e.minSigned(second, last);
    for (int64_t vector = 0; vector < panel.numVectors; ++vector) {
      Value low = e.bitcast(load(first, vector), e.getI32Type());
      Value high = e.bitcast(load(second, vector), e.getI32Type());
      high = e.select(exists, high, e.i32(0));
      low = arith::ShRUIOp::create(e, low, e.i32(16));
      e.storeVector(arith::OrIOp::create(e, low, high), panel.memref,
                    panel.at(pair, vector));
    }
  });
}

/// The place of a step in a buffer: one of a pair has the pair's.
Value ProductCore::toPlace(Value step) {
  return inPairs ? Value(arith::DivSIOp::create(e, step, e.index(2))) : step;
}

/// The column at `offset` of the panel from `first` on; and where it must stop.
std::pair<Value, Value>
ProductCore::getColumnAt(Value first, int64_t numVectors, Value offset) {
  Value column = e.add(first, offset);
  Value last = e.sub(numColumns, e.index(1));
  if (!pairOffset)
    return {column, last};
  Value half = e.index(numVectors / 2 * e.width);
  Value isSecond = e.compare(arith::CmpIPredicate::sge, offset, half);
  Value shift = e.select(isSecond, e.sub(pairOffset, half), e.index(0));
  Value behind = e.select(isSecond, pairOffset, e.index(0));
  return {e.add(column, shift), e.add(last, behind)};
}

/// The columns at `offset` of a panel, a vector of them, by a vector of steps,
/// or of pairs of steps, from step `first` of the panel on: a vector of columns
/// for each step or pair. `rest`, if not null, is how many of the steps exist.
Values ProductCore::loadBlock(const Panel &panel, Value offset, Value first,
                              Value rest) {
  Type element = getElementType(right.memref);
  auto [column, last] = getColumnAt(panel.column, panel.numVectors, offset);
  Values lines;
  for (int64_t lane = 0; lane < e.width; ++lane) {
    Value position = e.add(column, e.index(lane));
    if (panel.masks.front())
      position = e.minSigned(position, last);
    Values place = right.at(e.add(panel.step, first), position);
    if (!element.isBF16()) {
      lines.push_back(e.loadFloats(right.memref, place,
                                   rest ? e.firstLanes(rest) : Value()));
      continue;
    }
    lines.push_back(e.loadPairs(right.memref, place, rest));
  }
  return splitLines(transposeLanes(e, lines));
}

/// Stores a block from `place` of the buffer on; of the lines of `rest` steps
/// those that there are, the last of pairs with a zero.
void ProductCore::storeBlock(const Panel &panel, ValueRange lines, Value place,
                             Value offset, Value rest) {
  int64_t steps = inPairs ? 2 : 1;
  for (auto [number, line] : llvm::enumerate(lines)) {
    auto store = [&] {
      e.storeVector(line, packed,
                    {panel.slot, e.add(place, e.index(number)), offset});
    };
    if (rest)
      e.ifThen(
          e.compare(arith::CmpIPredicate::slt, e.index(steps * number), rest),
          store);
    else
      store();
  }
}

/// How many steps that lie side by side share a lane: a pair of bf16.
int64_t ProductCore::getStepsOfLane() const {
  return getElementType(right.memref).isBF16() ? 2 : 1;
}

/// Steps of a vector of columns that lie side by side, by blocks; the last one
/// may have fewer.
void ProductCore::forEachBlock(
    Value count, function_ref<void(Value first, Value rest)> body) {
  int64_t perLine = getStepsOfLane() * e.width;
  Value rest = e.rest(count, perLine), wholeEnd = e.sub(count, rest);
  e.loop(e.index(0), wholeEnd, perLine,
         [&](Value first) { body(first, Value()); });
  std::optional<int64_t> constant = getConstantIntValue(rest);
  if (!constant || *constant != 0)
    e.ifThen(e.compare(arith::CmpIPredicate::ne, rest, e.index(0)),
             [&] { body(wholeEnd, rest); });
}

/// From steps that lie side by side.
void ProductCore::packSteps(const Panel &panel, Value count) {
  e.loop(e.index(0), e.index(panel.numVectors * e.width), e.width,
         [&](Value offset) {
           forEachBlock(count, [&](Value first, Value rest) {
             storeBlock(panel, loadBlock(panel, offset, first, rest),
                        toPlace(first), offset, rest);
           });
         });
}
