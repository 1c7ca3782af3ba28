//===- DecomposeExperts.cpp - The meaning of the experts' layers ----------===//
//
// Each expert's rows are one product of `linalg`, on the slice that its offsets
// say. The loop over experts is parallel: each writes rows, or a gradient, of
// its own.
//
//===----------------------------------------------------------------------===//

#include "Domain.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"
#include "MoE/Dialect/MoE/IR/ExpertActivations.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include <limits>

using namespace mlir;
using namespace mlir::moe;

using Sizes = SmallVector<OpFoldResult>;

static Value roundTo(Body &b, Type element, Value value) {
  if (element.isF32())
    return value;
  return arith::TruncFOp::create(b, element, value);
}

static Type getElement(Value value) {
  return getElementTypeOrSelf(value.getType());
}

//===----------------------------------------------------------------------===//
// Slices
//===----------------------------------------------------------------------===//

/// `sizes` elements of `value` from `offsets` on, without its first dim where
/// `sizes` has one less.
static Value extractSlice(Body &b, Value value, Sizes offsets, Sizes sizes,
                          int64_t lastStride = 1) {
  auto type = cast<RankedTensorType>(value.getType());
  Sizes strides(type.getRank(), b.getIndexAttr(1));
  strides.back() = b.getIndexAttr(lastStride);
  if (static_cast<int64_t>(sizes.size()) == type.getRank())
    return tensor::ExtractSliceOp::create(b, value, offsets, sizes, strides);
  SmallVector<int64_t> shape;
  SmallVector<Value> dynamic;
  dispatchIndexOpFoldResults(sizes, dynamic, shape);
  sizes.insert(sizes.begin(), b.getIndexAttr(1));
  return tensor::ExtractSliceOp::create(
      b, RankedTensorType::get(shape, type.getElementType()), value, offsets,
      sizes, strides);
}

/// The part `value` of `into`, which this iteration of a forall writes.
static void writeSlice(Body &b, Value value, Value into, Sizes offsets,
                       Sizes sizes) {
  auto inParallel = scf::InParallelOp::create(b);
  b.setInsertionPointToStart(inParallel.getBody());
  Sizes strides(offsets.size(), b.getIndexAttr(1));
  tensor::ParallelInsertSliceOp::create(b, value, into, offsets, sizes,
                                        strides);
}

//===----------------------------------------------------------------------===//
// TokenRowsOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(TokenRowsOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  using namespace token_rows;
  Domain domain(builder, op);
  Type element = getElement(op.getOuts()[0]);
  Value numRows = domain.getSizeValue(r);
  Sizes assignments{domain.getSize(n), domain.getSize(k)};
  Access zeros = domain.fill(domain.at(op.getOuts()[0], {r}),
                             domain.getBody().constantInt(element, 0));
  auto loop = scf::ForallOp::create(
      builder, op.getLoc(), assignments, zeros.value, std::nullopt,
      [&](OpBuilder &nested, Location loc, ValueRange args) {
        Body b(nested, loc);
        Value slot = b.toIndex(
            tensor::ExtractOp::create(b, op.getSlots(), args.take_front(2)));
        Value isRow = b.both(b.atMost(b.index(0), slot), b.less(slot, numRows));
        // An assignment without a row writes no element, at a legal place.
        Value at = b.select(isRow, slot, b.index(0));
        Sizes count{b.select(isRow, b.index(1), b.index(0))};
        Value place = extractSlice(b, args.back(), {at}, count);
        Value token = b.castInt(args[0], element);
        Value written = linalg::FillOp::create(b, token, place).getResult(0);
        writeSlice(b, written, args.back(), {at}, count);
      });
  return SmallVector<Value>{loop.getResult(0)};
}

//===----------------------------------------------------------------------===//
// Runs
//===----------------------------------------------------------------------===//

namespace {
/// The rows of one expert.
struct Run {
  Value expert;
  Value begin;
  Value size;
};
} // namespace

/// The run of `expert`, cut to the rows that there are.
static Run readRun(Body &b, Value offsets, Value expert, Value numRows) {
  auto read = [&](Value at, Value least) {
    Value offset = b.toIndex(tensor::ExtractOp::create(b, offsets, at));
    return b.minSigned(b.maxSigned(offset, least), numRows);
  };
  Value begin = read(expert, b.index(0));
  Value end = read(b.add(expert, b.index(1)), begin);
  return {expert, begin, b.sub(end, begin)};
}

/// `fn` for each expert at once; it writes its part of `shared`.
static Value forEachRun(OpBuilder &builder, Location loc, OpFoldResult experts,
                        Value offsets, Value numRows, Value shared,
                        function_ref<void(Body &, Run, Value)> fn) {
  auto loop = scf::ForallOp::create(
      builder, loc, experts, shared, std::nullopt,
      [&](OpBuilder &nested, Location nestedLoc, ValueRange args) {
        Body b(nested, nestedLoc);
        fn(b, readRun(b, offsets, args[0], numRows), args[1]);
      });
  return loop.getResult(0);
}

/// x_{row(i), d}, zeros for a row that x does not have.
static Access gatherRows(Domain &domain, Value x, Value rows, int64_t r,
                         int64_t d, Value numTokens) {
  Access all = domain.at(x, {r, d});
  if (!rows)
    return all;
  Type element = getElement(x);
  return domain.map(
      {domain.at(rows, {r})}, domain.empty({r, d}, element),
      [&](Body &b, ValueRange in) -> Value {
        Value row = b.toIndex(in[0]), column = b.iteration(d);
        Value isToken =
            b.both(b.atMost(b.index(0), row), b.less(row, numTokens));
        auto read = scf::IfOp::create(
            b, isToken,
            [&](OpBuilder &nested, Location loc) {
              scf::YieldOp::create(nested, loc,
                                   tensor::ExtractOp::create(
                                       nested, loc, x, ValueRange{row, column})
                                       .getResult());
            },
            [&](OpBuilder &nested, Location loc) {
              Body inner(nested, loc);
              scf::YieldOp::create(inner, inner.constant(element, 0.0));
            });
        return read.getResult(0);
      });
}

//===----------------------------------------------------------------------===//
// GroupedLinearOp
//===----------------------------------------------------------------------===//

namespace {
class GroupedLinearMeaning {
public:
  GroupedLinearMeaning(OpBuilder &builder, GroupedLinearOp op)
      : builder(builder), op(op), domain(builder, op),
        features(domain.addDim(getNumFeatures())) {}

  Value build();

private:
  OpFoldResult getNumFeatures();
  std::pair<Value, Value> findInPanels(Body &b, Value feature);
  Value unpackWeight();
  Value loadCode(Body &b, Value feature, Value column);
  Value loadScale(Body &b, Value operand, Value feature, Value column);
  Value dequantize(Body &b, Value code, Value feature, Value column);
  Value dequantizeWeight();
  Access roundRows(Access x);
  Access buildSums(Value x, Value w, Access zeros);
  Access buildHalf(Access sums, bool isFactor);

  OpBuilder &builder;
  GroupedLinearOp op;
  Domain domain;
  /// The dim of z's features, which no operand may span.
  int64_t features;
};
} // namespace

OpFoldResult GroupedLinearMeaning::getNumFeatures() {
  using namespace grouped_linear;
  if (!op.isGated())
    return domain.getSize(f);
  AffineExpr half = builder.getAffineSymbolExpr(0);
  return affine::makeComposedFoldedAffineApply(builder, op.getLoc(), half * 2,
                                               {domain.getSize(g)});
}

/// The panel of a feature, and its place there.
std::pair<Value, Value> GroupedLinearMeaning::findInPanels(Body &b,
                                                           Value feature) {
  using namespace grouped_linear;
  int64_t size = *op.getPacked();
  auto find = [&](Value number, Value width) -> std::pair<Value, Value> {
    return {b.div(number, width), arith::RemUIOp::create(b, number, width)};
  };
  if (!op.hasPanelsOfHalves())
    return find(feature, b.index(size));
  Value half = b.index(size / 2), zero = b.index(0);
  Value numGates = domain.getSizeValue(g);
  Value isFactor =
      arith::CmpIOp::create(b, arith::CmpIPredicate::uge, feature, numGates);
  Value first = arith::SelectOp::create(b, isFactor, numGates, zero);
  auto [panel, lane] = find(arith::SubIOp::create(b, feature, first), half);
  Value behind = arith::SelectOp::create(b, isFactor, half, zero);
  return {panel, arith::AddIOp::create(b, lane, behind)};
}

/// The weight [e, f, d] of one in panels.
Value GroupedLinearMeaning::unpackWeight() {
  using namespace grouped_linear;
  Value w = op.getW();
  Access unpacked =
      domain.map({}, domain.empty({e, features, d}, getElement(w)),
                 [&](Body &b, ValueRange) -> Value {
                   Value two = b.index(2), column = b.iteration(d);
                   auto [panel, lane] = findInPanels(b, b.iteration(features));
                   SmallVector<Value> at{b.iteration(e), panel, column, lane};
                   if (op.isPackedInPairs()) {
                     at[2] = b.div(column, two);
                     at.push_back(arith::RemUIOp::create(b, column, two));
                   }
                   return tensor::ExtractOp::create(b, w, at);
                 });
  return unpacked.value;
}

//===----------------------------------------------------------------------===//
// Quantized weights
//===----------------------------------------------------------------------===//

/// The code of a feature of z and one of x, as an i32.
Value GroupedLinearMeaning::loadCode(Body &b, Value feature, Value column) {
  using namespace grouped_linear;
  auto divide = [&](Value number, int64_t by) {
    return b.div(number, b.index(by));
  };
  auto rest = [&](Value number, int64_t by) -> Value {
    return arith::RemUIOp::create(b, number, b.index(by));
  };
  auto load = [&](ArrayRef<Value> at) -> Value {
    SmallVector<Value> all{b.iteration(e)};
    all.append(at.begin(), at.end());
    Value byte = tensor::ExtractOp::create(b, op.getW(), all);
    return arith::ExtUIOp::create(b, b.getI32Type(), byte);
  };
  // Of the four bytes of a step that of the column.
  auto loadOfStep = [&](Value step) -> Value {
    if (!op.getPacked())
      return load({feature, b.add(b.mul(step, b.index(4)), rest(column, 4))});
    auto [panel, lane] = findInPanels(b, feature);
    return load({panel, step, lane, rest(column, 4)});
  };
  auto takeBits = [&](Value byte, Value number, int64_t bits) -> Value {
    Value shift = b.mul(b.toI32(number), b.i32(bits));
    return arith::AndIOp::create(b, arith::ShRUIOp::create(b, byte, shift),
                                 b.i32((1 << bits) - 1));
  };
  switch (op.getCodeBits()) {
  case 4: {
    Value byte = op.getPacked() ? loadOfStep(divide(column, 8))
                                : load({feature, divide(column, 2)});
    Value isHigh =
        op.getPacked() ? divide(rest(column, 8), 4) : rest(column, 2);
    return takeBits(byte, isHigh, 4);
  }
  case 6: {
    Value set = divide(column, 16);
    Value first = b.mul(set, b.index(3));
    Value inSet = rest(column, 16);
    Value low = loadOfStep(b.add(first, divide(inSet, 8)));
    low = takeBits(low, divide(rest(column, 8), 4), 4);
    Value high = loadOfStep(b.add(first, b.index(2)));
    high = takeBits(high, divide(inSet, 4), 2);
    return b.add(low, b.mul(high, b.i32(16)));
  }
  default:
    return op.getPacked() ? loadOfStep(divide(column, 4))
                          : load({feature, column});
  }
}

/// A scale, or what stands for a zero, of a feature of z and one of x.
Value GroupedLinearMeaning::loadScale(Body &b, Value operand, Value feature,
                                      Value column) {
  using namespace grouped_linear;
  auto load = [&](Value number) -> Value {
    SmallVector<Value> at{b.iteration(e), feature, number};
    if (op.getPacked()) {
      auto [panel, lane] = findInPanels(b, feature);
      at = {b.iteration(e), panel, number, lane};
    }
    return tensor::ExtractOp::create(b, operand, at);
  };
  Type f32 = b.getF32Type();
  if (!op.hasTwoLevels()) {
    Value value = load(op.getGroup() ? b.div(column, b.index(*op.getGroup()))
                                     : b.index(0));
    return getElement(operand).isF32()
               ? value
               : Value(arith::ExtFOp::create(b, f32, value));
  }
  int64_t size = GroupedLinearOp::kSuperblock, group = *op.getGroup();
  Value first =
      b.mul(b.div(column, b.index(size)), b.index(op.getSuperblockScales()));
  Value number = b.div(Value(arith::RemUIOp::create(b, column, b.index(size))),
                       b.index(group));
  Value step = arith::SIToFPOp::create(b, f32, load(b.add(first, number)));
  auto loadByte = [&](int64_t behind) -> Value {
    return arith::ExtUIOp::create(
        b, b.getI16Type(), load(b.add(first, b.index(size / group + behind))));
  };
  Value eight =
      arith::ConstantOp::create(b, b.getIntegerAttr(b.getI16Type(), 8));
  Value high = arith::ShLIOp::create(b, loadByte(1), eight);
  Value bits = arith::OrIOp::create(b, high, loadByte(0));
  Value unit = arith::BitcastOp::create(b, b.getF16Type(), bits);
  return b.mul(step, Value(arith::ExtFOp::create(b, f32, unit)));
}

/// The value of a code of 4 bits: a sign, 2 of exponent and 1 of mantissa.
static Value decodeE2M1(Body &b, Value code) {
  Value magnitude = arith::SIToFPOp::create(
      b, b.getF32Type(), arith::AndIOp::create(b, code, b.i32(7)));
  Value low = b.mul(magnitude, b.f32(0.5));
  Value middle = b.sub(magnitude, b.f32(2.0));
  Value high = b.sub(b.mul(magnitude, b.f32(2.0)), b.f32(8.0));
  Value value = b.select(b.less(magnitude, b.f32(4.0)), low,
                         b.select(b.less(magnitude, b.f32(6.0)), middle, high));
  return b.select(b.less(code, b.i32(8)), value, b.neg(value));
}

/// The value of a code of 8 bits: a sign, 4 of exponent and 3 of mantissa.
static Value decodeE4M3(Body &b, Value code) {
  Value magnitude = arith::AndIOp::create(b, code, b.i32(127));
  // The exponent of a float has 120 more. Without one it is a multiple of 2^-9.
  Value bits = arith::ShLIOp::create(b, magnitude, b.i32(20));
  bits = arith::AddIOp::create(b, bits, b.i32(120 << 23));
  Value normal = arith::BitcastOp::create(b, b.getF32Type(), bits);
  Value small = arith::SIToFPOp::create(b, b.getF32Type(), magnitude);
  small = b.mul(small, b.f32(0x1p-9f));
  Value value = b.select(b.less(magnitude, b.i32(8)), small, normal);
  return b.select(b.less(code, b.i32(128)), value, b.neg(value));
}

Value GroupedLinearMeaning::dequantize(Body &b, Value code, Value feature,
                                       Value column) {
  auto load = [&](Value operand) {
    return loadScale(b, operand, feature, column);
  };
  Value scale = load(op.getScales());
  if (*op.getFormat() == WeightFormat::Fp4E2M1)
    return b.mul(scale, decodeE2M1(b, code));
  if (*op.getFormat() == WeightFormat::Fp8E4M3)
    return b.mul(scale, decodeE4M3(b, code));
  int64_t middle = int64_t(1) << (op.getCodeBits() - 1);
  Value zero = op.getZeros() ? load(op.getZeros()) : b.f32(middle);
  Value value = arith::SIToFPOp::create(b, b.getF32Type(), code);
  if (op.getZeros() && op.hasTwoLevels())
    return b.sub(b.mul(scale, value), zero);
  return b.mul(scale, b.sub(value, zero));
}

/// The weight [e, f, d] of codes, in f32.
Value GroupedLinearMeaning::dequantizeWeight() {
  using namespace grouped_linear;
  Access weight = domain.map(
      {}, domain.empty({e, features, d}, builder.getF32Type()),
      [&](Body &b, ValueRange) -> Value {
        Value feature = b.iteration(features), column = b.iteration(d);
        return dequantize(b, loadCode(b, feature, column), feature, column);
      });
  return weight.value;
}

/// Rows whose blocks are a q, with the nearest integers q and a the largest
/// magnitude by 127.
Access GroupedLinearMeaning::roundRows(Access x) {
  using namespace grouped_linear;
  int64_t size = op.getProductBlock();
  AffineExpr width = builder.getAffineSymbolExpr(0);
  int64_t block = domain.addDim(affine::makeComposedFoldedAffineApply(
      builder, op.getLoc(), width.ceilDiv(size), {domain.getSize(d)}));
  int64_t inBlock = domain.addDim(builder.getIndexAttr(size));
  Type f32 = builder.getF32Type();
  Value numColumns = domain.getSizeValue(d);
  Value last = domain.getBody().sub(numColumns, domain.getBody().index(1));
  // A place behind the last feature is that of the last one again.
  Access largest = domain.reduce(
      {domain.empty({inBlock}, f32)}, domain.filled({r, block}, 0.0f),
      [&](Body &b, ValueRange, Value acc) -> Value {
        Value column = b.add(b.mul(b.iteration(block), b.index(size)),
                             b.iteration(inBlock));
        Value value = tensor::ExtractOp::create(
            b, x.value, ValueRange{b.iteration(r), b.minSigned(column, last)});
        if (!getElement(x.value).isF32())
          value = arith::ExtFOp::create(b, f32, value);
        return b.maximum(acc, b.abs(value));
      });
  return domain.map(
      {x}, domain.empty({r, d}, f32), [&](Body &b, ValueRange in) -> Value {
        Value number = b.div(b.iteration(d), b.index(size));
        Value most = tensor::ExtractOp::create(
            b, largest.value, ValueRange{b.iteration(r), number});
        // Finite where the block is zeros, or so small that its inverse is not.
        Value inverse =
            b.minimumNumber(b.div(b.f32(127.0), most),
                            b.f32(std::numeric_limits<float>::max()));
        Value q = math::RoundEvenOp::create(b, b.mul(in[0], inverse));
        q = b.maximumNumber(b.minimumNumber(q, b.f32(127.0)), b.f32(-127.0));
        return b.mul(q, b.div(most, b.f32(127.0)));
      });
}

/// z, in the rows of runs; `zeros` elsewhere.
Access GroupedLinearMeaning::buildSums(Value x, Value w, Access zeros) {
  using namespace grouped_linear;
  OpFoldResult width = domain.getSize(d),
               numFeatures = domain.getSize(features);
  bool transposed = op.getTransposed();
  zeros.value = forEachRun(
      builder, op.getLoc(), domain.getSize(e), op.getOffsets(),
      domain.getSizeValue(r), zeros.value, [&](Body &b, Run run, Value shared) {
        OpFoldResult zero = b.getIndexAttr(0);
        Domain inner(b, op);
        int64_t m = inner.addDim(run.size), out = inner.addDim(numFeatures),
                in = inner.addDim(width);
        Value mine = extractSlice(b, x, {run.begin, zero}, {run.size, width});
        Value weight = extractSlice(b, w, {run.expert, zero, zero},
                                    transposed ? Sizes{width, numFeatures}
                                               : Sizes{numFeatures, width});
        Access sums = inner.at(
            extractSlice(b, shared, {run.begin, zero}, {run.size, numFeatures}),
            {m, out});
        if (Value bias = op.getBias())
          sums = inner.map({inner.at(extractSlice(b, bias, {run.expert, zero},
                                                  {numFeatures}),
                                     {out})},
                           sums, [](Body &, ValueRange in) { return in[0]; });
        sums = inner.contract(
            inner.at(mine, {m, in}),
            inner.at(weight, transposed ? SmallVector<int64_t>{in, out}
                                        : SmallVector<int64_t>{out, in}),
            sums);
        writeSlice(b, sums.value, shared, {run.begin, zero},
                   {run.size, numFeatures});
      });
  return zeros;
}

/// The gates of z, or the factors.
Access GroupedLinearMeaning::buildHalf(Access sums, bool isFactor) {
  using namespace grouped_linear;
  OpFoldResult zero = builder.getIndexAttr(0), begin = zero;
  bool interleaved = op.getGate() == GateLayout::Interleaved;
  if (isFactor)
    begin =
        interleaved ? OpFoldResult(builder.getIndexAttr(1)) : domain.getSize(g);
  return domain.at(extractSlice(domain.getBody(), sums.value, {zero, begin},
                                {domain.getSize(r), domain.getSize(g)},
                                interleaved ? 2 : 1),
                   {r, g});
}

Value GroupedLinearMeaning::build() {
  using namespace grouped_linear;
  Value init = op.getOuts()[0];
  Type element = getElement(init);
  Value numTokens = op.getRows() ? domain.getSizeValue(n) : Value();
  Access x = gatherRows(domain, op.getX(), op.getRows(), r, d, numTokens);
  if (op.getActivations() == ActivationFormat::Int8)
    x = roundRows(x);
  Value w = op.isQuantized() ? dequantizeWeight()
            : op.getPacked() ? unpackWeight()
                             : op.getW();
  bool inPlace = element.isF32() && !op.hasEpilogue();
  Access zeros = inPlace ? domain.fill(domain.at(init, {r, features}),
                                       domain.getBody().f32(0.0))
                         : domain.filled({r, features}, 0.0f);
  Access sums = buildSums(x.value, w, zeros);
  if (inPlace)
    return sums.value;
  if (!op.isGated())
    return domain
        .map({sums}, domain.at(init, {r, features}),
             [&](Body &b, ValueRange in) {
               return roundTo(b, element, buildActivation(b, op, in[0]));
             })
        .value;
  return domain
      .map({buildHalf(sums, false), buildHalf(sums, true)},
           domain.at(init, {r, g}),
           [&](Body &b, ValueRange in) {
             return roundTo(b, element,
                            buildGatedActivation(b, op, in[0], in[1]));
           })
      .value;
}

Replacements mlir::moe::decompose(GroupedLinearOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  return SmallVector<Value>{GroupedLinearMeaning(builder, op).build()};
}

//===----------------------------------------------------------------------===//
// GroupedOuterOp
//===----------------------------------------------------------------------===//

Replacements mlir::moe::decompose(GroupedOuterOp op, OpBuilder &builder) {
  if (!op.hasPureTensorSemantics())
    return failure();
  using namespace grouped_outer;
  Domain domain(builder, op);
  Type element = getElement(op.getOuts()[0]);
  Value numTokens = op.getRows() ? domain.getSizeValue(n) : Value();
  Access x = gatherRows(domain, op.getX(), op.getRows(), r, d, numTokens);
  OpFoldResult numOut = domain.getSize(f), width = domain.getSize(d);
  Value dw = forEachRun(
      builder, op.getLoc(), domain.getSize(e), op.getOffsets(),
      domain.getSizeValue(r), op.getOuts()[0],
      [&](Body &b, Run run, Value shared) {
        OpFoldResult zero = b.getIndexAttr(0);
        Domain inner(b, op);
        int64_t out = inner.addDim(numOut), in = inner.addDim(width),
                m = inner.addDim(run.size);
        Access place = inner.at(
            extractSlice(b, shared, {run.expert, zero, zero}, {numOut, width}),
            {out, in});
        Access dy = inner.at(
            extractSlice(b, op.getDy(), {run.begin, zero}, {run.size, numOut}),
            {m, out});
        Access mine = inner.at(
            extractSlice(b, x.value, {run.begin, zero}, {run.size, width}),
            {m, in});
        Access zeros = element.isF32()
                           ? inner.fill(place, inner.getBody().f32(0.0))
                           : inner.filled({out, in}, 0.0f);
        Access sums = inner.contract(dy, mine, zeros);
        if (!element.isF32())
          sums = inner.map({sums}, place, [&](Body &body, ValueRange values) {
            return roundTo(body, element, values[0]);
          });
        writeSlice(b, sums.value, shared, {run.expert, zero, zero},
                   {b.getIndexAttr(1), numOut, width});
      });
  return SmallVector<Value>{dw};
}
