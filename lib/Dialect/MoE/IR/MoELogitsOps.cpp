//===- MoELogitsOps.cpp - Dims, maps and verifiers ----------------------===//
//
// One section an op, in the order of MoELogitsOps.td: its dims, its maps, what
// its verifier checks beyond the shapes, its folders.
//
//===----------------------------------------------------------------------===//

#include "MoEOpsDetail.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// RouterLogitsOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> RouterLogitsOp::getDims() {
  return withLeadingDims(getNumLeading(getH()),
                         {{"e", kParallel}, {"d", kReduction}});
}

ArrayAttr RouterLogitsOp::getIndexingMaps() {
  int64_t n = getNumLeading(getH()), e = n, d = n + 1;
  return MapsBuilder(getContext(), n + 2)
      .addWithLeading(getH(), n, {d})
      .add(getWeight(), {e, d})
      .add(getBias(), {e})
      .addWithLeading(getOuts()[0], n, {e})
      .get();
}

LogicalResult RouterLogitsOp::verify() {
  if (failed(verifyHasLastDim(*this, getH(), "h")))
    return failure();
  return verifyStructured(*this, {OutElement::F32});
}
