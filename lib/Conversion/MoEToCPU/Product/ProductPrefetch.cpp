//===- ProductPrefetch.cpp - What a product reads next --------------------===//

#include "ProductPrefetch.h"

#include "RegisterTile.h"

using namespace mlir;
using namespace mlir::moe;

static int64_t getElementBytes(Value memref) {
  return getElementType(memref).getIntOrFloatBitWidth() / 8;
}

Values ProductPrefetch::getNextRows(const TileRows &tile, Value endRow) const {
  int64_t tileRows = problem.getTileRows();
  if (int64_t(tile.rows.size()) < tileRows || !problem.lhs.isContiguous)
    return {};
  Values next;
  for (int64_t i = 0; i < tileRows; ++i) {
    Value row = e.add(tile.rows.front(), e.index(tileRows + i));
    // The number of a row is read, and there is none behind the last one.
    if (problem.lhs.getRow)
      row = e.minSigned(row, e.sub(endRow, e.index(1)));
    next.push_back(problem.lhs.getMemrefRow(row));
  }
  return next;
}

void ProductPrefetch::prefetchRows(ArrayRef<Value> lhsRows, Value k,
                                   Value packedK) const {
  k = e.add(k, e.mul(packedK, e.index(problem.getTileKPack())));
  for (Value row : lhsRows)
    prefetchLine(e, problem.lhs.memref, problem.lhs.at(row, k),
                 lhs.arePacked() ? kSecondCache : kFirstCache);
}

/// How the lines of memory that a chain of a group takes follow each other.
ProductPrefetch::Lines
ProductPrefetch::getLines(const PanelGroup &group) const {
  int64_t bytes = getElementBytes(problem.rhs.memref);
  int64_t columns = group.numVectors * e.width, kPack = problem.getRhsKPack();
  if (problem.rhs.layout == RhsLayout::KContiguous)
    return {columns, 1, CPUTarget::kLineBytes / bytes};
  int64_t perLine = CPUTarget::kLineBytes / (bytes * kPack);
  return {int64_t(llvm::divideCeil(columns, perLine)), perLine, kPack};
}

/// Panels are as near as memory is fast when there are few tiles: two ask for
/// all that comes next. Once all lines were asked for, nothing is left to do.
void ProductPrefetch::prefetchNextGroup(const PanelGroup &group, Value k,
                                        Value number) const {
  const PanelShape &shape = problem.shape;
  Lines lines = getLines(group);
  int64_t perBlock = problem.rhs.layout == RhsLayout::Panels
                         ? std::max<int64_t>(lines.inARow * e.width / 2, 1)
                         : e.width;
  auto divide = [&](Value value, int64_t by) -> std::pair<Value, Value> {
    return {arith::DivUIOp::create(e, value, e.index(by)),
            arith::RemUIOp::create(e, value, e.index(by))};
  };
  // Blocks have `e.width` packed ks.
  Value numLines = divide(e.mul(number, e.index(perBlock)), e.width).first;
  int64_t chainLength = problem.chains.length;
  auto [slot, line] = divide(numLines, lines.inARow * (chainLength / lines.ks));
  Value isAny = e.compare(arith::CmpIPredicate::slt, slot, group.numPanels);
  auto [row, inARow] = divide(line, lines.inARow);
  // Whole rows of lines need no search for the column of each.
  if (perBlock % lines.inARow == 0)
    inARow = e.index(0);
  Value size = e.index(shape.getNumColumns());
  Value first = e.add(group.column, e.mul(slot, size));
  k = e.add(k, e.index(chainLength));
  Value isLast = e.compare(arith::CmpIPredicate::sge, k, problem.numK);
  k = e.select(isLast, e.index(0), k);
  Value across = e.select(isLast, e.mul(group.numPanels, size), e.index(0));
  k = e.add(k, e.mul(row, e.index(lines.ks)));
  k = divide(k, problem.getRhsKPack()).first;
  // A block begins with a row of lines, unless rows are longer than blocks, and
  // lines of one vector lie side by side.
  Value begin = e.mul(inARow, e.index(lines.columns));
  e.ifThen(isAny, [&] {
    for (int64_t i = 0; i < perBlock; ++i) {
      int64_t offset = i % lines.inARow * lines.columns;
      int64_t lane = offset % e.width;
      Value vector = shape
                         .getColumnAt(first, group.numVectors,
                                      e.add(begin, e.index(offset - lane)))
                         .first;
      Value column = e.add(e.add(vector, e.index(lane)), across);
      prefetchLine(e, problem.rhs.memref,
                   problem.rhs.at(e.add(k, e.index(i / lines.inARow)), column),
                   kSecondCache);
    }
  });
}

int64_t ProductPrefetch::getPackedKsOfLine(int64_t numVectors) const {
  int64_t bytes = numVectors * e.width * problem.getRhsKPack() *
                  getElementBytes(problem.rhs.memref);
  return rhs.arePacked() ? 0 : CPUTarget::kLineBytes / bytes;
}

/// Few rows wait for memory: a core that looks ahead over some hundred
/// instructions has 10 to 20 lines on their way where each k takes one, and
/// needs twice as many. With four lines a k it has them.
void ProductPrefetch::prefetchAhead(const Panel &panel, Value packedK) const {
  int64_t perLine = getPackedKsOfLine(panel.numVectors);
  for (int64_t i = 0; i < e.width; i += perLine) {
    Value ahead = e.add(packedK, e.index(CPUTarget::kLinesAhead * perLine + i));
    prefetchLine(e, problem.rhs.memref, panel.at(ahead, 0), kFirstCache);
  }
}

/// That is what is read next where columns lie one behind the other.
void ProductPrefetch::prefetchNextColumns(const Panel &panel, int64_t vector,
                                          Value first, int64_t numLanes) const {
  int64_t perLine = CPUTarget::kLineBytes / getElementBytes(problem.rhs.memref);
  int64_t numLines = problem.getLaneKPack() * numLanes * e.width / perLine;
  Value k = e.mul(e.add(panel.k, first), e.index(e.width));
  Value column =
      e.add(problem.shape.getColumn(panel.column, panel.numVectors, vector),
            e.index(e.width));
  for (int64_t line = 0; line < numLines; ++line)
    prefetchLine(e, problem.rhs.memref,
                 problem.rhs.at(e.add(k, e.index(line * perLine)), column),
                 kSecondCache);
}
