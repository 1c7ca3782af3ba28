//===- TopKRenorm.cpp - topk_renorm to threads ----------------------------===//
//
// TopKSelection.h describes how the k experts of a row are found. Here the rows
// are given to groups of lanes.
//
//===----------------------------------------------------------------------===//

#include "Schedules.h"
#include "TopKChoice.h"
#include "TopKGates.h"

#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Interfaces/TilingInterface.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

//===----------------------------------------------------------------------===//
// Schedule
//===----------------------------------------------------------------------===//

/// 64 keys of 64 bits are 128 registers of a lane.
static constexpr int64_t kMaxExperts = 64 * kWarpSize;

static bool hasThreadKernel(TopKRenormOp op) {
  int64_t experts = op.getNumExperts();
  return !ShapedType::isDynamic(experts) && experts <= kMaxExperts &&
         !ShapedType::isDynamic(op.getNumSelected());
}

/// What the lanes do for their row; they store only where `isRow` holds.
static void selectInRow(RowLanes &row, Value isRow) {
  RowSlots slots(row);
  RowScores scores(row);
  scores.load();
  ExpertChoice choice(row, scores, slots);
  if (row.op.getForced()) {
    scores.findNaN();
    choice.readForced();
  } else {
    choice.select();
  }
  SlotGates gates(row, scores, slots);
  gates.store(gates.compute(), isRow);
}

/// The groups of lanes of a block take the rows in turns, or one each where
/// there are enough of them:
///
///   for base in 0..rows step groups:
///     row = base + group             (all lanes stay in the loop: shuffles)
///     select in row min(row, rows - 1), store if row < rows
static void emitSelection(ThreadBuilder &b, TopKRenormOp op, BlockShape block) {
  // Of the gates, whose tile shows its bound: scores may come from a cast.
  Value numRows = getNumRows(b, op.getGatesInit(), /*numInner=*/1);
  std::optional<int64_t> maxRows = getMaxRows(numRows);
  // How many lanes the block has for each of its rows.
  LaneShape shape(op, maxRows ? std::min(block.numThreads / *maxRows, kWarpSize)
                              : 1);
  Value thread = b.toI32(gpu::ThreadIdOp::create(b, gpu::Dimension::x));
  Value lane = b.op<arith::RemUIOp>(thread, b.i32(shape.lanes));
  Value group = b.toIndex(b.op<arith::DivUIOp>(thread, b.i32(shape.lanes)));
  int64_t groups = block.numThreads / shape.lanes;
  Value last = b.sub(numRows, b.index(1));
  auto emitRow = [&](Value row) {
    Value isRow = b.compare(CmpIPredicate::ult, row, numRows);
    RowLanes lanes(b, op, shape, lane, b.op<arith::MinUIOp>(row, last));
    selectInRow(lanes, isRow);
  };
  if (maxRows && *maxRows <= groups)
    return emitRow(group);
  OpBuilder::InsertionGuard guard(b);
  auto loop = scf::ForOp::create(b, b.index(0), numRows, b.index(groups));
  b.setInsertionPointToStart(loop.getBody());
  emitRow(b.add(loop.getInductionVar(), group));
}

/// Whether the rows are those that the block has from another op.
static bool followsInBlock(TopKRenormOp op) {
  Value scores = op.getScores();
  if (auto collapse = scores.getDefiningOp<tensor::CollapseShapeOp>())
    if (KernelConfigAttr before =
            collapse.getSrc().getDefiningOp()
                ? getKernelConfig(collapse.getSrc().getDefiningOp())
                : KernelConfigAttr())
      if (before.getLoop() == KernelLoop::Shared)
        scores = collapse.getSrc();
  return static_cast<bool>(scores.getDefiningOp<TilingInterface>());
}

/// A selection alone takes the rows that keep every thread of a block of usual
/// size busy; behind another op it takes those that the block has.
static SmallVector<KernelChoice<TopKRenormOp>> getChoices(TopKRenormOp op,
                                                          BlockShape block) {
  if (!hasThreadKernel(op) || followsInBlock(op))
    return {};
  int64_t rows =
      BlockShape().numThreads / LaneShape(op, /*availableLanes=*/1).lanes;
  return {
      {KernelConfigAttr::get(op.getContext(), rows, /*threads=*/0,
                             KernelSchedule::Any, KernelLoop::Own,
                             /*shared_bytes=*/0),
       [=](WarpBuilder &b, TopKRenormOp op) { emitSelection(b, op, block); }}};
}

static constexpr StringLiteral kRequirement =
    "static numbers of experts, at most 2048, and of choices";

static constexpr Schedule<TopKRenormOp> kSchedules[] = {
    {KernelSchedule::Any, kRequirement, getChoices},
};

ArrayRef<Schedule<TopKRenormOp>> mlir::moe::getTopKRenormSchedules() {
  return kSchedules;
}

namespace {
struct TopKRenormToThreads : ScheduleToThreads<TopKRenormOp> {
  TopKRenormToThreads(MLIRContext *context, BlockShape block)
      : ScheduleToThreads(context, getTopKRenormSchedules(), block) {}

  LogicalResult matchAndRewrite(TopKRenormOp op,
                                PatternRewriter &rewriter) const override {
    int64_t numExperts = op.getNumExperts(), numSelected = op.getNumSelected();
    if (ShapedType::isDynamic(numExperts) || ShapedType::isDynamic(numSelected))
      return rewriter.notifyMatchFailure(
          op, "expected static numbers of experts and of selected experts; "
              "kernels are specialised for both");
    if (numExperts > kMaxExperts)
      return rewriter.notifyMatchFailure(op, [&](Diagnostic &diagnostic) {
        diagnostic << "expected at most " << kMaxExperts << " experts, found "
                   << numExperts
                   << "; a row is held in the registers of a warp";
      });
    if (op.getNumValid())
      return rewriter.notifyMatchFailure(
          op, "expected no 'num_valid': a block does not know the position of "
              "its tile in the batch; pass a 'mask' instead");
    return ScheduleToThreads::matchAndRewrite(op, rewriter);
  }
};
} // namespace

void mlir::moe::addTopKRenormFacts(KernelFacts &facts, BlockShape block) {
  facts.addForms<TopKRenormOp>(hasThreadKernel, kRequirement);
  facts.addConfigs<TopKRenormOp>([=](TopKRenormOp op) {
    return getConfigs(getTopKRenormSchedules(), op, block);
  });
}

void mlir::moe::populateTopKRenormToThreadsPatterns(RewritePatternSet &patterns,
                                                    BlockShape block) {
  patterns.add<TopKRenormToThreads>(patterns.getContext(), block);
}
