//===- TopKRenorm.cpp - topk_renorm to threads ----------------------------===//
//
// TopKSelection.h describes how the k experts of a row are found. Here are the
// gates, which are computed by the lanes that the slots were dealt to, and the
// pattern.
//
//===----------------------------------------------------------------------===//

#include "Schedules.h"
#include "TopKSelection.h"

#include "MoE/Dialect/MoE/IR/ScoreFunctions.h"

#include "MoE/Support/ElementBytes.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/Interfaces/TilingInterface.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

/// The widest access of a thread.
static constexpr int64_t kAccessBytes = 16;

//===----------------------------------------------------------------------===//
// Gates
//===----------------------------------------------------------------------===//

/// values / (sum of all lanes' values + floor), or 0 where the sum is 0 (E7).
/// Without a floor the sum is that of a softmax, in [1, k], whose reciprocal
/// one instruction gives to 1 ulp.
SmallVector<Value> RowSelection::renormalise(ArrayRef<Value> values,
                                             Value floor) {
  Value sum = values.front();
  for (Value value : values.drop_front())
    sum = b.add(sum, value);
  sum = reduceSum(sum);
  Value isEmpty = b.compare(CmpFPredicate::OEQ, sum, b.f32(0.0));
  SmallVector<Value> gates;
  if (!floor) {
    Value inverse = b.select(isEmpty, b.f32(0.0), b.reciprocal(sum));
    for (Value value : values)
      gates.push_back(b.mul(value, inverse));
    return gates;
  }
  Value divisor = b.select(isEmpty, b.f32(1.0), b.add(sum, floor));
  for (Value value : values)
    gates.push_back(b.select(isEmpty, b.f32(0.0), b.div(value, divisor)));
  return gates;
}

SmallVector<Value> RowSelection::computeGates() {
  Value zero = b.f32(0.0), lowest = b.negInfinity();
  // t = the logits whose softmax the gates are, or v = the chosen scores;
  // slots without a gate have t = -inf, v = 0.
  SmallVector<Value> values;
  for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
    Value expert = chosen[slot];
    if (op.getForced())
      expert = b.select(hasGate[slot], expert, b.i32(0));
    Value x = chosenScores.empty() ? loadScore(expert) : chosenScores[slot];
    Value counts = b.compare(CmpFPredicate::UNE, x, lowest);
    if (hasGate[slot])
      counts = b.both(counts, hasGate[slot]);
    if (isSlot[slot])
      counts = b.both(counts, isSlot[slot]);
    Value value =
        form.gatesFromLogits ? buildLogScore(b, form.function, x) : score(x);
    values.push_back(
        b.select(counts, value, form.gatesFromLogits ? lowest : zero));
  }
  if (!form.gatesFromLogits) {
    if (!op.getRenorm())
      return values;
    double eps = op.getEps().convertToDouble();
    return renormalise(values, b.f32(eps));
  }
  Value highest = values.front();
  for (Value t : ArrayRef(values).drop_front())
    highest = maximum(highest, t);
  highest = finiteOrZero(reduceMax(highest));
  for (Value &t : values)
    t = b.exp(b.sub(t, highest));
  return renormalise(values, {});
}

/// Whether the slots of a lane are stored by one access.
bool RowSelection::hasWideStores() {
  auto gates = cast<MemRefType>(op.getGatesInit().getType());
  auto indices = cast<MemRefType>(op.getIndicesInit().getType());
  auto isRowMajor = [&](MemRefType type) {
    SmallVector<int64_t> strides;
    int64_t offset;
    return succeeded(type.getStridesAndOffset(strides, offset)) &&
           strides.back() == 1 &&
           (strides.size() < 2 || strides[strides.size() - 2] == numSelected);
  };
  return shape.slotsPerLane > 1 && llvm::isPowerOf2_64(shape.slotsPerLane) &&
         numSelected % shape.slotsPerLane == 0 && isRowMajor(gates) &&
         isRowMajor(indices);
}

/// Stores the slots of the lane that are choices.
void RowSelection::storeEach(ArrayRef<Value> values, Value memref,
                             Value isRow) {
  for (auto [slot, value] : llvm::enumerate(values)) {
    Value stores = isSlot[slot] ? b.both(isRow, isSlot[slot]) : isRow;
    auto ifStores = scf::IfOp::create(b, stores, /*withElseRegion=*/false);
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(ifStores.thenBlock());
    memref::StoreOp::create(b, value, memref, at(memref, 1, rankOf(slot)));
  }
}

/// One access of the slots of a lane, all of which are choices or none.
static void storeTogether(ThreadBuilder &b, ArrayRef<Value> values,
                          Value memref, ValueRange place) {
  int64_t size = values.size();
  Type type = values.front().getType();
  Value vector =
      vector::FromElementsOp::create(b, VectorType::get({size}, type), values);
  int64_t bytes = size * getElementBytes(type);
  vector::StoreOp::create(b, vector, memref, place, /*nontemporal=*/false,
                          llvm::MaybeAlign(std::min(bytes, kAccessBytes)));
}

/// A forced id in the type of the indices; -1 where that does not hold it: cut
/// off, it could name an expert.
Value RowSelection::asIndex(Value id, Type type) {
  Value index = b.castInt(id, type);
  if (id.getType().getIntOrFloatBitWidth() <= type.getIntOrFloatBitWidth())
    return index;
  Value fits = b.compare(CmpIPredicate::eq, b.castInt(index, id.getType()), id);
  return b.select(fits, index, b.castInt(b.i32(-1), type));
}

void RowSelection::storeSlots(ArrayRef<Value> gates, Value isRow) {
  // A masked token selects nothing (E10).
  Value isToken;
  if (Value mask = op.getMask())
    isToken = memref::LoadOp::create(b, mask, at(mask, 0, {}));
  double scale = op.getRouteScale().convertToDouble();
  Type type = getElementTypeOrSelf(op.getIndicesInit().getType());
  SmallVector<Value> finalGates, finalExperts;
  for (auto [slot, gate] : llvm::enumerate(gates)) {
    Value finalGate = scale == 1.0 ? gate : b.mul(gate, b.f32(scale));
    finalGate = b.select(hasNaN, b.nan(), finalGate); // E3
    // A place that is forced to be none has gate 0 in any row, whatever the sum
    // of the gates is.
    if (op.getForced())
      finalGate = b.select(hasGate[slot], finalGate, b.f32(0.0));
    Value finalExpert = op.getForced() ? asIndex(forced[slot], type)
                                       : b.castInt(chosen[slot], type);
    if (isToken) {
      Value none = b.castInt(b.i32(-1), type);
      finalGate = b.select(isToken, finalGate, b.f32(0.0));
      finalExpert = b.select(isToken, finalExpert, none);
    }
    finalGates.push_back(finalGate);
    finalExperts.push_back(finalExpert);
  }
  if (!hasWideStores()) {
    storeEach(finalGates, op.getGatesInit(), isRow);
    return storeEach(finalExperts, op.getIndicesInit(), isRow);
  }
  Value stores = isSlot[0] ? b.both(isRow, isSlot[0]) : isRow;
  auto ifStores = scf::IfOp::create(b, stores, /*withElseRegion=*/false);
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPointToStart(ifStores.thenBlock());
  SmallVector<Value> place = at(op.getGatesInit(), 1, rankOf(0));
  storeTogether(b, finalGates, op.getGatesInit(), place);
  storeTogether(b, finalExperts, op.getIndicesInit(), place);
}

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
    RowSelection(b, op, shape, lane)
        .emit(b.op<arith::MinUIOp>(row, last), isRow);
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
