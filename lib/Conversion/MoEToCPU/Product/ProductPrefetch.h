//===- ProductPrefetch.h - What a product reads next ------------*- C++ -*-===//
//
// What comes nearer while a register tile is multiplied: the hardware does not
// foresee short runs, nor does it read on while tiles are multiplied that lie
// in cache.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTPREFETCH_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTPREFETCH_H

#include "LhsRows.h"
#include "Panels.h"

namespace mlir::moe {

class ProductPrefetch {
public:
  ProductPrefetch(const ProductProblem &problem, const LhsRows &lhs,
                  const RhsPanels &rhs)
      : problem(problem), lhs(lhs), rhs(rhs), e(problem.e) {}

  /// The rows of the left operand behind those of a full tile, up to `endRow`;
  /// none behind a smaller one.
  Values getNextRows(const TileRows &tile, Value endRow) const;
  /// Asks for rows, which are far from each other: as much of each as a block
  /// of packed ks from `packedK` on.
  void prefetchRows(ArrayRef<Value> lhsRows, Value k, Value packedK) const;
  /// Asks for lines of what is read next while the block of packed ks `number`
  /// of a chain is multiplied: of the same columns in the chain that follows,
  /// or of the next group's in the first one.
  void prefetchNextGroup(const PanelGroup &group, Value k, Value number) const;
  /// Asks for a block of packed ks of a panel, or of what lies behind it, long
  /// enough before it is read.
  void prefetchAhead(const Panel &panel, Value packedK) const;
  /// Of ks that lie side by side: asks for as much as `numLanes` lanes of a
  /// vector of columns hold from the columns behind the panel's, in the order
  /// of addresses.
  void prefetchNextColumns(const Panel &panel, int64_t vector, Value first,
                           int64_t numLanes) const;
  /// How many packed ks of a panel share a line of memory; 0 where one takes
  /// several, or where panels are buffers.
  int64_t getPackedKsOfLine(int64_t numVectors) const;

private:
  /// Lines of memory: so many side by side, each of some columns and ks.
  struct Lines {
    int64_t inARow, columns, ks;
  };
  Lines getLines(const PanelGroup &group) const;

  const ProductProblem &problem;
  const LhsRows &lhs;
  const RhsPanels &rhs;
  Emitter &e;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTPREFETCH_H
