//===- LinearToGroupedLinear.cpp - Dense layers are one expert ------------===//
//
// Matches a product of rows with a weight, where it starts from zeros or from a
// bias, and where a conversion is its only user, that too:
//
//   %z = linalg.generic ins(%x, %w : [.., d], [f, d]) outs(%bias : [.., f])
//   %y = linalg.generic { arith.truncf } ins(%z)
//
// becomes moe.grouped_linear of one expert that has all rows.
//
//===----------------------------------------------------------------------===//

#include "Experts/GroupedLinear.h"
#include "Product/LinalgProducts.h"
#include "ThreadLowerings.h"

#include "MoE/Conversion/Passes.h"
#include "MoE/Support/MultiplyAdd.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Dialect/Utils/StaticValueUtils.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOELINEARTOGROUPEDLINEARPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// Elements of a weight below which a product stays what it is: its rows are
/// then multiplied in the kernel of the ops around it, whose blocks each read
/// the whole weight.
static constexpr int64_t kMinWeight = 1 << 16;

//===----------------------------------------------------------------------===//
// What is matched
//===----------------------------------------------------------------------===//

namespace {
/// A product, where its sums begin, and the op whose result replaces it.
struct Linear {
  linalg::LinalgOp product;
  bool isTransposed;
  /// Null for zeros.
  Value bias;
  /// The conversion to 16 bits, or the product.
  linalg::LinalgOp last;
};
} // namespace

/// What `op`, elementwise with one input, does to an element: `OpTy`, or
/// nothing but yield it.
template <typename OpTy>
static bool isConversion(linalg::GenericOp op) {
  if (op.getNumDpsInputs() != 1 || op.getNumDpsInits() != 1 ||
      op.getNumReductionLoops() != 0)
    return false;
  Value yielded = op.getBody()->getTerminator()->getOperand(0);
  if (auto conversion = yielded.getDefiningOp<OpTy>())
    yielded = conversion->getOperand(0);
  else if (op.getBody()->getOperations().size() != 1)
    return false;
  return yielded == op.getBody()->getArgument(0) &&
         op.getBody()->getOperations().size() <= 2;
}

/// The vector that `init` repeats in each row; null for zeros, nullopt for
/// anything else.
static std::optional<Value> getBias(Value init) {
  if (auto fill = init.getDefiningOp<linalg::FillOp>()) {
    if (matchPattern(fill.getInputs()[0], m_AnyZeroFloat()))
      return Value();
    return std::nullopt;
  }
  auto rows = init.getDefiningOp<linalg::GenericOp>();
  if (!rows || !isConversion<arith::ExtFOp>(rows))
    return std::nullopt;
  unsigned last = rows.getNumLoops() - 1;
  AffineMap columns = AffineMap::getMultiDimMapWithTargets(
      last + 1, ArrayRef<unsigned>{last}, rows.getContext());
  SmallVector<AffineMap> maps = rows.getIndexingMapsArray();
  if (maps[0] != columns || !maps[1].isIdentity())
    return std::nullopt;
  return rows.getInputs()[0];
}

/// The conversion of all sums to 16 bits, if nothing else reads them.
static linalg::GenericOp getConversion(linalg::LinalgOp product, Type element) {
  Value sums = product->getResult(0);
  if (!sums.hasOneUse())
    return {};
  auto user = dyn_cast<linalg::GenericOp>(*sums.getUsers().begin());
  if (!user || !isConversion<arith::TruncFOp>(user) ||
      user.getInputs()[0] != sums ||
      llvm::any_of(user.getIndexingMapsArray(),
                   [](AffineMap map) { return !map.isIdentity(); }) ||
      getElementTypeOrSelf(user.getResult(0)) != element)
    return {};
  return user;
}

static std::optional<Linear> matchLinear(linalg::LinalgOp op) {
  bool isTransposed = hasProductMaps(op, /*isTransposed=*/true);
  if (!op.hasPureTensorSemantics() ||
      (!isTransposed && !hasProductMaps(op, /*isTransposed=*/false)) ||
      !isMultiplyAdd(op))
    return std::nullopt;
  auto weight = cast<ShapedType>(op.getDpsInputOperand(1)->get().getType());
  std::optional<Value> bias = getBias(op.getDpsInitOperand(0)->get());
  if (!bias || !weight.hasStaticShape() || weight.getNumElements() < kMinWeight)
    return std::nullopt;
  Type element =
      getElementTypeOrSelf(op.getDpsInputOperand(0)->get().getType());
  linalg::LinalgOp last = op;
  if (linalg::GenericOp conversion = getConversion(op, element))
    last = conversion;
  return Linear{op, isTransposed, *bias, last};
}

//===----------------------------------------------------------------------===//
// What it becomes
//===----------------------------------------------------------------------===//

/// All dims but the last one as one.
static SmallVector<ReassociationIndices> getRowDims(int64_t rank) {
  SmallVector<ReassociationIndices> groups(2);
  llvm::append_range(groups[0], llvm::seq<int64_t>(rank - 1));
  groups[1].push_back(rank - 1);
  return groups;
}

/// A dim of size 1 in front.
static Value asOnlyOne(ImplicitLocOpBuilder &b, Value value) {
  auto type = cast<RankedTensorType>(value.getType());
  SmallVector<int64_t> shape{1};
  llvm::append_range(shape, type.getShape());
  SmallVector<ReassociationIndices> groups{{0, 1}};
  for (int64_t dim = 1; dim < type.getRank(); ++dim)
    groups.push_back({dim + 1});
  return tensor::ExpandShapeOp::create(b, type.clone(shape), value, groups);
}

/// Offsets of one expert that has all rows, however many there are: they are
/// cut to what there is. One block writes them for all layers of a function.
static Value createOffsets(func::FuncOp function) {
  auto b =
      ImplicitLocOpBuilder::atBlockBegin(function.getLoc(), &function.front());
  auto type = RankedTensorType::get({2}, b.getI32Type());
  return tensor::GenerateOp::create(
      b, type, ValueRange(),
      [](OpBuilder &builder, Location loc, ValueRange indices) {
        ImplicitLocOpBuilder body(loc, builder);
        Value end = arith::ConstantIntOp::create(
            body, std::numeric_limits<int32_t>::max(), 32);
        Value number =
            arith::IndexCastOp::create(body, body.getI32Type(), indices[0]);
        Value offset = arith::MulIOp::create(body, number, end);
        tensor::YieldOp::create(body, offset);
      });
}

static GroupedLinearOp createGrouped(ImplicitLocOpBuilder &b,
                                     const Linear &linear, Value offsets) {
  Value x = linear.product->getOperand(0);
  auto type = cast<RankedTensorType>(x.getType());
  if (type.getRank() != 2)
    x = tensor::CollapseShapeOp::create(b, x, getRowDims(type.getRank()));
  auto result = cast<RankedTensorType>(linear.last->getResult(0).getType());
  SmallVector<OpFoldResult> sizes{tensor::getMixedSize(b, b.getLoc(), x, 0),
                                  b.getIndexAttr(result.getShape().back())};
  Value y = tensor::EmptyOp::create(b, sizes, result.getElementType());
  return GroupedLinearOp::create(
      b, y.getType(), x, asOnlyOne(b, linear.product->getOperand(1)), offsets,
      /*rows=*/Value(), linear.bias ? asOnlyOne(b, linear.bias) : Value(),
      /*scales=*/Value(), /*zeros=*/Value(), y, linear.isTransposed,
      /*packed=*/IntegerAttr(), /*format=*/WeightFormatAttr(),
      /*group=*/IntegerAttr(), ActivationFormat::None, ExpertActivation::None,
      /*alpha=*/APFloat(1.0), GateLayout::None, GateBound::Clamp,
      /*limit=*/FloatAttr(), /*up_limit=*/FloatAttr(),
      /*up_offset=*/APFloat(0.0));
}

/// The rows of `op` in the shape of `old`.
static Value asShapeOf(ImplicitLocOpBuilder &b, GroupedLinearOp op, Value old) {
  auto type = cast<RankedTensorType>(old.getType());
  Value y = op->getResult(0);
  if (type.getRank() == 2)
    return y;
  SmallVector<OpFoldResult> sizes = tensor::getMixedSizes(
      b, b.getLoc(),
      old.getDefiningOp<linalg::LinalgOp>().getDpsInitOperand(0)->get());
  return tensor::ExpandShapeOp::create(b, type, y, getRowDims(type.getRank()),
                                       sizes);
}

namespace {
struct MoELinearToGroupedLinearPass
    : public mlir::moe::impl::MoELinearToGroupedLinearPassBase<
          MoELinearToGroupedLinearPass> {
  using Base::Base;

  void runOnOperation() override {
    func::FuncOp function = getOperation();
    if (function.isExternal() || !getBlockShape(function).hasWgmma)
      return;
    SmallVector<Linear> found;
    // Not in loops: their iterations are blocks, and a kernel has a grid.
    for (auto op : function.getOps<linalg::LinalgOp>())
      if (std::optional<Linear> linear = matchLinear(op))
        found.push_back(*linear);
    Value offsets;
    for (Linear linear : found)
      replace(linear, offsets);
    if (offsets && offsets.use_empty())
      offsets.getDefiningOp()->erase();
  }

private:
  void replace(Linear linear, Value &offsets) {
    if (!offsets)
      offsets = createOffsets(getOperation());
    ImplicitLocOpBuilder b(linear.product.getLoc(), linear.last);
    GroupedLinearOp op = createGrouped(b, linear, offsets);
    if (!hasKernelOfManyRows(op)) {
      op.erase();
      return;
    }
    Value old = linear.last->getResult(0);
    old.replaceAllUsesWith(asShapeOf(b, op, old));
    linear.last->erase();
    if (linear.product != linear.last)
      linear.product->erase();
    ++numReplaced;
  }
};
} // namespace
