//===- MoEStatisticsOps.cpp - Dims, maps and verifiers ------------------===//
//
// One section an op, in the order of MoEStatisticsOps.td: its dims, its maps,
// what its verifier checks beyond the shapes, its folders.
//
//===----------------------------------------------------------------------===//

#include "MoEOpsDetail.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// MadDispersionOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> MadDispersionOp::getDims() {
  return {
      {"e", kParallel, /*whole=*/true}, {"d", kParallel}, {"n", kReduction}};
}

ArrayAttr MadDispersionOp::getIndexingMaps() {
  using namespace dispersion;
  return MapsBuilder(getContext(), numDims)
      .add(getH(), {n, d})
      .add(getAssign(), {n})
      .add(getMask(), {n})
      .add(getOuts()[0], {e, d})
      .add(getOuts()[1], {e, d})
      .add(getOuts()[2], {e})
      .get();
}

LogicalResult MadDispersionOp::verify() {
  return verifyStructured(*this,
                          {OutElement::F32, OutElement::F32, OutElement::I32});
}

//===----------------------------------------------------------------------===//
// DispersionWeightsOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> DispersionWeightsOp::getDims() {
  return {{"e", kParallel, /*whole=*/true}, {"d", kParallel, /*whole=*/true}};
}

ArrayAttr DispersionWeightsOp::getIndexingMaps() {
  return MapsBuilder(getContext(), 2)
      .add(getS(), {0, 1})
      .add(getCount(), {0})
      .add(getOuts()[0], {0, 1})
      .get();
}

LogicalResult DispersionWeightsOp::verify() {
  if (failed(verifyStructured(*this, {OutElement::F32})) ||
      failed(verifyPositive(*this, getEps().convertToDouble(), "eps")))
    return failure(); // dispersion_weights_c1
  std::optional<APFloat> clamp = getClamp();
  if (!clamp)
    return success();
  return verifyPositive(*this, clamp->convertToDouble(),
                        "clamp"); // dispersion_weights_c2
}

//===----------------------------------------------------------------------===//
// AdjacencyGateOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> AdjacencyGateOp::getDims() {
  return withLeadingDims(getNumLeading(getP()),
                         {{"e", kParallel, /*whole=*/true}, {"l", kReduction}});
}

ArrayAttr AdjacencyGateOp::getIndexingMaps() {
  int64_t n = getNumLeading(getP()), e = n, l = n + 1;
  return MapsBuilder(getContext(), n + 2)
      .addWithLeading(getP(), n, {l})
      .add(getA(), {e, l})
      .addWithLeading(getOuts()[0], n, {e})
      .get();
}

unsigned AdjacencyGateOp::getNumLeadingDims() { return getNumLeading(getP()); }

/// adjacency_gate_c1, adjacency_update_c1, co_selections_c1.
static LogicalResult verifySquare(Operation *op, Value graph, StringRef name) {
  auto type = cast<ShapedType>(graph.getType());
  if (type.getRank() == 2 && !type.isDynamicDim(0) && !type.isDynamicDim(1) &&
      type.getDimSize(0) != type.getDimSize(1))
    return op->emitOpError()
           << "expected '" << name << "' to be square, found "
           << type.getDimSize(0) << " x " << type.getDimSize(1);
  return success();
}

LogicalResult AdjacencyGateOp::verify() {
  if (failed(verifyHasLastDim(*this, getP(), "p")) ||
      failed(verifySquare(*this, getA(), "a")))
    return failure();
  return verifyStructured(*this, {OutElement::F32});
}

SmallVector<std::pair<unsigned, unsigned>> AdjacencyGateOp::getDimOrder() {
  unsigned e = getNumLeading(getP()), l = e + 1;
  return {{e, l}, {l, e}};
}

//===----------------------------------------------------------------------===//
// AdjacencyUpdateOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> AdjacencyUpdateOp::getDims() {
  return {{"e", kParallel, /*whole=*/true},
          {"l", kParallel, /*whole=*/true},
          {"n", kReduction},
          {"k", kReduction}};
}

ArrayAttr AdjacencyUpdateOp::getIndexingMaps() {
  using namespace adjacency;
  return MapsBuilder(getContext(), numDims)
      .add(getA(), {e, l})
      .add(getIndices(), {n, k})
      .add(getMask(), {n})
      .add(getOuts()[0], {e, l})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> AdjacencyUpdateOp::getDimOrder() {
  using namespace adjacency;
  return {{k, e}, {e, l}, {l, e}};
}

LogicalResult AdjacencyUpdateOp::verify() {
  if (failed(verifySquare(*this, getA(), "a")) ||
      failed(verifyStructured(*this, {OutElement::F32})))
    return failure();
  double beta = getBeta().convertToDouble();
  if (!(beta >= 0.0 && beta <= 1.0)) // adjacency_update_c2
    return emitOpError() << "expected beta to be in [0, 1], found " << beta;
  if (getNorm() == AdjacencyNorm::Eq7 && !getDiagonal())
    return emitOpError( // adjacency_update_c3
        "expected diagonal = true with norm = eq7, which divides by the "
        "diagonal");
  return success();
}

//===----------------------------------------------------------------------===//
// CoSelectionsOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> CoSelectionsOp::getDims() {
  return {{"e", kParallel, /*whole=*/true},
          {"l", kParallel, /*whole=*/true},
          {"n", kReduction},
          {"k", kReduction}};
}

ArrayAttr CoSelectionsOp::getIndexingMaps() {
  using namespace adjacency;
  return MapsBuilder(getContext(), numDims)
      .add(getIndices(), {n, k})
      .add(getMask(), {n})
      .add(getOuts()[0], {e, l})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> CoSelectionsOp::getDimOrder() {
  using namespace adjacency;
  return {{k, e}, {e, l}, {l, e}};
}

bool CoSelectionsOp::accumulates() { return true; }

LogicalResult CoSelectionsOp::verify() {
  if (!getOuts().empty() &&
      failed(verifySquare(*this, getOuts()[0], "counts"))) // co_selections_c1
    return failure();
  return verifyStructured(*this, {OutElement::I32});
}
