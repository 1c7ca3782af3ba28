//===- MoEExpertOps.cpp - Dims, maps and verifiers ----------------------===//
//
// One section an op, in the order of MoEExpertOps.td: its dims, its maps, what
// its verifier checks beyond the shapes.
//
//===----------------------------------------------------------------------===//

#include "MoEOpsDetail.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// One offset more than experts, where both are static.
static LogicalResult verifyOffsets(MoEStructuredOpInterface op, unsigned e,
                                   unsigned b) {
  int64_t numExperts = getStaticDimSize(op, e);
  int64_t numOffsets = getStaticDimSize(op, b);
  if (ShapedType::isDynamic(numExperts) || ShapedType::isDynamic(numOffsets) ||
      numOffsets == numExperts + 1)
    return success();
  return op->emitOpError() << "expected the size of 'offsets' (" << numOffsets
                           << ") to be one more than the number of experts ("
                           << numExperts << ")";
}

//===----------------------------------------------------------------------===//
// TokenRowsOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> TokenRowsOp::getDims() {
  return {
      {"r", kParallel, /*whole=*/true}, {"n", kReduction}, {"k", kReduction}};
}

ArrayAttr TokenRowsOp::getIndexingMaps() {
  using namespace token_rows;
  return MapsBuilder(getContext(), numDims)
      .add(getSlots(), {n, k})
      .add(getOuts()[0], {r})
      .get();
}

LogicalResult TokenRowsOp::verify() {
  return verifyStructured(*this, {OutElement::ExpertIndex});
}

//===----------------------------------------------------------------------===//
// GroupedLinearOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> GroupedLinearOp::getDims() {
  return {{"r", kParallel, /*whole=*/true},
          {"f", kParallel, /*whole=*/true},
          {"g", kParallel, /*whole=*/true},
          {"e", kReduction},
          {"b", kReduction},
          {"n", kReduction},
          {"d", kReduction},
          {"p", kReduction},
          {"q", kReduction},
          {"t", kReduction},
          {"s", kReduction},
          {"c", kReduction},
          {"u", kReduction}};
}

ArrayAttr GroupedLinearOp::getIndexingMaps() {
  using namespace grouped_linear;
  SmallVector<int64_t> weight{e, f, isQuantized() ? c : d};
  if (getPacked())
    weight = isQuantized() || isPackedInPairs()
                 ? SmallVector<int64_t>{e, p, t, q, s}
                 : SmallVector<int64_t>{e, p, d, q};
  else if (getTransposed())
    weight = {e, d, f};
  SmallVector<int64_t> ofScales{e, f, u};
  if (getPacked())
    ofScales = {e, p, u, q};
  return MapsBuilder(getContext(), numDims)
      .add(getX(), {getRows() ? n : r, d})
      .add(getW(), weight)
      .add(getOffsets(), {b})
      .add(getRows(), {r})
      .add(getBias(), {e, f})
      .add(getScales(), ofScales)
      .add(getZeros(), ofScales)
      .add(getOuts()[0], {r, isGated() ? g : f})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> GroupedLinearOp::getDimOrder() {
  using namespace grouped_linear;
  // grouped_linear_c1 asks for more where both are static.
  return {{e, b}};
}

/// grouped_linear_c2: a gate and its factor for each feature of y.
static LogicalResult verifyGatedWidth(GroupedLinearOp op) {
  using namespace grouped_linear;
  int64_t width = getStaticDimSize(op, f), gated = getStaticDimSize(op, g);
  if (!op.isGated() || ShapedType::isDynamic(width) ||
      ShapedType::isDynamic(gated) || width == 2 * gated)
    return success();
  return op.emitOpError() << "expected the features of 'w' (" << width
                          << ") to be twice those of 'y' (" << gated
                          << "), of which each has a gate and a factor";
}

/// grouped_linear_c3, c4: what the attributes of an activation are.
static LogicalResult verifyActivation(GroupedLinearOp op) {
  struct {
    std::optional<APFloat> value;
    StringRef name;
  } limits[] = {{op.getLimit(), "limit"}, {op.getUpLimit(), "up_limit"}};
  for (auto &[value, name] : limits)
    if (value && failed(verifyPositive(op, value->convertToDouble(), name)))
      return failure();
  double alpha = op.getAlpha().convertToDouble();
  if (failed(verifyPositive(op, alpha, "alpha")))
    return failure();
  double upOffset = op.getUpOffset().convertToDouble();
  if (!std::isfinite(upOffset))
    return op.emitOpError()
           << "expected up_offset to be finite, found " << upOffset;

  bool isSilu = op.getActivation() == ExpertActivation::Silu;
  bool isSoftcap = op.getBound() == GateBound::Softcap;
  if (!op.isGated() && (op.getLimit() || op.getUpLimit() || upOffset != 0.0 ||
                        op.getBound() != GateBound::Clamp))
    return op.emitOpError("expected limit, up_limit, bound and up_offset only "
                          "with a gate, found gate = none");
  if (!isSilu && (alpha != 1.0 || isSoftcap))
    return op.emitOpError()
           << "expected " << (isSoftcap ? "bound = softcap" : "alpha")
           << " only with activation = silu, found "
           << stringifyExpertActivation(op.getActivation());
  if (op.getBound() != GateBound::Clamp && !op.getLimit())
    return op.emitOpError()
           << "expected limit with bound = "
           << stringifyGateBound(op.getBound()) << ", found none";
  return success();
}

/// Dynamic where `size` is.
static int64_t scaled(int64_t size, int64_t factor) {
  return ShapedType::isDynamic(size) ? size : size * factor;
}
static int64_t ceilDiv(int64_t size, int64_t by) {
  return ShapedType::isDynamic(size)
             ? size
             : static_cast<int64_t>(llvm::divideCeil(size, by));
}

namespace {
/// What a dim must be where it is static.
struct ExpectedSize {
  unsigned dim;
  int64_t size;
  StringRef name;
};
} // namespace

static LogicalResult verifySizes(GroupedLinearOp op,
                                 ArrayRef<ExpectedSize> sizes) {
  for (auto [dim, expected, name] : sizes) {
    int64_t found = getStaticDimSize(op, dim);
    if (!ShapedType::isDynamic(found) && !ShapedType::isDynamic(expected) &&
        found != expected)
      return op.emitOpError() << "expected " << name << " to be " << expected
                              << ", found " << found;
  }
  return success();
}

/// grouped_linear_c5: a packed weight has the sizes that its panels say.
static LogicalResult verifyPanels(GroupedLinearOp op) {
  using namespace grouped_linear;
  std::optional<int64_t> packed = op.getPacked();
  if (!packed)
    return success();
  if (op.getTransposed())
    return op.emitOpError(
        "expected at most one of transposed and packed, found both");
  int64_t numFeatures = getStaticDimSize(op, f);
  if (op.isGated() && ShapedType::isDynamic(numFeatures))
    numFeatures = scaled(getStaticDimSize(op, g), 2);
  if (op.hasPanelsOfHalves() && *packed % 2 != 0)
    return op.emitOpError() << "expected packed to be even with a concatenated "
                               "gate, found "
                            << *packed;
  if (failed(verifySizes(
          op, {{q, *packed, "the output features of a panel in 'w'"},
               {p, ceilDiv(numFeatures, *packed), "the panels in 'w'"}})))
    return failure();
  if (op.isQuantized())
    return success();
  if (failed(verifySizes(op, {{t, ceilDiv(getStaticDimSize(op, d), 2),
                               "the pairs of features of 'x' in 'w'"},
                              {s, 2, "the features of a pair in 'w'"}})))
    return failure();
  Type element = getElementTypeOrSelf(op.getW().getType());
  if (op.isPackedInPairs() != element.isBF16())
    return op.emitOpError()
           << "expected a packed weight in pairs with bf16, and "
              "only then, found a rank of "
           << cast<ShapedType>(op.getW().getType()).getRank() << " with "
           << element;
  return success();
}

int64_t GroupedLinearOp::getCodeBits() {
  switch (*getFormat()) {
  case WeightFormat::Int4:
  case WeightFormat::Fp4E2M1:
    return 4;
  case WeightFormat::Int6:
    return 6;
  case WeightFormat::Int8:
  case WeightFormat::Fp8E4M3:
    return 8;
  }
  llvm_unreachable("unknown format");
}

bool GroupedLinearOp::hasTwoLevels() {
  return getScales() && getElementTypeOrSelf(getScales()).isInteger(8);
}

/// grouped_linear_c6, c7: codes have a format, and only they.
static LogicalResult verifyFormat(GroupedLinearOp op) {
  bool areCodes = getElementTypeOrSelf(op.getW().getType()).isInteger(8);
  if (areCodes != op.isQuantized())
    return op.emitOpError()
           << "expected a format with a weight of i8, and only then, found "
           << op.getW().getType() << (areCodes ? " without one" : " with one");
  if (!op.isQuantized()) {
    if (op.getScales() || op.getZeros() || op.getGroup() ||
        op.getActivations() != ActivationFormat::None)
      return op.emitOpError("expected scales, zeros, group and activations "
                            "only with a format, found none");
    return success();
  }
  if (!op.getScales())
    return op.emitOpError("expected scales with a format, found none");
  if (op.getZeros() && op.hasFloatCodes())
    return op.emitOpError() << "expected no zeros with format = "
                            << stringifyWeightFormat(*op.getFormat())
                            << ", whose codes have a sign; found zeros";
  if (op.getTransposed())
    return op.emitOpError("expected a weight with a format not to be "
                          "transposed, found transposed");
  return success();
}

/// grouped_linear_c8: which features share a scale.
static LogicalResult verifyGroup(GroupedLinearOp op) {
  std::optional<int64_t> group = op.getGroup();
  constexpr int64_t block = GroupedLinearOp::kProductBlock;
  if (group && *group != 8 && *group != 16 &&
      (*group <= 0 || *group % block != 0))
    return op.emitOpError() << "expected group to be 8, 16 or a multiple of "
                            << block << ", found " << *group;
  if (group == 8 && op.getFormat() == WeightFormat::Int6)
    return op.emitOpError("expected group to be 16 or a multiple of 32 with "
                          "format = int6, found 8");
  constexpr int64_t superblock = GroupedLinearOp::kSuperblock;
  if (op.hasTwoLevels() && (!group || superblock % *group != 0))
    return op.emitOpError()
           << "expected group to divide " << superblock
           << " with scales of i8, which have two levels; found "
           << (group ? std::to_string(*group) : std::string("none"));
  if (op.getZeros() &&
      getElementTypeOrSelf(op.getZeros()).isInteger(8) != op.hasTwoLevels())
    return op.emitOpError()
           << "expected both of scales and zeros to be i8, or "
              "neither, found "
           << op.getScales().getType() << " and " << op.getZeros().getType();
  return success();
}

/// grouped_linear_c9: the sizes of codes and scales.
static LogicalResult verifyQuantized(GroupedLinearOp op) {
  using namespace grouped_linear;
  if (!op.isQuantized())
    return success();
  if (failed(verifyGroup(op)))
    return failure();
  std::optional<int64_t> group = op.getGroup();
  constexpr int64_t block = GroupedLinearOp::kProductBlock;
  int64_t width = getStaticDimSize(op, d), bits = op.getCodeBits();
  int64_t numScales = group ? ceilDiv(width, *group) : 1;
  if (op.hasTwoLevels())
    numScales = scaled(ceilDiv(width, GroupedLinearOp::kSuperblock),
                       op.getSuperblockScales());
  if (op.getPacked())
    return verifySizes(op,
                       {{t, scaled(ceilDiv(width, block), block * bits / 32),
                         "the codes of a feature in 'w'"},
                        {s, 4, "the bytes of a step in 'w'"},
                        {u, numScales, "the scales of a feature"}});
  int64_t numBytes =
      bits == 6 ? scaled(ceilDiv(width, 16), 12) : ceilDiv(width, 8 / bits);
  return verifySizes(op, {{c, numBytes, "the bytes of a feature in 'w'"},
                          {u, numScales, "the scales of a feature"}});
}

LogicalResult GroupedLinearOp::verify() {
  using namespace grouped_linear;
  if (failed(verifyFormat(*this)) ||
      failed(verifyAtLeastOne(*this, getPacked(), "packed")) ||
      failed(verifyStructured(*this, {OutElement::Activation})))
    return failure();
  if (failed(verifyOffsets(*this, e, b))) // grouped_linear_c1
    return failure();
  if (failed(verifyGatedWidth(*this)) || failed(verifyActivation(*this)))
    return failure();
  if (failed(verifyPanels(*this)))
    return failure();
  return verifyQuantized(*this);
}

//===----------------------------------------------------------------------===//
// GroupedOuterOp
//===----------------------------------------------------------------------===//

SmallVector<Dim> GroupedOuterOp::getDims() {
  return {{"e", kParallel, /*whole=*/true},
          {"f", kParallel, /*whole=*/true},
          {"d", kParallel, /*whole=*/true},
          {"r", kReduction},
          {"b", kReduction},
          {"n", kReduction}};
}

ArrayAttr GroupedOuterOp::getIndexingMaps() {
  using namespace grouped_outer;
  return MapsBuilder(getContext(), numDims)
      .add(getDy(), {r, f})
      .add(getX(), {getRows() ? n : r, d})
      .add(getOffsets(), {b})
      .add(getRows(), {r})
      .add(getOuts()[0], {e, f, d})
      .get();
}

SmallVector<std::pair<unsigned, unsigned>> GroupedOuterOp::getDimOrder() {
  using namespace grouped_outer;
  // grouped_outer_c1 asks for more where both are static.
  return {{e, b}};
}

LogicalResult GroupedOuterOp::verify() {
  using namespace grouped_outer;
  if (failed(verifyStructured(*this, {OutElement::Activation})))
    return failure();
  return verifyOffsets(*this, e, b); // grouped_outer_c1
}
