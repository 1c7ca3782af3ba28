//===- ProductCore.cpp - Rows times panels of columns ---------------------===//

#include "ProductCore.h"

#include "KContiguousProduct.h"
#include "TileProduct.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
/// The product of some rows with the columns of a group.
class GroupProduct {
public:
  GroupProduct(const ProductProblem &problem, const RowRange &rows,
               const PanelGroup &group)
      : problem(problem), rows(rows), group(group), e(problem.e),
        tileRows(problem.getTileRows()), rhs(problem, group),
        lhs(problem, KContiguousProduct::getNumChains(problem)),
        tile(problem, lhs, rhs), prefetch(problem, lhs, rhs) {
    if (problem.rhs.layout == RhsLayout::KContiguous)
      unpacked.emplace(problem, lhs, rhs, prefetch);
  }

  void emit();

private:
  // More rows than a tile has.
  void multiplyMany();
  void multiplyChain(Value k, Value count, Value number, Value firstRow,
                     int64_t numRows);

  // One tile of rows at most.
  void multiplyFew();
  int64_t getMostRowsOfTwoPanels() const;
  void multiplyPanels(ArrayRef<PanelGroup> panels, int64_t mostRows,
                      bool arePacked);

  const ProductProblem &problem;
  const RowRange rows;
  const PanelGroup &group;
  Emitter &e;
  const int64_t tileRows;
  const RhsPanels rhs;
  LhsRows lhs;
  const ProductTile tile;
  const ProductPrefetch prefetch;
  std::optional<KContiguousProduct> unpacked;
};
} // namespace

//===----------------------------------------------------------------------===//
// Few rows
//===----------------------------------------------------------------------===//

/// The most rows that two panels are multiplied by at once; 0 for none. The
/// sums of a row and a panel of one line a packed k follow each other: with two
/// ks each they take as long as a line does from memory. The registers hold
/// those of two rows and two panels.
int64_t GroupProduct::getMostRowsOfTwoPanels() const {
  return problem.isLatencyBound() && problem.getRhsKPack() == 2 &&
                 prefetch.getPackedKsOfLine(group.numVectors) == 1 &&
                 group.mostPanels > 1
             ? 2
             : 0;
}

/// Some panels by one tile of rows, all ks of which may be copied already.
void GroupProduct::multiplyPanels(ArrayRef<PanelGroup> groups, int64_t mostRows,
                                  bool arePacked) {
  problem.chains.forEach(e, e.index(0), [&](Value k) {
    Value count = problem.chains.getCount(e, k);
    SmallVector<Panel> panels;
    for (const PanelGroup &group : groups) {
      panels.push_back(rhs.get(group, e.index(0), k));
      rhs.pack(panels.back(), count);
    }
    Value numRows = e.sub(rows.end, rows.first);
    e.switchIndex(numRows, /*fewest=*/1, mostRows, [&](int64_t number) {
      TileRows tileRows = lhs.get(rows.first, number, k, count, !arePacked);
      if (arePacked)
        tileRows.firstPacked = problem.toPackedK(k);
      // The hardware foresees where each of two panels is read.
      if (panels.size() > 1 ||
          prefetch.getPackedKsOfLine(panels.front().numVectors) == 0)
        return tile.multiply(panels, tileRows, count);
      tile.multiply(panels, tileRows, count, [&](Value packedK) {
        prefetch.prefetchAhead(panels.front(), packedK);
      });
    });
  });
}

void GroupProduct::multiplyFew() {
  if (unpacked)
    return unpacked->multiply(rows, group);
  lhs.packOnlyToWiden();
  bool arePacked = lhs.packAllKs(rows);
  Value zero = e.index(0), one = e.index(1);
  auto getPanel = [&](Value slot) -> PanelGroup {
    Value size = e.index(problem.shape.getNumColumns());
    return {e.add(group.column, e.mul(slot, size)), one, 1, group.numVectors,
            group.hasTail};
  };
  auto multiplyEach = [&](Value first, Value end) {
    e.loop(first, end, 1, [&](Value slot) {
      multiplyPanels(getPanel(slot), tileRows, arePacked);
    });
  };
  int64_t most = getMostRowsOfTwoPanels();
  if (most == 0)
    return multiplyEach(zero, group.numPanels);
  // Two places of memory are read as fast as one if each is read on and on:
  // from panel to panel, in the first half of them and in the second.
  Value numRows = e.sub(rows.end, rows.first);
  Value half = arith::DivSIOp::create(e, group.numPanels, e.index(2));
  Value areFew = e.compare(arith::CmpIPredicate::sle, numRows, e.index(most));
  Value numPairs = e.select(areFew, half, zero);
  e.loop(zero, numPairs, 1, [&](Value slot) {
    multiplyPanels({getPanel(slot), getPanel(e.add(slot, half))}, most,
                   arePacked);
  });
  multiplyEach(e.mul(numPairs, e.index(2)), group.numPanels);
}

//===----------------------------------------------------------------------===//
// Many rows
//===----------------------------------------------------------------------===//

/// One chain of a tile, whose number is `number`, by all panels of the group.
void GroupProduct::multiplyChain(Value k, Value count, Value number,
                                 Value firstRow, int64_t numRows) {
  TileRows tileRows = lhs.get(firstRow, numRows, k, count);
  Values nextRows = prefetch.getNextRows(tileRows, rows.end);
  e.loop(e.index(0), group.numPanels, 1, [&](Value slot) {
    Panel panel = rhs.get(group, slot, k);
    // Sums come nearer while the tile is multiplied that is added to them.
    for (Value row : tileRows.rows)
      for (int64_t vector = 0; vector < group.numVectors; ++vector)
        prefetchLine(e, problem.sums.memref,
                     getSumsAt(problem, panel, row, vector), kFirstCache);
    Value before = e.add(e.mul(number, group.numPanels), slot);
    Value firstBlock =
        e.mul(before, e.index(problem.chains.length / problem.getTileKPack()));
    tile.multiply(panel, tileRows, count, [&](Value packedK) {
      prefetch.prefetchRows(nextRows, k, packedK);
      // ks that are gathered have no place before they are read.
      if (!problem.rhs.isMissing)
        prefetch.prefetchNextGroup(group, k, e.add(firstBlock, packedK));
    });
  });
}

/// Tiles as equal as they can be: two of four rows keep more sums in flight
/// than one of six and one of two.
void GroupProduct::multiplyMany() {
  Value numRows = e.sub(rows.end, rows.first), zero = e.index(0);
  Value numTiles = arith::CeilDivSIOp::create(e, numRows, e.index(tileRows));
  auto getFirst = [&](Value number) {
    Value before = arith::DivSIOp::create(e, e.mul(number, numRows), numTiles);
    return e.add(rows.first, before);
  };
  // Seven rows are tiles of three and four, thirteen of four, four and five.
  const int64_t fewest = (tileRows + 1) / 2;
  problem.chains.forEach(e, zero, [&](Value k) {
    Value count = problem.chains.getCount(e, k);
    if (rhs.arePacked())
      e.loop(zero, group.numPanels, 1,
             [&](Value slot) { rhs.pack(rhs.get(group, slot, k), count); });
    e.loop(zero, numTiles, 1, [&](Value number) {
      Value first = getFirst(number);
      Value size = e.sub(getFirst(e.add(number, e.index(1))), first);
      e.switchIndex(size, fewest, tileRows, [&](int64_t size) {
        multiplyChain(k, count, number, first, size);
      });
    });
  });
}

//===----------------------------------------------------------------------===//
// The product
//===----------------------------------------------------------------------===//

void GroupProduct::emit() {
  Value numRows = e.sub(rows.end, rows.first);
  if (std::optional<int64_t> constant = getConstantIntValue(numRows)) {
    if (*constant > tileRows)
      multiplyMany();
    else if (*constant > 0)
      multiplyFew();
    return;
  }
  auto isAtLeast = [&](int64_t rows) {
    return e.compare(arith::CmpIPredicate::sge, numRows, e.index(rows));
  };
  e.ifElse(
      isAtLeast(tileRows + 1), TypeRange(),
      [&]() -> Values { return multiplyMany(), Values(); },
      [&]() -> Values {
        return e.ifThen(isAtLeast(1), [&] { multiplyFew(); }), Values();
      });
}

void mlir::moe::multiplyGroup(const ProductProblem &problem,
                              const RowRange &rows, const PanelGroup &group) {
  if (problem.usesTiles)
    return multiplyGroupByTiles(problem, rows, group);
  GroupProduct(problem, rows, group).emit();
}
