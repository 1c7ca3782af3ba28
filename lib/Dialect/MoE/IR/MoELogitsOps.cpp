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

//===----------------------------------------------------------------------===//
// CosineLogitsOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> CosineLogitsOp::getDims() {
  return withLeadingDims(
      getNumLeading(getH()),
      {{"e", kParallel}, {"c", kReduction}, {"d", kReduction}});
}

ArrayAttr CosineLogitsOp::getIndexingMaps() {
  int64_t n = getNumLeading(getH()), e = n, c = n + 1, d = n + 2;
  // Without omega the embeddings live in the space of the tokens
  // (cosine_logits_c1).
  return MapsBuilder(getContext(), n + 3)
      .addWithLeading(getH(), n, {d})
      .add(getEmb(), {e, getOmega() ? c : d})
      .add(getOmega(), {c, d})
      .add(getTauValue())
      .addWithLeading(getOuts()[0], n, {e})
      .get();
}

LogicalResult CosineLogitsOp::verify() {
  if (failed(verifyHasLastDim(*this, getH(), "h")) ||
      failed(verifyStructured(*this, {OutElement::F32})))
    return failure();
  if (failed(verifyPositive(*this, getEps().convertToDouble(), "eps")))
    return failure(); // cosine_logits_c2
  if (getTauValue())
    return success();
  return verifyPositive(*this, getTau().convertToDouble(),
                        "tau"); // cosine_logits_c3
}

//===----------------------------------------------------------------------===//
// HyperRouterOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> HyperRouterOp::getDims() {
  return {{"e", kParallel, /*whole=*/true},
          {"d", kParallel, /*whole=*/true},
          {"g", kReduction},
          {"h", kReduction},
          {"c", kReduction}};
}

ArrayAttr HyperRouterOp::getIndexingMaps() {
  using namespace hyper;
  return MapsBuilder(getContext(), numDims)
      .add(getE(), {c})
      .add(getW1(), {h, c})
      .add(getB1(), {h})
      .add(getW2(), {g, h})
      .add(getB2(), {g})
      .add(getOuts()[0], {e, d})
      .add(getOuts()[1], {e})
      .get();
}

LogicalResult HyperRouterOp::verify() {
  if (failed(verifyStructured(*this, {OutElement::F32, OutElement::F32})))
    return failure();
  int64_t experts = getStaticDimSize(*this, hyper::e);
  int64_t features = getStaticDimSize(*this, hyper::d);
  int64_t rows = getStaticDimSize(*this, hyper::g);
  if (ShapedType::isDynamic(experts) || ShapedType::isDynamic(features) ||
      ShapedType::isDynamic(rows))
    return success();
  if (rows != experts * (features + 1)) // hyper_router_c1
    return emitOpError() << "expected dim 0 of 'w2' to be e (d + 1) = "
                         << experts << " * (" << features << " + 1), found "
                         << rows;
  return success();
}

//===----------------------------------------------------------------------===//
// ACLogitsOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> ACLogitsOp::getDims() {
  return withLeadingDims(getNumLeading(getH()), {{"e", kParallel},
                                                 {"l", kReduction},
                                                 {"r", kReduction},
                                                 {"d", kReduction}});
}

ArrayAttr ACLogitsOp::getIndexingMaps() {
  int64_t n = getNumLeading(getH()), e = n, l = n + 1, r = n + 2, d = n + 3;
  return MapsBuilder(getContext(), n + 4)
      .addWithLeading(getH(), n, {d})
      .add(getM(), {l, d})
      .addWithLeading(getPrevIdx(), n, {r})
      .add(getEmb(), {e, d})
      .addWithLeading(getPrevGates(), n, {r})
      .add(getBias(), {e})
      .addWithLeading(getOuts()[0], n, {e})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> ACLogitsOp::getDimOrder() {
  // The other way round holds of the whole problem, but not of a tile of its
  // experts.
  unsigned e = getNumLeading(getH()), l = e + 1;
  return {{e, l}};
}

LogicalResult ACLogitsOp::verify() {
  if (failed(verifyHasLastDim(*this, getH(), "h")) ||
      failed(verifyStructured(*this, {OutElement::F32})))
    return failure();
  int64_t places = getStaticDimSize(*this, getNumLeading(getH()) + 2);
  if (places == 0)
    return emitOpError("expected r, the last dim of 'prev_idx', to be at "
                       "least 1, found 0");
  if (getPrevGates() || places == 1)
    return success();
  InFlightDiagnostic error = emitOpError( // ac_logits_c1
      "expected 'prev_gates' unless 'prev_idx' holds one expert a token, "
      "found none with r ");
  if (ShapedType::isDynamic(places))
    return error << "dynamic";
  return error << "= " << places;
}
