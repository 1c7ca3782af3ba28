//===- DecomposeExpertsForGPU.cpp - Cut the layers of experts by rows -----===//
//
//   few  = rows, where they are at most kFewRows an expert, else 0
//   many = rows - few
//
// Both parts have kernels on sm_90a (GroupedLinear.cpp and
// GroupedLinearWarpgroup.cpp). Elsewhere the one on the first `many` rows
// becomes loops over experts.
//
//===----------------------------------------------------------------------===//

#include "Experts/GroupedLinear.h"
#include "ThreadLowerings.h"

#include "MoE/Conversion/Passes.h"
#include "MoE/Transforms/Transforms.h"
#include "MoE/Transforms/WantedKernelConfigs.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEDECOMPOSEEXPERTSFORGPUPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// Rows of an expert, on average, up to which reading its weights takes longer
/// than multiplying them: with 8, a layer of 64 experts takes an H100 0.78 of
/// the time that grouped products by a library do, and 1.1 with 32.
static constexpr int64_t kFewRows = 16;

namespace {
struct Sizes {
  Value rows, experts;
};
} // namespace

static Sizes getSizes(ImplicitLocOpBuilder &b, GroupedLinearOp op) {
  return {tensor::DimOp::create(b, op.getOuts()[0], 0),
          tensor::DimOp::create(b, op.getW(), 0)};
}

/// The rows where they are few, or where they are not; 0 otherwise.
static Value countIf(ImplicitLocOpBuilder &b, Sizes sizes, bool few) {
  AffineExpr rows = b.getAffineDimExpr(0), experts = b.getAffineDimExpr(1);
  AffineExpr isMany = isMore(rows, experts * kFewRows);
  Value factor = affine::AffineApplyOp::create(
      b, AffineMap::get(2, 0, few ? 1 - isMany : isMany),
      ValueRange{sizes.rows, sizes.experts});
  return arith::MulIOp::create(b, sizes.rows, factor);
}

namespace {
/// The first `count` rows of a tensor.
struct FirstRows {
  FirstRows(ImplicitLocOpBuilder &b, Value value, Value count)
      : sizes(tensor::getMixedSizes(b, b.getLoc(), value)),
        offsets(sizes.size(), b.getIndexAttr(0)),
        strides(sizes.size(), b.getIndexAttr(1)) {
    sizes[0] = count;
  }

  SmallVector<OpFoldResult> sizes, offsets, strides;
};
} // namespace

static Value takeRows(ImplicitLocOpBuilder &b, Value value, Value count) {
  FirstRows rows(b, value, count);
  return tensor::ExtractSliceOp::create(b, value, rows.offsets, rows.sizes,
                                        rows.strides);
}

static Value putRows(ImplicitLocOpBuilder &b, Value value, Value into,
                     Value count) {
  FirstRows rows(b, into, count);
  return tensor::InsertSliceOp::create(b, value, into, rows.offsets, rows.sizes,
                                       rows.strides);
}

/// `op` on its first `count` rows, which are written into `into`.
static std::pair<GroupedLinearOp, Value> cloneForRows(ImplicitLocOpBuilder &b,
                                                      GroupedLinearOp op,
                                                      Value count, Value into) {
  IRMapping mapping;
  Value out = takeRows(b, into, count);
  mapping.map(op.getOuts()[0], out);
  Value ofRows = op.getRows() ? op.getRows() : op.getX();
  mapping.map(ofRows, takeRows(b, ofRows, count));
  auto part = cast<GroupedLinearOp>(b.clone(*op, mapping));
  part->getResult(0).setType(out.getType());
  return {part, putRows(b, part->getResult(0), into, count)};
}

/// Cuts `op` in two: the parts of many and of few rows.
static std::pair<GroupedLinearOp, GroupedLinearOp>
cutByRows(GroupedLinearOp op) {
  ImplicitLocOpBuilder b(op.getLoc(), op);
  Sizes sizes = getSizes(b, op);
  auto [many, manyRows] =
      cloneForRows(b, op, countIf(b, sizes, /*few=*/false), op.getOuts()[0]);
  auto [few, rows] =
      cloneForRows(b, op, countIf(b, sizes, /*few=*/true), manyRows);
  op->replaceAllUsesWith(ValueRange{rows});
  op.erase();
  return {many, few};
}

/// Whether all rows are few ones, if that is known.
static std::optional<bool> hasFewRows(GroupedLinearOp op) {
  int64_t rows = cast<ShapedType>(op.getOuts()[0].getType()).getDimSize(0);
  int64_t experts = cast<ShapedType>(op.getW().getType()).getDimSize(0);
  if (ShapedType::isDynamic(rows) || ShapedType::isDynamic(experts))
    return std::nullopt;
  return rows <= kFewRows * experts;
}

namespace {
struct MoEDecomposeExpertsForGPUPass
    : public mlir::moe::impl::MoEDecomposeExpertsForGPUPassBase<
          MoEDecomposeExpertsForGPUPass> {
  using Base::Base;

  void runOnOperation() override {
    hasWgmma = getBlockShape(getOperation()).hasWgmma;
    SmallVector<GroupedLinearOp> ops;
    getOperation().walk([&](GroupedLinearOp op) { ops.push_back(op); });
    for (GroupedLinearOp op : ops)
      if (op.hasPureTensorSemantics())
        choose(op);
    decomposeIf(getOperation(), [&](linalg::AggregatedOpInterface op) {
      return isa<GroupedLinearOp, GroupedOuterOp>(op.getOperation()) &&
             !kept.contains(op);
    });
  }

private:
  /// Keeps what has a kernel, and cuts what has one for few rows alone.
  void choose(GroupedLinearOp op) {
    // The user's choice is for all rows; moe-select-kernel-config sees to it.
    if (getWantedKernelConfig(op)) {
      kept.insert(op);
      return;
    }
    bool hasMany = hasWgmma && hasKernelOfManyRows(op);
    if (!hasKernelOfFewRows(op)) {
      if (hasMany)
        keep(op, KernelSchedule::Wgmma);
      return;
    }
    std::optional<bool> areFew = hasFewRows(op);
    GroupedLinearOp many = op, few = op;
    if (!areFew)
      std::tie(many, few) = cutByRows(op);
    if (areFew.value_or(true))
      keep(few, KernelSchedule::Mma);
    if (hasMany && !areFew.value_or(false))
      keep(many, KernelSchedule::Wgmma);
  }

  void keep(GroupedLinearOp op, KernelSchedule schedule) {
    op->setAttr(kKernelConfigAttrName,
                KernelConfigAttr::get(op.getContext(), /*rows=*/0,
                                      /*threads=*/0, schedule,
                                      KernelLoop::Shared, /*shared_bytes=*/0));
    kept.insert(op);
  }

  bool hasWgmma = false;
  DenseSet<Operation *> kept;
};
} // namespace
