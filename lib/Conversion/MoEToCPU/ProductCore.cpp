//===- ProductCore.cpp - Rows times panels of columns ---------------------===//

#include "ProductCore.h"

#include "StepLoop.h"

using namespace mlir;
using namespace mlir::moe;

ProductCore::ProductCore(Emitter &e, ProductLeft left, ProductRight right,
                         ProductSums sums, const PanelShape &shape,
                         Value numSteps)
    : e(e), left(std::move(left)), right(std::move(right)),
      sums(std::move(sums)), shape(shape), numColumns(shape.numColumns),
      pairOffset(shape.pairOffset), numSteps(numSteps), inPairs(isInPairs()),
      chainLength(inPairs ? 2 * kChainPlaces : kChainPlaces),
      mostTileRows(getMostTileRows()) {}

/// Pairs of columns that are multiplied one after the other take the registers
/// of a row.
int64_t ProductCore::getMostTileRows() const {
  int64_t rows = e.target.getProductRows();
  bool isTight = e.target.vectorRegisters < 32;
  return getPlaceSteps() == 2 && !inPairs && isTight
             ? std::max<int64_t>(rows - 1, 1)
             : rows;
}

/// Whether pairs of products are summed by one instruction.
bool ProductCore::isInPairs() const {
  return e.target.bf16Dot && getElementType(left.memref).isBF16() &&
         getElementType(right.memref).isBF16() && left.isContiguous;
}

/// What a panel and a tile need beside their operands: whether weights are
/// panels already, and rows f32, types tell.
void ProductCore::makeBuffers(int64_t numPanels, int64_t numVectors) {
  Type type = inPairs ? Type(e.getI32Type()) : e.getF32Type();
  int64_t steps = chainLength;
  if (std::optional<int64_t> constant = getConstantIntValue(numSteps))
    steps = std::min(steps, std::max<int64_t>(*constant, 1));
  // Lines are whole vectors.
  steps = llvm::alignTo(inPairs ? llvm::divideCeil(steps, 2) : steps, e.width);
  OpFoldResult places = e.getIndexAttr(steps);
  packed = right.layout == ProductLayout::Panels
               ? Value()
               : e.scratch({e.getIndexAttr(numPanels), places,
                            e.getIndexAttr(numVectors * e.width)},
                           type);
  int64_t copiedSteps = getStepsOfWholeChains() ? kMostChains * steps : steps;
  copied = mustWidenLeft() || isLeftPagesApart()
               ? e.scratch({e.getIndexAttr(mostTileRows),
                            e.getIndexAttr(copiedSteps)},
                           type)
               : Value();
  if (right.layout == ProductLayout::AlongSteps)
    chains = e.scratch({e.getIndexAttr(mostTileRows), e.getIndexAttr(e.width)},
                       e.getF32Type());
}

/// Whether vectors of columns are so short that one row takes longer to add up
/// its products, one after the other, than memory takes for what it multiplies.
bool ProductCore::waitsForSums() const {
  constexpr int64_t kLanesThatSuffice = 16;
  return !inPairs && e.width < kLanesThatSuffice;
}

/// Whether rows can only be read from a copy: those of 16 bits, which it
/// widens, unless all of their steps are pairs, and those that end within a
/// pair.
bool ProductCore::mustWidenLeft() const {
  std::optional<int64_t> steps = getConstantIntValue(numSteps);
  bool isEven = steps && *steps % 2 == 0;
  return (!getElementType(left.memref).isF32() && !(inPairs && isEven)) ||
         (getStepsOfPlace() == 2 && !isEven);
}

/// Whether rows are a multiple of 4 KiB apart, or of 2 KiB where the first
/// cache holds a panel as well: several tiles of them compete for few places of
/// it, and are read from copies.
bool ProductCore::isLeftPagesApart() const {
  constexpr int64_t kPageBytes = 4096, kFirstCacheBytes = 32 * 1024;
  auto type = cast<MemRefType>(left.memref.getType());
  SmallVector<int64_t> strides;
  int64_t offset;
  if (!left.isContiguous || type.getRank() < 2 ||
      failed(type.getStridesAndOffset(strides, offset)))
    return false;
  int64_t stride = strides[strides.size() - 2];
  int64_t panelBytes = 4 * kChainPlaces * shape.getNumVectors() * e.width;
  bool isPanelNear = panelBytes <= kFirstCacheBytes / 2;
  int64_t apart = isPanelNear ? kPageBytes / 2 : kPageBytes;
  return !ShapedType::isDynamic(stride) && stride > 0 &&
         stride * type.getElementTypeBitWidth() / 8 % apart == 0;
}

//===----------------------------------------------------------------------===//
// Tiles
//===----------------------------------------------------------------------===//

Value ProductCore::multiplyAdd(Value left, Value right, Value sum) {
  if (!inPairs)
    return e.fma(left, right, sum);
  return e.dotPairs(left, right, sum);
}

/// Steps of 16-bit rows as splats read them: widened, or in pairs, of which
/// the last may have a zero.
void ProductCore::copyLeft(ArrayRef<Value> rows, Value firstNumber, Value step,
                           Value count) {
  if (!left.isContiguous) {
    e.loop(e.index(0), count, 1, [&](Value place) {
      for (auto [i, row] : llvm::enumerate(rows))
        e.store(e.toF32(e.load(left.memref, left.at(row, e.add(step, place)))),
                copied, {e.add(firstNumber, e.index(i)), place});
    });
    return;
  }
  int64_t perLine = (inPairs ? 2 : 1) * e.width;
  std::optional<int64_t> constant = getConstantIntValue(count);
  bool isWhole = constant && *constant % perLine == 0;
  e.loop(e.index(0), count, perLine, [&](Value first) {
    Value rest = isWhole ? Value() : Value(e.sub(count, first));
    for (auto [i, row] : llvm::enumerate(rows)) {
      Values at = left.at(row, e.add(step, first));
      Value line = inPairs ? e.loadPairs(left.memref, at, rest)
                           : e.loadFloats(left.memref, at,
                                          rest ? e.firstLanes(rest) : Value());
      e.storeVector(line, copied,
                    {e.add(firstNumber, e.index(i)), toPlace(first)});
    }
  });
}

/// A step of a row in all lanes: from `place` of the copy of row `number`.
Value ProductCore::splatLeft(Value number, Value leftRow, Value step,
                             Value place) {
  if (copied)
    return e.splat(e.load(copied, {number, place}));
  Values at = left.at(leftRow, step);
  if (!inPairs)
    return e.splat(e.load(left.memref, at));
  return e.splatPair(left.memref, at);
}

/// Where the sums of a row are for a vector of the panel.
Values ProductCore::getSumsAt(const Panel &panel, Value row, int64_t vector) {
  int64_t half = panel.numVectors / 2;
  bool isSecond = pairOffset && vector >= half;
  Value offset = e.index((isSecond ? vector - half : vector) * e.width);
  return sums.at(row, e.add(panel.column, offset), isSecond);
}

/// Adds what a chain came to to the sums of a row.
void ProductCore::addChain(const Panel &panel, Value row, int64_t vector,
                           Value chain) {
  Values at = getSumsAt(panel, row, vector);
  Value mask = panel.masks[vector];
  Value total = e.loadFloats(sums.memref, at, mask);
  e.storeVector(e.add(total, chain), sums.memref, at, mask);
}

Value ProductCore::getLeftRow(Value row) {
  return left.getRow ? left.getRow(row) : row;
}

/// A tile of `numRows` rows, whose steps of a chain are copied if need be.
ProductCore::Tile ProductCore::makeTile(Value firstRow, int64_t numRows,
                                        Value step, Value count, bool mayCopy) {
  Tile tile;
  for (int64_t i = 0; i < numRows; ++i) {
    tile.rows.push_back(e.add(firstRow, e.index(i)));
    tile.leftRows.push_back(getLeftRow(tile.rows.back()));
  }
  if (copied && mayCopy)
    copyLeft(tile.leftRows, e.index(0), step, count);
  return tile;
}

/// Rows of a full tile are far from those of the one before: while it is
/// multiplied, those of the next come nearer, as much of each as a block of
/// places from `place` on.
void ProductCore::fetchRows(ArrayRef<Value> rows, Value step, Value place) {
  if (int64_t(rows.size()) < mostTileRows || !left.isContiguous || left.getRow)
    return;
  step = e.add(step, e.mul(place, e.index(getPlaceSteps())));
  for (int64_t i = 0; i < mostTileRows; ++i)
    prefetchLine(e, left.memref,
                 left.at(e.add(rows.front(), e.index(mostTileRows + i)), step),
                 copied ? kSecondCache : kFirstCache);
}

/// The vectors of a place of a panel, for each of its steps that is multiplied
/// by itself.
SmallVector<Values> ProductCore::loadColumns(const Panel &panel, Value place) {
  Type element = getElementType(panel.memref);
  SmallVector<Values> columns(inPairs ? 1 : getStepsOfPlace());
  for (int64_t vector = 0; vector < panel.numVectors; ++vector) {
    Values at = panel.at(place, vector);
    if (!element.isBF16()) {
      columns[0].push_back(element.isF16() ? e.loadFloats(panel.memref, at)
                                           : e.loadVector(panel.memref, at));
      continue;
    }
    Value pairs = e.loadPairs(panel.memref, at);
    if (inPairs) {
      columns[0].push_back(pairs);
      continue;
    }
    auto [low, high] = splitPairs(pairs);
    columns[0].push_back(low);
    columns[1].push_back(high);
  }
  return columns;
}

/// The products of a place added to the chains.
Values ProductCore::multiplyPlace(const Panel &panel, const Tile &tile,
                                  Value place, ValueRange carried) {
  Values chain(carried);
  int64_t numVectors = panel.numVectors;
  Value first = e.mul(place, e.index(getPlaceSteps()));
  for (auto [number, columns] : llvm::enumerate(loadColumns(panel, place))) {
    Value step = e.add(first, e.index(number));
    for (auto [i, leftRow] : llvm::enumerate(tile.leftRows)) {
      Value copy = inPairs ? place : step;
      if (tile.firstCopied)
        copy = e.add(tile.firstCopied, copy);
      Value lanes =
          splatLeft(e.index(i), leftRow, e.add(panel.step, step), copy);
      for (auto [j, column] : llvm::enumerate(columns)) {
        Value &sum = chain[i * numVectors + j];
        sum = multiplyAdd(lanes, column, sum);
      }
    }
  }
  return chain;
}

/// Adds one chain to the sums of a few rows in each of some panels; `fetch`
/// asks for what is to come nearer meanwhile, from a place on.
void ProductCore::multiplyTile(ArrayRef<Panel> panels, const Tile &tile,
                               Value count, function_ref<void(Value)> fetch) {
  Value places = count;
  int64_t placeSteps = getPlaceSteps();
  if (placeSteps > 1)
    places = arith::CeilDivSIOp::create(e, count, e.index(placeSteps));
  std::optional<int64_t> steps = getConstantIntValue(count);
  bool areWhole = steps && *steps % (placeSteps * e.width) == 0;
  int64_t numVectors = panels.front().numVectors;
  size_t numSums = tile.rows.size() * numVectors;
  Values chain(panels.size() * numSums, e.f32(0.0));
  chain = loopOverSteps(
      e, {e.index(0), places, e.width, areWhole}, chain, fetch,
      [&](Value place, ValueRange carried) {
        Values next;
        for (auto [i, panel] : llvm::enumerate(panels))
          llvm::append_range(
              next, multiplyPlace(panel, tile, place,
                                  carried.slice(i * numSums, numSums)));
        return next;
      });
  auto sum = chain.begin();
  for (const Panel &panel : panels)
    for (Value row : tile.rows)
      for (int64_t vector = 0; vector < numVectors; ++vector)
        addChain(panel, row, vector, *sum++);
}

/// Calls `body` with the constant that `numRows` is, `fewest` to `most`.
void ProductCore::switchRows(Value numRows, int64_t fewest, int64_t most,
                             function_ref<void(int64_t)> body) {
  if (std::optional<int64_t> constant = getConstantIntValue(numRows))
    return body(*constant);
  auto cases = llvm::to_vector(llvm::seq<int64_t>(fewest, most));
  auto branch =
      scf::IndexSwitchOp::create(e, TypeRange(), numRows, cases, cases.size());
  OpBuilder::InsertionGuard guard(e);
  auto fill = [&](Region &region, int64_t rows) {
    e.createBlock(&region);
    e.setInsertionPoint(scf::YieldOp::create(e));
    body(rows);
  };
  fill(branch.getDefaultRegion(), most);
  for (auto [region, rows] : llvm::zip_equal(branch.getCaseRegions(), cases))
    fill(region, rows);
}

/// The steps of the chain from `step` on. Bounds of loops that are constants
/// need no code for the rest.
Value ProductCore::getChainSteps(Value step) {
  if (std::optional<int64_t> constant = getConstantIntValue(numSteps))
    if (*constant <= chainLength || *constant % chainLength == 0)
      return e.index(std::min(*constant, chainLength));
  return e.minSigned(e.sub(numSteps, step), e.index(chainLength));
}

/// One tile of rows at most, which has places in the first cache wherever its
/// rows are.
void ProductCore::multiplyFew(const RowRange &rows, const PanelGroup &group) {
  if (right.layout == ProductLayout::AlongSteps)
    return multiplyAlongSteps(rows, group);
  copied = mustWidenLeft() ? copied : Value();
  bool isCopied = copyAllSteps(rows);
  Value zero = e.index(0), one = e.index(1);
  auto getPanel = [&](Value slot) -> PanelGroup {
    Value size = e.index(shape.getNumColumns());
    return {e.add(group.column, e.mul(slot, size)), one, 1, group.numVectors,
            group.mayEnd};
  };
  auto multiplyEach = [&](Value first, Value end) {
    e.loop(first, end, 1, [&](Value slot) {
      multiplyOneTile(rows, getPanel(slot), mostTileRows, isCopied);
    });
  };
  int64_t most = getMostRowsOfPairs(group);
  if (most == 0)
    return multiplyEach(zero, group.numPanels);
  // Two places of memory are read as fast as one if each is read on and on:
  // from panel to panel, in the first half of them and in the second.
  Value numRows = e.sub(rows.end, rows.first);
  Value half = arith::DivSIOp::create(e, group.numPanels, e.index(2));
  Value areFew = e.compare(arith::CmpIPredicate::sle, numRows, e.index(most));
  Value numPairs = e.select(areFew, half, zero);
  e.loop(zero, numPairs, 1, [&](Value slot) {
    multiplyOneTile(rows, {getPanel(slot), getPanel(e.add(slot, half))}, most,
                    isCopied);
  });
  multiplyEach(e.mul(numPairs, e.index(2)), group.numPanels);
}

/// The most rows that two panels are multiplied by at once; 0 for none. The
/// sums of a row and a panel of one line a place follow each other: with two
/// steps a place they take as long as a line does from memory. The registers
/// hold those of two rows and two panels.
int64_t ProductCore::getMostRowsOfPairs(const PanelGroup &group) const {
  return waitsForSums() && getStepsOfPlace() == 2 &&
                 getPlacesOfLine(group.numVectors) == 1 && group.mostPanels > 1
             ? 2
             : 0;
}

/// Some panels by one tile of rows, all steps of which may be copied already.
void ProductCore::multiplyOneTile(const RowRange &rows,
                                  ArrayRef<PanelGroup> groups, int64_t mostRows,
                                  bool isCopied) {
  e.loop(e.index(0), numSteps, chainLength, [&](Value step) {
    Value count = getChainSteps(step);
    SmallVector<Panel> panels;
    for (const PanelGroup &group : groups) {
      panels.push_back(makePanel(group, e.index(0), step));
      fillPanel(panels.back(), count);
    }
    Value numRows = e.sub(rows.end, rows.first);
    switchRows(numRows, /*fewest=*/1, mostRows, [&](int64_t number) {
      Tile tile = makeTile(rows.first, number, step, count, !isCopied);
      if (isCopied)
        tile.firstCopied = toPlace(step);
      // The hardware foresees where each of two panels is read.
      if (panels.size() > 1 || getPlacesOfLine(panels.front().numVectors) == 0)
        return multiplyTile(panels, tile, count);
      multiplyTile(panels, tile, count,
                   [&](Value place) { prefetchAhead(panels.front(), place); });
    });
  });
}

/// Copies all steps of a tile of rows, for all panels: each would copy them
/// again. False if they are not known to fit, or need no copy.
bool ProductCore::copyAllSteps(const RowRange &rows) {
  std::optional<int64_t> steps = getConstantIntValue(numSteps);
  if (!mustWidenLeft() || !steps)
    return false;
  int64_t places = llvm::alignTo(*steps, 2 * e.width);
  if (mostTileRows * places * 4 > e.target.l2Bytes / 4)
    return false;
  copied = e.scratch({e.getIndexAttr(mostTileRows), e.getIndexAttr(places)},
                     inPairs ? Type(e.getI32Type()) : e.getF32Type());
  Value zero = e.index(0);
  e.loop(zero, e.sub(rows.end, rows.first), 1, [&](Value number) {
    copyLeft(getLeftRow(e.add(rows.first, number)), number, zero, numSteps);
  });
  return true;
}

/// Tiles as equal as they can be: two of four rows keep more sums in flight
/// than one of six and one of two.
void ProductCore::multiplyMany(const RowRange &rows, const PanelGroup &group) {
  Value numRows = e.sub(rows.end, rows.first), zero = e.index(0);
  Value numTiles =
      arith::CeilDivSIOp::create(e, numRows, e.index(mostTileRows));
  auto getFirst = [&](Value tile) {
    Value before = arith::DivSIOp::create(e, e.mul(tile, numRows), numTiles);
    return e.add(rows.first, before);
  };
  auto multiplyTiles = [&](Value step, Value count, Value tile, Value first,
                           int64_t tileRows) {
    Tile rowsOfTile = makeTile(first, tileRows, step, count);
    e.loop(zero, group.numPanels, 1, [&](Value slot) {
      Panel panel = makePanel(group, slot, step);
      // Sums come nearer while the tile is multiplied that is added to them.
      for (Value row : rowsOfTile.rows)
        for (int64_t vector = 0; vector < group.numVectors; ++vector)
          prefetchLine(e, sums.memref, getSumsAt(panel, row, vector),
                       kFirstCache);
      Value number = e.add(e.mul(tile, group.numPanels), slot);
      Value line = e.mul(number, e.index(chainLength / getPlaceSteps()));
      multiplyTile(panel, rowsOfTile, count, [&](Value place) {
        fetchRows(rowsOfTile.rows, step, place);
        // Steps that are gathered have no place before they are read.
        if (!right.isMissing)
          prefetchNextGroup(group, step, e.add(line, place));
      });
    });
  };
  // Seven rows are tiles of three and four, thirteen of four, four and five.
  const int64_t fewest = (mostTileRows + 1) / 2;
  e.loop(zero, numSteps, chainLength, [&](Value step) {
    Value count = getChainSteps(step);
    if (packed)
      e.loop(zero, group.numPanels, 1, [&](Value slot) {
        fillPanel(makePanel(group, slot, step), count);
      });
    e.loop(zero, numTiles, 1, [&](Value tile) {
      Value first = getFirst(tile);
      Value tileRows = e.sub(getFirst(e.add(tile, e.index(1))), first);
      switchRows(tileRows, fewest, mostTileRows, [&](int64_t tileRows) {
        multiplyTiles(step, count, tile, first, tileRows);
      });
    });
  });
}

void ProductCore::multiply(Value firstRow, Value endRow,
                           const PanelGroup &group) {
  makeBuffers(group.mostPanels, group.numVectors);
  RowRange rows{firstRow, endRow};
  auto few = [&] { multiplyFew(rows, group); };
  auto many = [&] { multiplyMany(rows, group); };
  Value numRows = e.sub(endRow, firstRow);
  if (std::optional<int64_t> constant = getConstantIntValue(numRows)) {
    if (*constant > mostTileRows)
      many();
    else if (*constant > 0)
      few();
    return;
  }
  auto isAtLeast = [&](int64_t rows) {
    return e.compare(arith::CmpIPredicate::sge, numRows, e.index(rows));
  };
  e.ifElse(
      isAtLeast(mostTileRows + 1), TypeRange(),
      [&]() -> Values { return many(), Values(); },
      [&]() -> Values { return e.ifThen(isAtLeast(1), few), Values(); });
}
