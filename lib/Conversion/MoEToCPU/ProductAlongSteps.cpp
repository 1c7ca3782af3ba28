//===- ProductAlongSteps.cpp - Few rows by steps side by side -------------===//
//
// Weights whose steps lie side by side are read in the order of their
// addresses where there are few rows, as blocks that are transposed in
// registers: a copy as panels would cost more than the product.
//
//===----------------------------------------------------------------------===//

#include "ProductCore.h"

#include "StepLoop.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Blocks
//===----------------------------------------------------------------------===//

/// As much as `numLanes` lanes of a vector of columns hold from the columns
/// behind the panel's, in the order of addresses: what is read next where
/// columns lie one behind the other.
void ProductCore::prefetchNextColumns(const Panel &panel, int64_t vector,
                                      Value first, int64_t numLanes) {
  constexpr int64_t kLineBits = 512;
  int64_t perLine =
      kLineBits / getElementType(right.memref).getIntOrFloatBitWidth();
  int64_t numLines = getStepsOfLane() * numLanes * e.width / perLine;
  Value place = e.mul(e.add(panel.step, first), e.index(e.width));
  Value column = e.add(getColumn(panel.column, panel.numVectors, vector),
                       e.index(e.width));
  for (int64_t line = 0; line < numLines; ++line)
    prefetchLine(e, right.memref,
                 right.at(e.add(place, e.index(line * perLine)), column),
                 kSecondCache);
}

/// Adds the products of row `number` with lines, in f32 or in pairs, from step
/// `first` on to its chain.
void ProductCore::multiplyLines(const Panel &panel, const RowRange &rows,
                                Value number, Value first,
                                function_ref<Value(int64_t line)> getLine,
                                int64_t numLines) {
  Value row = e.add(rows.first, number);
  Value leftRow = getLeftRow(row);
  Value place = toPlace(first), step = e.add(panel.step, first);
  int64_t perLine = inPairs ? 2 : 1;
  Value sum = e.loadVector(chains, {number, e.index(0)});
  for (int64_t line = 0; line < numLines; ++line)
    sum = multiplyAdd(splatLeft(number, leftRow,
                                e.add(step, e.index(perLine * line)),
                                e.add(place, e.index(line))),
                      getLine(line), sum);
  e.storeVector(sum, chains, {number, e.index(0)});
}

/// Adds the products of all rows with a block to their chains: those of the
/// first from registers, of the others from a copy.
void ProductCore::multiplyBlock(const Panel &panel, const RowRange &rows,
                                int64_t vector, Value first, Value rest) {
  Value numRows = e.sub(rows.end, rows.first), zero = e.index(0);
  if (!rest)
    prefetchNextColumns(panel, vector, first, e.width);
  Values lines = loadBlock(panel, e.index(vector * e.width), first, rest);
  int64_t numLines = lines.size();
  auto load = [&](Value line) {
    return e.loadVector(packed, {zero, line, zero});
  };
  if (rest) {
    storeBlock(panel, lines, zero, zero, rest);
    Value count =
        inPairs ? Value(arith::CeilDivSIOp::create(e, rest, e.index(2))) : rest;
    e.loop(zero, numRows, 1, [&](Value number) {
      e.loop(zero, count, 1, [&](Value line) {
        Value step = e.add(first, inPairs ? e.mul(line, e.index(2)) : line);
        multiplyLines(
            panel, rows, number, step, [&](int64_t) { return load(line); }, 1);
      });
    });
    return;
  }
  multiplyLines(
      panel, rows, zero, first, [&](int64_t line) { return lines[line]; },
      numLines);
  e.ifThen(e.compare(arith::CmpIPredicate::sgt, numRows, e.index(1)), [&] {
    storeBlock(panel, lines, zero, zero, rest);
    e.loop(e.index(1), numRows, 1, [&](Value number) {
      multiplyLines(
          panel, rows, number, first,
          [&](int64_t line) { return load(e.index(line)); }, numLines);
    });
  });
}

/// Four lanes from memory: f32, or pairs of bf16.
static Value loadFourLanes(Emitter &e, Value memref, ValueRange at) {
  Type element = getElementType(memref);
  int64_t size = element.isBF16() ? 8 : 4;
  Value lanes =
      vector::LoadOp::create(e, VectorType::get({size}, element), memref, at);
  if (element.isBF16())
    return vector::BitCastOp::create(e, VectorType::get({4}, e.getI32Type()),
                                     lanes);
  return element.isF32() ? lanes
                         : Value(arith::ExtFOp::create(
                               e, VectorType::get({4}, e.getF32Type()), lanes));
}

/// Four lanes of each of a vector of columns, from step `first` of the panel
/// on, as lines. A vector has the four of one column, and behind them those of
/// the fourth column after it: half of the shuffles are part of loads.
Values ProductCore::loadFourLines(const Panel &panel, int64_t vector,
                                  Value first) {
  auto [column, last] =
      getColumnAt(panel.column, panel.numVectors, e.index(vector * e.width));
  auto load = [&](int64_t lane) {
    Value position = e.add(column, e.index(lane));
    if (panel.masks.front())
      position = e.minSigned(position, last);
    return loadFourLanes(e, right.memref,
                         right.at(e.add(panel.step, first), position));
  };
  Values rows;
  for (int64_t lane = 0; lane < 4; ++lane) {
    Value row = load(lane);
    if (e.width == 8)
      row = vector::ShuffleOp::create(
          e, row, load(lane + 4), llvm::to_vector(llvm::seq<int64_t>(0, 8)));
    rows.push_back(row);
  }
  return splitLines(transposeInGroups(e, rows));
}

/// The chains of some rows with the products of four lanes of columns added.
Values ProductCore::multiplyFourLines(const Panel &panel, const Tile &tile,
                                      int64_t vector, Value first,
                                      ValueRange carried) {
  prefetchNextColumns(panel, vector, first, 4);
  Values sums(carried);
  for (auto [i, line] : llvm::enumerate(loadFourLines(panel, vector, first))) {
    Value place = e.add(first, e.index(i)), step = e.add(panel.step, place);
    for (auto [number, leftRow] : llvm::enumerate(tile.leftRows))
      sums[number] = e.fma(splatLeft(e.index(number), leftRow, step, place),
                           line, sums[number]);
  }
  return sums;
}

//===----------------------------------------------------------------------===//
// Chains
//===----------------------------------------------------------------------===//

/// The steps that several chains of few rows are formed of at once: those of
/// all whole chains, where a row waits for its sums, and steps lie side by
/// side.
int64_t ProductCore::getStepsOfWholeChains() const {
  std::optional<int64_t> steps = getConstantIntValue(numSteps);
  bool waits = right.layout == ProductLayout::AlongSteps && waitsForSums();
  return waits && steps ? llvm::alignDown(*steps, chainLength) : 0;
}

/// The most rows that several chains are formed of at once: as measured. The
/// sums of two chains and the lines do not fit the registers of more, where a
/// block of lines is read for all rows once.
int64_t ProductCore::getMostRowsOfChains() const {
  return getElementType(right.memref).isBF16() ? 5 : 4;
}

/// `numChains` chains of each of `numRows` rows at once, as often as there are
/// as many from step `first` to `end`: more sums are in flight than one after
/// the other.
void ProductCore::multiplyChains(const RowRange &rows, int64_t numRows,
                                 int64_t numChains, int64_t first, int64_t end,
                                 const PanelGroup &narrow, int64_t vector) {
  Value zero = e.index(0);
  int64_t size = numChains * chainLength;
  int64_t lanesSteps = 4 * getStepsOfLane();
  e.loop(e.index(first), e.index(end), size, [&](Value step) {
    Panel panel = makePanel(narrow, zero, step);
    Tile tile = makeTile(rows.first, numRows, step, e.index(size));
    Values sums(numChains * numRows, e.f32(0.0));
    sums = e.loop(zero, e.index(chainLength), lanesSteps, sums,
                  [&](Value place, ValueRange carried) {
                    Values next;
                    for (int64_t chain = 0; chain < numChains; ++chain)
                      llvm::append_range(
                          next, multiplyFourLines(
                                    panel, tile, vector,
                                    e.add(place, e.index(chain * chainLength)),
                                    carried.slice(chain * numRows, numRows)));
                    return next;
                  });
    for (auto [i, sum] : llvm::enumerate(sums))
      addChain(panel, tile.rows[i % numRows], vector, sum);
  });
}

/// All whole chains of few rows; gives the step that is left to begin with.
Value ProductCore::multiplyWholeChains(const RowRange &rows,
                                       const PanelGroup &narrow,
                                       int64_t vector) {
  int64_t steps = getStepsOfWholeChains(), mostRows = getMostRowsOfChains();
  Value zero = e.index(0);
  if (steps == 0)
    return zero;
  Value numRows = e.sub(rows.end, rows.first);
  auto multiply = [&](int64_t number) {
    int64_t most = number == 1 ? kMostChains : kMostChains / 2;
    int64_t numChains = std::min(most, steps / chainLength);
    int64_t end = llvm::alignDown(steps, numChains * chainLength);
    multiplyChains(rows, number, numChains, 0, end, narrow, vector);
    if (end < steps)
      multiplyChains(rows, number, 1, end, steps, narrow, vector);
  };
  Value areFew =
      e.compare(arith::CmpIPredicate::sle, numRows, e.index(mostRows));
  e.ifThen(areFew, [&] { switchRows(numRows, 1, mostRows, multiply); });
  return e.select(areFew, e.index(steps), zero);
}

/// Few rows wait for the weights: steps that lie side by side are multiplied as
/// they are read, in the order of their addresses, one vector of columns of the
/// panel after the other.
void ProductCore::multiplyBlocks(const RowRange &rows, const PanelGroup &narrow,
                                 int64_t vector) {
  Value numRows = e.sub(rows.end, rows.first), zero = e.index(0);
  Value begin = multiplyWholeChains(rows, narrow, vector);
  e.loop(begin, numSteps, chainLength, [&](Value step) {
    Value count = getChainSteps(step);
    Panel panel = makePanel(narrow, zero, step);
    e.loop(zero, numRows, 1, [&](Value number) {
      if (copied)
        copyLeft(getLeftRow(e.add(rows.first, number)), number, step, count);
      e.storeVector(e.f32(0.0), chains, {number, zero});
    });
    forEachBlock(count, [&](Value first, Value rest) {
      multiplyBlock(panel, rows, vector, first, rest);
    });
    e.loop(zero, numRows, 1, [&](Value number) {
      addChain(panel, e.add(rows.first, number), vector,
               e.loadVector(chains, {number, zero}));
    });
  });
}

/// One vector of columns of a group after the other, as they lie in memory.
void ProductCore::multiplyAlongSteps(const RowRange &rows,
                                     const PanelGroup &group) {
  Value one = e.index(1);
  int64_t vectors = pairOffset ? 2 : 1;
  e.loop(e.index(0), group.numPanels, 1, [&](Value slot) {
    Value size = e.index(shape.getNumColumns());
    Value first = e.add(group.column, e.mul(slot, size));
    e.loop(e.index(0), e.index(group.numVectors / vectors * e.width), e.width,
           [&](Value offset) {
             Value column = e.add(first, offset);
             for (int64_t vector = 0; vector < vectors; ++vector)
               multiplyBlocks(rows, {column, one, 1, vectors, group.mayEnd},
                              vector);
           });
  });
}
