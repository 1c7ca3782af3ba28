//===- TileProduct.cpp - Products by a matrix unit ------------------------===//

#include "TileProduct.h"

#include "Panels.h"
#include "ProductTile.h"

using namespace mlir;
using namespace mlir::moe;

/// Two left tiles and two right ones: with their sums they fill the registers,
/// and each tile that is read is multiplied twice.
static constexpr int64_t kRowTiles = 2;
static constexpr int64_t kMostRows = kRowTiles * kUnitTileSize;

namespace {
class TileProduct {
public:
  TileProduct(const ProductProblem &problem, const RowRange &rows,
              const PanelGroup &group)
      : problem(problem), rows(rows), group(group), e(problem.e),
        panels(problem, group),
        areColumnsLeft(problem.rhs.layout == RhsLayout::KContiguous) {}
  void emit();

private:
  /// ks of a chain, and whether all ks of rows are copied: then they begin at
  /// `k` of the copy.
  struct Chain {
    Value k;
    int64_t count;
    bool hasAllKs;
  };
  bool arePacked() const { return panels.arePacked() && !areColumnsLeft; }
  void forEachChain(function_ref<void(Value k, int64_t count)> body);
  bool fitAllKs() const;
  void allocate(bool allKs);

  void multiplyFew();
  void multiplyMany();
  void forEachSize(Value numRows, function_ref<void(int64_t numTiles)> body);
  void copyRows(Value first, Value size, Value k, Value count);
  void copyRowsAsLines(Value first, Value size, Value k, Value count);
  void copyRowsAsColumns(Value first, Value size, Value k, Value count);
  void multiplyPanel(Value slot, Value first, Value size, int64_t numRowTiles,
                     const Chain &chain);

  TileSource getRows(int64_t tile, const Chain &chain);
  int64_t getNumMissing(const Panel &panel, int64_t vector);
  TileSource getColumns(const Panel &panel, int64_t vector);
  TileSource getLastColumns(const Panel &panel, int64_t vector, int64_t count);
  void packPanel(Value slot, Value k, int64_t count);
  void copyLastKs(const Panel &panel, int64_t count);

  /// Tiles of the columns of a panel: of whole steps, and of the last one.
  struct Columns {
    TileSources whole, last;
  };
  void multiplyColumns(const TileSources &rowTiles, const Columns &columns,
                       int64_t count, int64_t firstColumn);
  void transposeSums(const Panel &panel, int64_t numRowTiles);

  const ProductProblem &problem;
  const RowRange rows;
  const PanelGroup &group;
  Emitter &e;
  const RhsPanels panels;
  /// Whether columns, whose ks lie side by side, are the left operand, and rows
  /// the right one.
  const bool areColumnsLeft;
  /// Copies of a tile's rows: as they are, or pairs of ks of neighbouring rows
  /// side by side. Lines of the latter are read as bf16, too.
  Value copy, pairsOfCopy;
  /// The last ks of a panel's columns, with zeros behind them, as pairs and as
  /// bf16.
  Value pairsOfLast, last;
  /// The sums of a chain as tiles have them, and row by row, from lane
  /// `kUnitTileSize` on.
  Value tiles, sums;
};
} // namespace

//===----------------------------------------------------------------------===//
// Buffers
//===----------------------------------------------------------------------===//

void TileProduct::forEachChain(function_ref<void(Value, int64_t)> body) {
  int64_t numK = *getConstantIntValue(problem.numK);
  int64_t length = problem.chains.length, wholeEnd = numK / length * length;
  if (wholeEnd > 0)
    e.loop(e.index(0), e.index(wholeEnd), length,
           [&](Value k) { body(k, length); });
  if (numK > wholeEnd)
    body(e.index(wholeEnd), numK - wholeEnd);
}

/// Whether all ks of a tile's rows take a quarter of the second cache at most.
bool TileProduct::fitAllKs() const {
  int64_t numK = *getConstantIntValue(problem.numK);
  return kMostRows * numK * 2 <= e.target.l2Bytes / 4;
}

void TileProduct::allocate(bool allKs) {
  int64_t ks = problem.chains.length, numK = *getConstantIntValue(problem.numK);
  ks = llvm::alignTo(allKs ? numK : std::min(ks, numK), kTileKs);
  auto make = [&](ArrayRef<int64_t> shape, Type element) {
    return e.scratch(getAsIndexOpFoldResult(e.getContext(), shape), element);
  };
  int64_t lanes = group.numVectors * kUnitTileSize;
  sums = tiles = make({kMostRows, kUnitTileSize + lanes}, e.getF32Type());
  if (numK % kTileKs != 0)
    std::tie(pairsOfLast, last) =
        e.scratchPairs(areColumnsLeft ? ArrayRef{lanes, kUnitTileSize}
                                      : ArrayRef{kUnitTileSize, lanes});
  if (!areColumnsLeft) {
    // An odd number of lines: rows are at different places of a cache.
    copy = make({kMostRows, ks + (ks / kTileKs % 2 == 0 ? kTileKs : 0)},
                e.getBF16Type());
    return;
  }
  tiles = make({lanes, kMostRows}, e.getF32Type());
  std::tie(pairsOfCopy, copy) =
      e.scratchPairs({kRowTiles, ks / 2, kUnitTileSize});
}

//===----------------------------------------------------------------------===//
// Rows
//===----------------------------------------------------------------------===//

/// Rows `first` to `first + size`, line by line.
void TileProduct::copyRowsAsLines(Value first, Value size, Value k,
                                  Value count) {
  const ProductLhs &lhs = problem.lhs;
  e.loop(e.index(0), size, 1, [&](Value number) {
    Value row = lhs.getMemrefRow(e.add(first, number));
    e.loop(e.index(0), count, kTileKs, [&](Value offset) {
      Value pairs = e.loadPairs(lhs.memref, lhs.at(row, e.add(k, offset)),
                                e.sub(count, offset));
      Value elements = vector::BitCastOp::create(
          e, VectorType::get({kTileKs}, e.getBF16Type()), pairs);
      e.storeVector(elements, copy, {number, offset});
    });
  });
}

/// The same with rows side by side; the last one is repeated.
void TileProduct::copyRowsAsColumns(Value first, Value size, Value k,
                                    Value count) {
  const ProductLhs &lhs = problem.lhs;
  Value last = e.add(first, e.sub(size, e.index(1)));
  Value numTiles = arith::CeilDivSIOp::create(e, size, e.index(kUnitTileSize));
  e.loop(e.index(0), numTiles, 1, [&](Value tile) {
    Values lhsRows;
    for (int64_t lane = 0; lane < kUnitTileSize; ++lane) {
      Value row = e.add(e.add(first, e.mul(tile, e.index(kUnitTileSize))),
                        e.index(lane));
      lhsRows.push_back(lhs.getMemrefRow(e.minSigned(row, last)));
    }
    e.loop(e.index(0), count, kTileKs, [&](Value offset) {
      Values lines;
      for (Value row : lhsRows)
        lines.push_back(e.loadPairs(lhs.memref, lhs.at(row, e.add(k, offset)),
                                    e.sub(count, offset)));
      Value packedK = arith::DivSIOp::create(e, offset, e.index(2));
      for (auto [i, line] : llvm::enumerate(transposeLanes(e, lines)))
        e.storeVector(line, pairsOfCopy,
                      {tile, e.add(packedK, e.index(i)), e.index(0)});
    });
  });
}

void TileProduct::copyRows(Value first, Value size, Value k, Value count) {
  if (areColumnsLeft)
    return copyRowsAsColumns(first, size, k, count);
  copyRowsAsLines(first, size, k, count);
}

/// One tile of rows of the copy.
TileSource TileProduct::getRows(int64_t tile, const Chain &chain) {
  Value begin = chain.hasAllKs ? chain.k : e.index(0);
  if (!areColumnsLeft)
    return {copy, [=, this](Value k) {
              return Values{e.index(tile * kUnitTileSize), e.add(begin, k)};
            }};
  return {copy, [=, this](Value packedK) {
            Value first = arith::DivSIOp::create(e, begin, e.index(2));
            return Values{e.index(tile), e.add(first, packedK), e.index(0)};
          }};
}

//===----------------------------------------------------------------------===//
// Columns
//===----------------------------------------------------------------------===//

/// How many of a vector's columns there are not.
int64_t TileProduct::getNumMissing(const Panel &panel, int64_t vector) {
  if (!group.hasTail)
    return 0;
  int64_t half = panel.numVectors / 2;
  bool isSecond = problem.shape.pairOffset && vector >= half;
  int64_t first = (isSecond ? vector - half : vector) * kUnitTileSize;
  int64_t rest = *getConstantIntValue(problem.shape.numColumns) %
                 problem.shape.getNumColumns();
  return kUnitTileSize - std::clamp<int64_t>(rest - first, 0, kUnitTileSize);
}

/// A vector of columns as a tile. Where they lie with their ks side by side the
/// last tile begins so early that nothing behind the columns is read.
TileSource TileProduct::getColumns(const Panel &panel, int64_t vector) {
  if (!areColumnsLeft)
    return panels.getTile(panel, vector);
  Value column =
      problem.shape.getColumn(panel.column, panel.numVectors, vector);
  column = e.sub(column, e.index(getNumMissing(panel, vector)));
  return {problem.rhs.memref, [=, this](Value k) {
            return problem.rhs.at(e.add(panel.k, k), column);
          }};
}

/// The same of the last ks, whose number no step divides.
TileSource TileProduct::getLastColumns(const Panel &panel, int64_t vector,
                                       int64_t count) {
  if (count % kTileKs == 0 || arePacked())
    return getColumns(panel, vector);
  Value first = e.index(vector * kUnitTileSize), zero = e.index(0);
  Values at = areColumnsLeft
                  ? Values{first, zero}
                  : Values{zero, e.index(2 * vector * kUnitTileSize)};
  return {last, [=](Value) { return at; }};
}

/// Fills the buffer of a panel, if it is one, and zeros up to a whole step.
void TileProduct::packPanel(Value slot, Value k, int64_t count) {
  if (!arePacked())
    return;
  Panel panel = panels.get(group, slot, k);
  panels.pack(panel, e.index(count));
  for (int64_t packedK = llvm::divideCeil(count, 2);
       packedK < int64_t(llvm::alignTo(count, kTileKs)) / 2; ++packedK)
    for (int64_t vector = 0; vector < panel.numVectors; ++vector)
      e.storeVector(e.i32(0), panel.memref, panel.at(e.index(packedK), vector));
}

void TileProduct::copyLastKs(const Panel &panel, int64_t count) {
  if (count % kTileKs == 0 || arePacked())
    return;
  int64_t begin = count / kTileKs * kTileKs;
  Value rest = e.index(count - begin);
  for (int64_t vector = 0; vector < panel.numVectors; ++vector) {
    TileSource columns = getColumns(panel, vector);
    if (areColumnsLeft && getNumMissing(panel, vector) == kUnitTileSize)
      continue;
    e.loop(e.index(0), e.index(kUnitTileSize), 1, [&](Value line) {
      if (areColumnsLeft) {
        Values at = columns.at(e.index(begin));
        Value &column = *std::prev(at.end(), 2);
        column = e.add(column, line);
        e.storeVector(
            e.loadPairs(problem.rhs.memref, at, rest), pairsOfLast,
            {e.add(e.index(vector * kUnitTileSize), line), e.index(0)});
        return;
      }
      Value packedK = e.add(e.index(begin / 2), line);
      Value exists = e.compare(arith::CmpIPredicate::slt, line,
                               e.index(llvm::divideCeil(count - begin, 2)));
      Value pairs = e.ifElse(
          exists, e.ints(),
          [&]() -> Values {
            return {e.loadPairs(panel.memref, panel.at(packedK, vector))};
          },
          [&]() -> Values { return {e.i32(0)}; })[0];
      e.storeVector(pairs, pairsOfLast,
                    {line, e.index(vector * kUnitTileSize)});
    });
  }
}

//===----------------------------------------------------------------------===//
// Products
//===----------------------------------------------------------------------===//

/// The sums of `count` ks of rows and of some columns of a panel, the first of
/// which is `firstColumn`.
void TileProduct::multiplyColumns(const TileSources &rowTiles,
                                  const Columns &columns, int64_t count,
                                  int64_t firstColumn) {
  auto multiply = [&](const TileSources &columns, Value k, ValueRange sums) {
    return areColumnsLeft ? multiplyTiles(e, columns, rowTiles, k, sums)
                          : multiplyTiles(e, rowTiles, columns, k, sums);
  };
  Values chain = getZeroTiles(e, rowTiles.size() * columns.whole.size());
  int64_t wholeEnd = count / kTileKs * kTileKs;
  if (wholeEnd > 0)
    chain = e.loop(e.index(0), e.index(wholeEnd), kTileKs, chain,
                   [&](Value k, ValueRange sums) {
                     return multiply(columns.whole, k, sums);
                   });
  if (count > wholeEnd)
    chain = multiply(columns.last, e.index(wholeEnd), chain);
  if (areColumnsLeft)
    storeTiles(e, chain, rowTiles.size(), tiles, firstColumn, 0);
  else
    storeTiles(e, chain, columns.whole.size(), tiles, 0,
               kUnitTileSize + firstColumn);
}

/// Of left columns the sums row by row. Those of a last tile that began early
/// are written again, with the same bits.
void TileProduct::transposeSums(const Panel &panel, int64_t numRowTiles) {
  for (int64_t vector = 0; vector < panel.numVectors; ++vector) {
    int64_t missing = getNumMissing(panel, vector);
    if (missing == kUnitTileSize)
      continue;
    int64_t firstLane = kUnitTileSize + vector * kUnitTileSize - missing;
    e.loop(e.index(0), e.index(numRowTiles * kUnitTileSize), kUnitTileSize,
           [&](Value row) {
             Values lines;
             for (int64_t line = 0; line < kUnitTileSize; ++line)
               lines.push_back(e.loadVector(
                   tiles, {e.index(vector * kUnitTileSize + line), row}));
             for (auto [i, line] : llvm::enumerate(transposeLanes(e, lines)))
               e.storeVector(line, sums,
                             {e.add(row, e.index(i)), e.index(firstLane)});
           });
  }
}

/// Adds a chain of rows by a panel to their sums.
void TileProduct::multiplyPanel(Value slot, Value first, Value size,
                                int64_t numRowTiles, const Chain &chain) {
  Panel panel = panels.get(group, slot, chain.k);
  copyLastKs(panel, chain.count);
  TileSources rowTiles;
  for (int64_t tile = 0; tile < numRowTiles; ++tile)
    rowTiles.push_back(getRows(tile, chain));
  // With one tile of rows registers hold the sums of four of columns.
  int64_t most = kMostTiles / numRowTiles;
  for (int64_t vector = 0; vector < panel.numVectors; vector += most) {
    Columns columns;
    for (int64_t i = vector; i < std::min(vector + most, panel.numVectors);
         ++i) {
      // Only the last ones of a half can be missing altogether.
      bool areAny = !areColumnsLeft || getNumMissing(panel, i) < kUnitTileSize;
      int64_t found = areAny ? i : vector;
      columns.whole.push_back(getColumns(panel, found));
      columns.last.push_back(getLastColumns(panel, found, chain.count));
    }
    multiplyColumns(rowTiles, columns, chain.count, vector * kUnitTileSize);
  }
  if (areColumnsLeft)
    transposeSums(panel, numRowTiles);
  e.loop(e.index(0), size, 1, [&](Value number) {
    for (int64_t vector = 0; vector < panel.numVectors; ++vector)
      addChainToSums(problem, panel, e.add(first, number), vector,
                     e.loadVector(sums, {number, e.index(kUnitTileSize +
                                                         vector * e.width)}));
  });
}

//===----------------------------------------------------------------------===//
// Loops
//===----------------------------------------------------------------------===//

void TileProduct::forEachSize(Value numRows, function_ref<void(int64_t)> body) {
  e.ifElse(
      e.compare(arith::CmpIPredicate::sgt, numRows, e.index(kUnitTileSize)),
      TypeRange(), [&]() -> Values { return body(2), Values(); },
      [&]() -> Values { return body(1), Values(); });
}

/// As many rows as tiles have at once: panels are read one behind the other.
void TileProduct::multiplyFew() {
  Value size = e.sub(rows.end, rows.first);
  copyRows(rows.first, size, e.index(0), problem.numK);
  forEachSize(size, [&](int64_t numTiles) {
    e.loop(e.index(0), group.numPanels, 1, [&](Value slot) {
      forEachChain([&](Value k, int64_t count) {
        packPanel(slot, k, count);
        multiplyPanel(slot, rows.first, size, numTiles,
                      {k, count, /*hasAllKs=*/true});
      });
    });
  });
}

/// A chain of all panels stays in cache for all rows.
void TileProduct::multiplyMany() {
  forEachChain([&](Value k, int64_t count) {
    if (arePacked())
      e.loop(e.index(0), group.numPanels, 1,
             [&](Value slot) { packPanel(slot, k, count); });
    e.loop(rows.first, rows.end, kMostRows, [&](Value first) {
      Value size = e.minSigned(e.sub(rows.end, first), e.index(kMostRows));
      copyRows(first, size, k, e.index(count));
      forEachSize(size, [&](int64_t numTiles) {
        e.loop(e.index(0), group.numPanels, 1, [&](Value slot) {
          multiplyPanel(slot, first, size, numTiles,
                        {k, count, /*hasAllKs=*/false});
        });
      });
    });
  });
}

void TileProduct::emit() {
  bool allKs = fitAllKs();
  allocate(allKs);
  if (!allKs)
    return multiplyMany();
  Value numRows = e.sub(rows.end, rows.first);
  e.ifElse(
      e.compare(arith::CmpIPredicate::sgt, numRows, e.index(kMostRows)),
      TypeRange(), [&]() -> Values { return multiplyMany(), Values(); },
      [&]() -> Values {
        return e.ifThen(
                   e.compare(arith::CmpIPredicate::sgt, numRows, e.index(0)),
                   [&] { multiplyFew(); }),
               Values();
      });
}

void mlir::moe::multiplyGroupByTiles(const ProductProblem &problem,
                                     const RowRange &rows,
                                     const PanelGroup &group) {
  TileProduct(problem, rows, group).emit();
}
