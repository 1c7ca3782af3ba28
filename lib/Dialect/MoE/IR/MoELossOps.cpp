//===- MoELossOps.cpp - Dims, maps and verifiers ------------------------===//
//
// One section an op, in the order of MoELossOps.td: its dims, its maps, what
// its verifier checks beyond the shapes.
//
//===----------------------------------------------------------------------===//

#include "MoEOpsDetail.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// BalanceLossOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> BalanceLossOp::getDims() {
  return {
      {"n", kReduction}, {"e", kParallel, /*whole=*/true}, {"k", kReduction}};
}

ArrayAttr BalanceLossOp::getIndexingMaps() {
  using namespace balance;
  return MapsBuilder(getContext(), numDims)
      .add(getP(), {n, e})
      .add(getIndices(), {n, k})
      .add(getMask(), {n})
      .add(getOuts()[0])
      .add(getOuts()[1], {e})
      .get();
}

LogicalResult BalanceLossOp::verify() {
  return verifyStructured(*this, {OutElement::F32, OutElement::I32});
}

//===----------------------------------------------------------------------===//
// ZLossOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> ZLossOp::getDims() {
  return {{"n", kParallel, /*whole=*/true}, {"e", kReduction}};
}

ArrayAttr ZLossOp::getIndexingMaps() {
  return MapsBuilder(getContext(), 2)
      .add(getZ(), {0, 1})
      .add(getMask(), {0})
      .add(getOuts()[0])
      .add(getOuts()[1], {0})
      .get();
}

LogicalResult ZLossOp::verify() {
  return verifyStructured(*this, {OutElement::F32, OutElement::F32});
}

//===----------------------------------------------------------------------===//
// BiasUpdateOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> BiasUpdateOp::getDims() {
  return {{"e", kParallel, /*whole=*/true}};
}

ArrayAttr BiasUpdateOp::getIndexingMaps() {
  return MapsBuilder(getContext(), 1)
      .add(getBias(), {0})
      .add(getCounts(), {0})
      .add(getOuts()[0], {0})
      .get();
}

LogicalResult BiasUpdateOp::verify() {
  if (failed(verifyStructured(*this, {OutElement::F32})))
    return failure();
  double gamma = getGamma().convertToDouble();
  if (!std::isfinite(gamma)) // bias_update_c1
    return emitOpError() << "expected gamma to be finite, found " << gamma;
  return success();
}
