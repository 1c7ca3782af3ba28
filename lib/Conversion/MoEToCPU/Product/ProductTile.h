//===- ProductTile.h - Rows times panels in registers -----------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTTILE_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTTILE_H

#include "LhsRows.h"
#include "Panels.h"
#include "RegisterTile.h"

namespace mlir::moe {

/// Where the sums of a row are for a vector of the panel.
Values getSumsAt(const ProductProblem &problem, const Panel &panel, Value row,
                 int64_t vector);
/// Adds what a chain came to to the sums of a row.
void addChainToSums(const ProductProblem &problem, const Panel &panel,
                    Value row, int64_t vector, Value chain);

/// One chain of a few rows by each of some panels, in registers.
class ProductTile {
public:
  ProductTile(const ProductProblem &problem, const LhsRows &lhs,
              const RhsPanels &rhs)
      : problem(problem), lhs(lhs), rhs(rhs), e(problem.e) {}

  /// Adds a chain of `count` ks to the sums; `prefetch` asks for what is to
  /// come nearer meanwhile, from a packed k on.
  void multiply(ArrayRef<Panel> panels, const TileRows &rows, Value count,
                function_ref<void(Value packedK)> prefetch = nullptr) const;

private:
  RegisterTile getTile(const Panel &panel, const TileRows &rows) const;
  Values multiplyPackedK(const Panel &panel, const TileRows &rows,
                         Value packedK, ValueRange chain) const;

  const ProductProblem &problem;
  const LhsRows &lhs;
  const RhsPanels &rhs;
  Emitter &e;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTTILE_H
