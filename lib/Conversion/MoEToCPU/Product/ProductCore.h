//===- ProductCore.h - Rows times panels of columns -------------*- C++ -*-===//
//
// The one product of rows with weights: contractions of linalg, router logits
// and the layers of experts differ in where operands lie and in what becomes of
// the sums; the loops around it are theirs. It has these parts:
//
//   ProductProblem      the operands, and what follows from them
//   PanelShape, Panels  the layout of columns, and how it comes about
//   LhsRows             rows, and their copies
//   ProductTile         one chain of a tile of sums, in registers
//   Chains              the order of sums
//   ProductPrefetch     what comes nearer meanwhile
//   KContiguousProduct  few rows with weights that no panel is made of
//   TileProduct         the loops around a matrix unit, if there is one
//   MatrixUnit          its tiles, which quantized experts use as well
//
// The mixing kernels multiply tokens with tokens, of which both sides are
// packed by them: they have loops of their own (SoftmaxMixTiles.h) around the
// same register tile and the same chains.
//
// The tile (RegisterTile.h) and the chains are those of the mixing kernels,
// too, whose loops are in SoftmaxMixTiles.h.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTCORE_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTCORE_H

#include "ProductProblem.h"

namespace mlir::moe {

/// Adds to the sums of some rows and the columns of a group.
void multiplyGroup(const ProductProblem &problem, const RowRange &rows,
                   const PanelGroup &group);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PRODUCTCORE_H
