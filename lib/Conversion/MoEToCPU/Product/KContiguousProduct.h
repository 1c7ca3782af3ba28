//===- KContiguousProduct.h - Few rows by ks side by side -------*- C++ -*-===//
//
// Weights that are contiguous along k are read in the order of their addresses
// where there are few rows, as blocks that are transposed in registers: a copy
// as panels would cost more than the product.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_KCONTIGUOUSPRODUCT_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_KCONTIGUOUSPRODUCT_H

#include "ProductPrefetch.h"
#include "ProductTile.h"

namespace mlir::moe {

class KContiguousProduct {
public:
  KContiguousProduct(const ProductProblem &problem, const LhsRows &lhs,
                     const RhsPanels &rhs, const ProductPrefetch &prefetch);

  /// How many chains of few rows are formed at once, at the most.
  static int64_t getNumChains(const ProductProblem &problem);

  /// Adds to the sums of at most a tile of rows, one vector of columns of a
  /// group after the other, as they lie in memory.
  void multiply(const RowRange &rows, const PanelGroup &group) const;

private:
  void multiplyVector(const RowRange &rows, const PanelGroup &narrow,
                      int64_t vector) const;

  // Chains that are formed at once.
  Value multiplyWholeChains(const RowRange &rows, const PanelGroup &narrow,
                            int64_t vector) const;
  void multiplyChains(const RowRange &rows, int64_t numRows, int64_t numChains,
                      int64_t first, int64_t end, const PanelGroup &narrow,
                      int64_t vector) const;
  Values multiplyFourLanes(const Panel &panel, const TileRows &rows,
                           int64_t vector, Value first, ValueRange sums) const;
  int64_t getMostRowsOfChains() const;

  // Blocks of one chain.
  void multiplyBlock(const Panel &panel, const RowRange &rows, int64_t vector,
                     Value first, Value rest) const;
  void multiplyRow(const Panel &panel, const RowRange &rows, Value number,
                   Value first, function_ref<Value(int64_t i)> getColumns,
                   int64_t numPackedK) const;

  const ProductProblem &problem;
  const LhsRows &lhs;
  const RhsPanels &rhs;
  const ProductPrefetch &prefetch;
  Emitter &e;
  /// The chain of each row.
  const Value chains;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_KCONTIGUOUSPRODUCT_H
