//===- KContiguousProduct.cpp - Few rows by ks side by side ---------------===//

#include "KContiguousProduct.h"

using namespace mlir;
using namespace mlir::moe;

KContiguousProduct::KContiguousProduct(const ProductProblem &problem,
                                       const LhsRows &lhs, const RhsPanels &rhs,
                                       const ProductPrefetch &prefetch)
    : problem(problem), lhs(lhs), rhs(rhs), prefetch(prefetch), e(problem.e),
      chains(e.scratch(
          {e.getIndexAttr(problem.getTileRows()), e.getIndexAttr(e.width)},
          e.getF32Type())) {}

//===----------------------------------------------------------------------===//
// Blocks
//===----------------------------------------------------------------------===//

/// Adds the products of row `number` with some packed ks of a vector of
/// columns, from `first` of the panel's ks on, to its chain.
void KContiguousProduct::multiplyRow(const Panel &panel, const RowRange &rows,
                                     Value number, Value first,
                                     function_ref<Value(int64_t)> getColumns,
                                     int64_t numPackedK) const {
  Value row = e.add(rows.first, number);
  Value lhsRow = problem.lhs.getMemrefRow(row);
  Value packedK = problem.toPackedK(first), k = e.add(panel.k, first);
  int64_t kPack = problem.usesBf16Dot ? 2 : 1;
  RegisterTile oneRow(e, 1, 1, problem.usesBf16Dot);
  Values sum{e.loadVector(chains, {number, e.index(0)})};
  for (int64_t i = 0; i < numPackedK; ++i) {
    Value columns = getColumns(i);
    auto splatRow = [&](int64_t) {
      return lhs.splat(number, lhsRow, e.add(k, e.index(kPack * i)),
                       e.add(packedK, e.index(i)));
    };
    sum = oneRow.multiplyAdd(splatRow, columns, sum);
  }
  e.storeVector(sum.front(), chains, {number, e.index(0)});
}

/// Adds the products of all rows with a block to their chains: those of the
/// first from registers, of the others from a copy.
void KContiguousProduct::multiplyBlock(const Panel &panel, const RowRange &rows,
                                       int64_t vector, Value first,
                                       Value rest) const {
  Value numRows = e.sub(rows.end, rows.first), zero = e.index(0);
  if (!rest)
    prefetch.prefetchNextColumns(panel, vector, first, e.width);
  Values block = rhs.loadBlock(panel, e.index(vector * e.width), first, rest);
  int64_t numPackedK = block.size();
  if (rest) {
    rhs.storeBlock(panel, block, zero, zero, rest);
    Value count = problem.usesBf16Dot
                      ? Value(arith::CeilDivSIOp::create(e, rest, e.index(2)))
                      : rest;
    e.loop(zero, numRows, 1, [&](Value number) {
      e.loop(zero, count, 1, [&](Value packedK) {
        Value k = e.add(first, problem.usesBf16Dot ? e.mul(packedK, e.index(2))
                                                   : packedK);
        multiplyRow(
            panel, rows, number, k,
            [&](int64_t) { return rhs.loadOfBlock(packedK); }, 1);
      });
    });
    return;
  }
  multiplyRow(
      panel, rows, zero, first, [&](int64_t i) { return block[i]; },
      numPackedK);
  e.ifThen(e.compare(arith::CmpIPredicate::sgt, numRows, e.index(1)), [&] {
    rhs.storeBlock(panel, block, zero, zero, rest);
    e.loop(e.index(1), numRows, 1, [&](Value number) {
      multiplyRow(
          panel, rows, number, first,
          [&](int64_t i) { return rhs.loadOfBlock(e.index(i)); }, numPackedK);
    });
  });
}

/// The chains of some rows with the products of four lanes of columns added.
Values KContiguousProduct::multiplyFourLanes(const Panel &panel,
                                             const TileRows &rows,
                                             int64_t vector, Value first,
                                             ValueRange sums) const {
  prefetch.prefetchNextColumns(panel, vector, first, 4);
  RegisterTile oneVector(e, rows.rows.size(), 1);
  Values next(sums);
  for (auto [i, columns] :
       llvm::enumerate(rhs.loadFourLanes(panel, vector, first))) {
    Value packedK = e.add(first, e.index(i)), k = e.add(panel.k, packedK);
    auto splatRow = [&](int64_t row) {
      return lhs.splat(e.index(row), rows.lhsRows[row], k, packedK);
    };
    next = oneVector.multiplyAdd(splatRow, columns, next);
  }
  return next;
}

//===----------------------------------------------------------------------===//
// Chains
//===----------------------------------------------------------------------===//

/// The most chains of a sum that are formed at once, where few rows wait for
/// them.
static constexpr int64_t kMostChains = 4;

/// The ks that several chains of few rows are formed of at once: those of all
/// whole chains, where a row waits for its sums.
static int64_t getKsOfWholeChains(const ProductProblem &problem) {
  std::optional<int64_t> numK = getConstantIntValue(problem.numK);
  bool waits =
      problem.rhs.layout == RhsLayout::KContiguous && problem.isLatencyBound();
  return waits && numK ? llvm::alignDown(*numK, problem.chains.length) : 0;
}

int64_t KContiguousProduct::getNumChains(const ProductProblem &problem) {
  return getKsOfWholeChains(problem) ? kMostChains : 1;
}

/// The most rows that several chains are formed of at once: as measured. The
/// sums of two chains and the columns do not fit the registers of more, where a
/// block is read for all rows once.
int64_t KContiguousProduct::getMostRowsOfChains() const {
  return getElementType(problem.rhs.memref).isBF16() ? 5 : 4;
}

/// `numChains` chains of each of `numRows` rows at once, as often as there are
/// as many from k `first` to `end`: more sums are in flight than one after the
/// other.
void KContiguousProduct::multiplyChains(const RowRange &rows, int64_t numRows,
                                        int64_t numChains, int64_t first,
                                        int64_t end, const PanelGroup &narrow,
                                        int64_t vector) const {
  Value zero = e.index(0);
  int64_t chainLength = problem.chains.length, size = numChains * chainLength;
  int64_t kPack = 4 * problem.getLaneKPack();
  e.loop(e.index(first), e.index(end), size, [&](Value k) {
    Panel panel = rhs.get(narrow, zero, k);
    TileRows tileRows = lhs.get(rows.first, numRows, k, e.index(size));
    Values sums(numChains * numRows, e.f32(0.0));
    sums = e.loop(zero, e.index(chainLength), kPack, sums,
                  [&](Value first, ValueRange carried) {
                    Values next;
                    for (int64_t chain = 0; chain < numChains; ++chain)
                      llvm::append_range(
                          next, multiplyFourLanes(
                                    panel, tileRows, vector,
                                    e.add(first, e.index(chain * chainLength)),
                                    carried.slice(chain * numRows, numRows)));
                    return next;
                  });
    for (auto [i, sum] : llvm::enumerate(sums))
      addChainToSums(problem, panel, tileRows.rows[i % numRows], vector, sum);
  });
}

/// All whole chains of few rows; gives the k that is left to begin with.
Value KContiguousProduct::multiplyWholeChains(const RowRange &rows,
                                              const PanelGroup &narrow,
                                              int64_t vector) const {
  int64_t ks = getKsOfWholeChains(problem), mostRows = getMostRowsOfChains();
  Value zero = e.index(0);
  if (ks == 0)
    return zero;
  Value numRows = e.sub(rows.end, rows.first);
  auto multiply = [&](int64_t number) {
    int64_t chainLength = problem.chains.length;
    int64_t most = number == 1 ? kMostChains : kMostChains / 2;
    int64_t numChains = std::min(most, ks / chainLength);
    int64_t end = llvm::alignDown(ks, numChains * chainLength);
    multiplyChains(rows, number, numChains, 0, end, narrow, vector);
    if (end < ks)
      multiplyChains(rows, number, 1, end, ks, narrow, vector);
  };
  Value areFew =
      e.compare(arith::CmpIPredicate::sle, numRows, e.index(mostRows));
  e.ifThen(areFew, [&] { e.switchIndex(numRows, 1, mostRows, multiply); });
  return e.select(areFew, e.index(ks), zero);
}

//===----------------------------------------------------------------------===//
// Columns
//===----------------------------------------------------------------------===//

/// One vector of columns of the panel.
void KContiguousProduct::multiplyVector(const RowRange &rows,
                                        const PanelGroup &narrow,
                                        int64_t vector) const {
  Value numRows = e.sub(rows.end, rows.first), zero = e.index(0);
  Value begin = multiplyWholeChains(rows, narrow, vector);
  problem.chains.forEach(e, begin, [&](Value k) {
    Value count = problem.chains.getCount(e, k);
    Panel panel = rhs.get(narrow, zero, k);
    e.loop(zero, numRows, 1, [&](Value number) {
      if (lhs.arePacked())
        lhs.pack(e.add(rows.first, number), number, k, count);
      e.storeVector(e.f32(0.0), chains, {number, zero});
    });
    rhs.forEachBlock(count, [&](Value first, Value rest) {
      multiplyBlock(panel, rows, vector, first, rest);
    });
    e.loop(zero, numRows, 1, [&](Value number) {
      addChainToSums(problem, panel, e.add(rows.first, number), vector,
                     e.loadVector(chains, {number, zero}));
    });
  });
}

void KContiguousProduct::multiply(const RowRange &rows,
                                  const PanelGroup &group) const {
  const PanelShape &shape = problem.shape;
  Value one = e.index(1);
  int64_t vectors = shape.pairOffset ? 2 : 1;
  e.loop(e.index(0), group.numPanels, 1, [&](Value slot) {
    Value size = e.index(shape.getNumColumns());
    Value first = e.add(group.column, e.mul(slot, size));
    e.loop(e.index(0), e.index(group.numVectors / vectors * e.width), e.width,
           [&](Value offset) {
             Value column = e.add(first, offset);
             for (int64_t vector = 0; vector < vectors; ++vector)
               multiplyVector(rows, {column, one, 1, vectors, group.hasTail},
                              vector);
           });
  });
}
