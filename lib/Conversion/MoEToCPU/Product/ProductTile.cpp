//===- ProductTile.cpp - Rows times panels in registers -------------------===//

#include "ProductTile.h"

using namespace mlir;
using namespace mlir::moe;

RegisterTile ProductTile::getTile(const Panel &panel,
                                  const TileRows &rows) const {
  return RegisterTile(e, rows.rows.size(), panel.numVectors,
                      problem.usesBf16Dot);
}

Values mlir::moe::getSumsAt(const ProductProblem &problem, const Panel &panel,
                            Value row, int64_t vector) {
  Emitter &e = problem.e;
  int64_t half = panel.numVectors / 2;
  bool isSecond = problem.shape.pairOffset && vector >= half;
  Value offset = e.index((isSecond ? vector - half : vector) * e.width);
  return problem.sums.at(row, e.add(panel.column, offset), isSecond);
}

void mlir::moe::addChainToSums(const ProductProblem &problem,
                               const Panel &panel, Value row, int64_t vector,
                               Value chain) {
  Emitter &e = problem.e;
  Values at = getSumsAt(problem, panel, row, vector);
  Value mask = panel.masks[vector], memref = problem.sums.memref;
  Value total = e.loadFloats(memref, at, mask);
  e.storeVector(e.add(total, chain), memref, at, mask);
}

/// The products of a packed k added to the chain.
Values ProductTile::multiplyPackedK(const Panel &panel, const TileRows &rows,
                                    Value packedK, ValueRange chain) const {
  RegisterTile tile = getTile(panel, rows);
  Values sums(chain);
  Value first = e.mul(packedK, e.index(problem.getTileKPack()));
  for (auto [i, columns] : llvm::enumerate(rhs.loadColumns(panel, packedK))) {
    Value k = e.add(first, e.index(i));
    auto splatRow = [&](int64_t row) {
      Value copy = problem.usesBf16Dot ? packedK : k;
      if (rows.firstPacked)
        copy = e.add(rows.firstPacked, copy);
      return lhs.splat(e.index(row), rows.lhsRows[row], e.add(panel.k, k),
                       copy);
    };
    sums = tile.multiplyAdd(splatRow, columns, sums);
  }
  return sums;
}

void ProductTile::multiply(ArrayRef<Panel> panels, const TileRows &rows,
                           Value count,
                           function_ref<void(Value)> prefetch) const {
  Value numPackedK = count;
  int64_t kPack = problem.getTileKPack();
  if (kPack > 1)
    numPackedK = arith::CeilDivSIOp::create(e, count, e.index(kPack));
  std::optional<int64_t> constant = getConstantIntValue(count);
  bool areWhole = constant && *constant % (kPack * e.width) == 0;
  Values chain;
  for (const Panel &panel : panels)
    llvm::append_range(chain, getTile(panel, rows).getZeros());
  size_t numSums = chain.size() / panels.size();
  chain = loopOverK(
      e, {e.index(0), numPackedK, e.width, areWhole}, chain, prefetch,
      [&](Value packedK, ValueRange carried) {
        Values next;
        for (auto [i, panel] : llvm::enumerate(panels))
          llvm::append_range(
              next, multiplyPackedK(panel, rows, packedK,
                                    carried.slice(i * numSums, numSums)));
        return next;
      });
  for (auto [i, panel] : llvm::enumerate(panels))
    getTile(panel, rows)
        .forEachSum(
            ArrayRef(chain).slice(i * numSums, numSums),
            [&, &panel = panel](int64_t row, int64_t vector, Value sum) {
              addChainToSums(problem, panel, rows.rows[row], vector, sum);
            });
}
