//===- MoEDispatchOps.cpp - Dims, maps and verifiers --------------------===//
//
// One section an op, in the order of MoEDispatchOps.td: its dims, its maps,
// what its verifier checks beyond the shapes.
//
//===----------------------------------------------------------------------===//

#include "MoEOpsDetail.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// DispatchOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> DispatchOp::getDims() {
  // The row of an assignment depends on all assignments.
  return {{"n", kParallel, /*whole=*/true},
          {"k", kParallel, /*whole=*/true},
          {"e", kParallel, /*whole=*/true},
          {"b", kParallel, /*whole=*/true},
          {"l", kReduction}};
}

ArrayAttr DispatchOp::getIndexingMaps() {
  using namespace dispatch;
  return MapsBuilder(getContext(), numDims)
      .add(getIndices(), {n, k})
      .add(getPriority(), {n})
      .add(getGates(), {n, k})
      .add(getExpertMap(), {l})
      .add(getCapacity())
      .add(getMask(), {n})
      .add(getSlotsInit(), {n, k})
      .add(getOffsetsInit(), {b})
      .add(getCountsInit(), {e})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> DispatchOp::getDimOrder() {
  using namespace dispatch;
  // dispatch_c5 asks for more where both are static.
  return {{e, b}};
}

/// dispatch_c2, dispatch_c3: a drop rule has the operand that it reads, and no
/// operand is ignored.
static LogicalResult verifyDropRule(DispatchOp op) {
  struct {
    DropRule rule;
    Value operand;
    StringRef name;
  } rules[] = {{DropRule::Priority, op.getPriority(), "priority"},
               {DropRule::Probs, op.getGates(), "gates"}};
  for (auto [rule, operand, name] : rules) {
    bool isRule = op.getDrop() == rule;
    if (isRule != static_cast<bool>(operand))
      return op.emitOpError()
             << "expected operand '" << name << "' "
             << (isRule ? "with" : "only with")
             << " drop = " << stringifyDropRule(rule) << ", found "
             << (isRule ? "none" : "drop = ")
             << (isRule ? StringRef() : stringifyDropRule(op.getDrop()));
  }
  return success();
}

/// dispatch_c6: what the alignment adds to each expert's rows leaves the
/// offsets in 32 bits.
static LogicalResult verifyAlignment(DispatchOp op, int64_t numExperts) {
  int64_t alignment = op.getAlignment();
  if (failed(verifyAtLeastOne(op, alignment, "alignment")))
    return failure();
  int64_t experts =
      ShapedType::isDynamic(numExperts) ? 1 : std::max<int64_t>(numExperts, 1);
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  if (alignment - 1 <= kMostRows / experts)
    return success();
  return op.emitOpError("expected alignment to leave all rows of ")
         << experts << " experts below 2**31, found " << alignment;
}

LogicalResult DispatchOp::verify() {
  using namespace dispatch;
  if (failed(verifyStructured(*this,
                              {OutElement::ExpertIndex, OutElement::ExpertIndex,
                               OutElement::ExpertIndex})) ||
      failed(verifyDropRule(*this)))
    return failure();
  if (getCapacity() && getCapacityFactor()) // dispatch_c1
    return emitOpError(
        "expected at most one of 'capacity' and capacity_factor, found both");
  if (std::optional<APFloat> factor = getCapacityFactor()) // dispatch_c4
    if (failed(verifyPositive(*this, factor->convertToDouble(),
                              "capacity_factor")))
      return failure();
  int64_t numExperts = getStaticDimSize(*this, e);
  int64_t numOffsets = getStaticDimSize(*this, b);
  if (!ShapedType::isDynamic(numExperts) &&
      !ShapedType::isDynamic(numOffsets) &&
      numOffsets != numExperts + 1) // dispatch_c5
    return emitOpError() << "expected the size of 'offsets' (" << numOffsets
                         << ") to be one more than that of 'counts' ("
                         << numExperts << ")";
  return verifyAlignment(*this, numExperts); // dispatch_c6
}

//===----------------------------------------------------------------------===//
// CombineOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> CombineOp::getDims() {
  return withLeadingDims(
      getNumLeading(getGates()),
      {{"d", kParallel}, {"k", kReduction}, {"s", kReduction}});
}

ArrayAttr CombineOp::getIndexingMaps() {
  int64_t n = getNumLeading(getGates()), d = n, k = n + 1, s = n + 2;
  return MapsBuilder(getContext(), n + 3)
      .add(getExpertOut(), {s, d})
      .addWithLeading(getGates(), n, {k})
      .addWithLeading(getSlots(), n, {k})
      .addWithLeading(getShared(), n, {d})
      .addWithLeading(getOuts()[0], n, {d})
      .get();
}

LogicalResult CombineOp::verify() {
  if (failed(verifyHasLastDim(*this, getGates(), "gates")))
    return failure();
  return verifyStructured(*this, {OutElement::Activation});
}

//===----------------------------------------------------------------------===//
// SoftDispatchOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> SoftDispatchOp::getDims() {
  int64_t numBatch = std::max<int64_t>(getRank(getX()) - 2, 0);
  static constexpr StringLiteral names[] = {"b0", "b1", "b2", "b3",
                                            "b4", "b5", "b6", "b7"};
  SmallVector<Dim> dims;
  for (int64_t i = 0; i < numBatch; ++i)
    dims.push_back({numBatch == 1 ? StringRef("b")
                                  : StringRef(names[std::min<int64_t>(i, 7)]),
                    kParallel});
  // Two softmaxes: over the tokens, and over the slots.
  llvm::append_range(dims, ArrayRef<Dim>{{"n", kParallel, /*whole=*/true},
                                         {"e", kParallel, /*whole=*/true},
                                         {"p", kParallel, /*whole=*/true},
                                         {"d", kReduction}});
  return dims;
}

ArrayAttr SoftDispatchOp::getIndexingMaps() {
  int64_t b = std::max<int64_t>(getRank(getX()) - 2, 0);
  int64_t n = b, e = b + 1, p = b + 2, d = b + 3;
  return MapsBuilder(getContext(), b + 4)
      .addWithLeading(getX(), b, {n, d})
      .add(getPhi(), {d, e, p})
      .addWithLeading(getMetric(), b, {n, d})
      .add(getScaleValue())
      .addWithLeading(getMask(), b, {n})
      .addWithLeading(getOuts()[0], b, {n, e, p})
      .addWithLeading(getOuts()[1], b, {n, e, p})
      .get();
}

LogicalResult SoftDispatchOp::verify() {
  if (getRank(getX()) < 2)
    return emitOpError() << "expected 'x' to have at least two dims (n, d), "
                            "found rank "
                         << getRank(getX());
  if (failed(verifyStructured(*this, {OutElement::F32, OutElement::F32})))
    return failure();
  return verifyPositive(*this, getEps().convertToDouble(), // soft_dispatch_c1
                        "eps");
}
