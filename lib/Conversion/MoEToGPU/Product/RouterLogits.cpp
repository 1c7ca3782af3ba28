//===- RouterLogits.cpp - router_logits to threads ------------------------===//
//
// What tensor cores do not multiply (RowProducts.cpp) the float units do: a
// warp computes 4 rows x 4 experts at a time. Its lanes share the features:
// lane l accumulates d = l, l + 32, ... of all 16 products in f32, so that
// loads of h and of the weights are contiguous over the lanes and each loaded
// value is used four times. Then the 16 sums are reduced over the lanes, and
// lane 2i holds the i-th. The order of the sums is fixed. Products of few
// tokens are cut before they come here where the schedule is mma_split
// (FewTokenRouters.cpp).
//
//===----------------------------------------------------------------------===//

#include "FewTokenRouters.h"
#include "RowProducts.h"
#include "Schedules.h"

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// Rows and experts that a warp computes at a time.
static constexpr int64_t kPatch = 4;

/// Sums each of `values`, a power of two of them, over the lanes of the warp.
/// The sum of values[i] ends up in the lanes whose upper bits are i: each step
/// exchanges one half of the values for the other half's partial sums.
static Value reduceScattered(ThreadBuilder &b, SmallVector<Value> values,
                             Value lane) {
  int64_t distance = kWarpSize / 2;
  for (; values.size() > 1; distance /= 2) {
    Value bit = b.both(lane, b.i32(distance));
    Value isUpper = b.compare(CmpIPredicate::ne, bit, b.i32(0));
    size_t half = values.size() / 2;
    for (size_t i = 0; i < half; ++i) {
      Value kept = b.select(isUpper, values[half + i], values[i]);
      Value sent = b.select(isUpper, values[i], values[half + i]);
      values[i] = b.add(kept, b.shuffleXor(sent, distance));
    }
    values.truncate(half);
  }
  for (; distance > 0; distance /= 2)
    values[0] = b.add(values[0], b.shuffleXor(values[0], distance));
  return values[0];
}

/// Dividing `count` things among patches: their number is rounded up.
static Value getNumPatches(ThreadBuilder &b, Value count) {
  return b.op<arith::DivUIOp>(b.add(count, b.index(kPatch - 1)),
                              b.index(kPatch));
}

static void storeSum(ThreadBuilder &b, RouterLogitsOp op, Value sum, Value row,
                     Value expert) {
  if (Value bias = op.getBias())
    sum = b.add(sum, b.loadF32(bias, expert));
  Value z = op.getOuts()[0];
  SmallVector<Value> place = getRowIndices(b, z, /*numInner=*/1, row);
  place.push_back(expert);
  memref::StoreOp::create(b, sum, z, place);
}

/// min(first + i, count - 1) for the i-th of a patch.
static Value getClamped(ThreadBuilder &b, Value first, int64_t i, Value count) {
  return b.op<arith::MinUIOp>(b.add(first, b.index(i)),
                              b.sub(count, b.index(1)));
}

/// The lane's part of the products, row-major.
static SmallVector<Value> accumulate(ThreadBuilder &b, RouterLogitsOp op,
                                     Value lane, Value firstRow, Value numRows,
                                     Value firstExpert, Value numExperts) {
  SmallVector<SmallVector<Value>> rows;
  SmallVector<Value> experts;
  for (int64_t i = 0; i < kPatch; ++i) {
    Value row = getClamped(b, firstRow, i, numRows);
    rows.push_back(getRowIndices(b, op.getH(), /*numInner=*/1, row));
    experts.push_back(getClamped(b, firstExpert, i, numExperts));
  }
  Value numFeatures = memref::DimOp::create(b, op.getWeight(), b.index(1));
  SmallVector<Value> zeros(kPatch * kPatch, b.f32(0.0));
  auto loop = scf::ForOp::create(
      b, b.toIndex(lane), numFeatures, b.index(kWarpSize), zeros,
      [&](OpBuilder &builder, Location loc, Value d, ValueRange sums) {
        ThreadBuilder body(loc, builder);
        SmallVector<Value> features, weights, next;
        for (int64_t i = 0; i < kPatch; ++i) {
          SmallVector<Value> place(rows[i]);
          place.push_back(d);
          features.push_back(body.loadF32(op.getH(), place));
          weights.push_back(body.loadF32(op.getWeight(), {experts[i], d}));
        }
        for (auto [i, sum] : llvm::enumerate(sums))
          next.push_back(
              body.fma(features[i / kPatch], weights[i % kPatch], sum));
        scf::YieldOp::create(body, next);
      });
  return SmallVector<Value>(loop.getResults());
}

/// Stores the sum that the lane holds, unless it lies past the end.
static void store(ThreadBuilder &b, RouterLogitsOp op, Value sum, Value lane,
                  Value firstRow, Value numRows, Value firstExpert,
                  Value numExperts) {
  constexpr int64_t lanesPerSum = kWarpSize / (kPatch * kPatch);
  Value number = b.toIndex(b.op<arith::DivUIOp>(lane, b.i32(lanesPerSum)));
  Value row = b.add(firstRow, b.op<arith::DivUIOp>(number, b.index(kPatch)));
  Value expert =
      b.add(firstExpert, b.op<arith::RemUIOp>(number, b.index(kPatch)));
  Value isFirst =
      b.compare(CmpIPredicate::eq,
                b.op<arith::RemUIOp>(lane, b.i32(lanesPerSum)), b.i32(0));
  Value inside = b.both(b.compare(CmpIPredicate::ult, row, numRows),
                        b.compare(CmpIPredicate::ult, expert, numExperts));
  auto ifStores = scf::IfOp::create(b, b.both(isFirst, inside),
                                    /*withElseRegion=*/false);
  b.setInsertionPointToStart(ifStores.thenBlock());
  storeSum(b, op, sum, row, expert);
}

/// The warps of a block take the patches in turns; a patch that hangs over the
/// end computes its last row or expert again and does not store it.
static void emitOnFloatUnits(WarpBuilder &b, RouterLogitsOp op,
                             BlockShape block) {
  OpBuilder::InsertionGuard guard(b);
  Value z = op.getOuts()[0];
  int64_t expertDim = cast<MemRefType>(z.getType()).getRank() - 1;
  Value numRows = getNumRows(b, z, /*numInner=*/1);
  Value numExperts = memref::DimOp::create(b, z, b.index(expertDim));
  Value expertPatches = getNumPatches(b, numExperts);
  Value patches = b.mul(getNumPatches(b, numRows), expertPatches);

  Value thread = gpu::ThreadIdOp::create(b, gpu::Dimension::x);
  Value lane = b.toI32(b.op<arith::RemUIOp>(thread, b.index(kWarpSize)));
  Value warp = b.op<arith::DivUIOp>(thread, b.index(kWarpSize));
  auto loop = scf::ForOp::create(b, warp, patches,
                                 b.index(block.numThreads / kWarpSize));
  b.setInsertionPointToStart(loop.getBody());
  Value patch = loop.getInductionVar();
  Value firstRow =
      b.mul(b.op<arith::DivUIOp>(patch, expertPatches), b.index(kPatch));
  Value firstExpert =
      b.mul(b.op<arith::RemUIOp>(patch, expertPatches), b.index(kPatch));
  Value sum = reduceScattered(
      b, accumulate(b, op, lane, firstRow, numRows, firstExpert, numExperts),
      lane);
  store(b, op, sum, lane, firstRow, numRows, firstExpert, numExperts);
}

static std::optional<RowProductPlan>
planProducts(RouterLogitsOp op, int64_t maxRows, BlockShape block) {
  return planRowProducts(op.getH(), op.getWeight(), /*isTransposed=*/false,
                         maxRows, block);
}

static void emitOnTensorCores(WarpBuilder &b, RouterLogitsOp op,
                              BlockShape block) {
  Value h = op.getH(), weight = op.getWeight();
  int64_t experts = cast<MemRefType>(weight.getType()).getDimSize(0);
  // Of the tokens, whose tile shows its bound: the logits may come from a
  // cast.
  int64_t maxRows = getMaxRows(getNumRows(b, h, /*numInner=*/1))
                        .value_or(getProductRows(experts));
  // Fewer rows need less memory.
  RowProductPlan plan = *planProducts(op, maxRows, block);
  emitRowProducts(b, h, weight, plan, [&](Value row, Value expert, Value sum) {
    storeSum(b, op, sum, row, expert);
  });
}

//===----------------------------------------------------------------------===//
// Schedules
//===----------------------------------------------------------------------===//

static KernelConfigAttr makeConfig(RouterLogitsOp op, int64_t rows,
                                   int64_t threads, KernelSchedule schedule) {
  return KernelConfigAttr::get(op.getContext(), rows, threads, schedule,
                               KernelLoop::Shared, /*shared_bytes=*/0);
}

using Choices = SmallVector<KernelChoice<RouterLogitsOp>>;

static Choices getTensorChoices(RouterLogitsOp op, int64_t rows,
                                KernelSchedule schedule, BlockShape block) {
  if (!planProducts(op, rows, block))
    return {};
  return {{makeConfig(op, rows, kProductThreads, schedule),
           [=](WarpBuilder &b, RouterLogitsOp op) {
             emitOnTensorCores(b, op, block);
           }}};
}

/// A tile reads all weights, so it takes as many rows as tensor cores multiply
/// at once.
static Choices getMmaChoices(RouterLogitsOp op, BlockShape block) {
  int64_t experts = cast<ShapedType>(op.getWeight().getType()).getDimSize(0);
  return getTensorChoices(op, getProductRows(experts), KernelSchedule::Mma,
                          block);
}

/// Where all loops are those of few tokens, a tile has their rows.
static Choices getSplitChoices(RouterLogitsOp op, BlockShape block) {
  if (!canSplitFewTokens(op, block))
    return {};
  int64_t experts = cast<ShapedType>(op.getWeight().getType()).getDimSize(0);
  int64_t rows = hasFewTokens(op) ? kSummedRows : getProductRows(experts);
  return getTensorChoices(op, rows, KernelSchedule::MmaSplit, block);
}

static Choices getFloatChoices(RouterLogitsOp op, BlockShape block) {
  return {{makeConfig(op, /*rows=*/0, /*threads=*/0, KernelSchedule::Float),
           [=](WarpBuilder &b, RouterLogitsOp op) {
             emitOnFloatUnits(b, op, block);
           }}};
}

static constexpr Schedule<RouterLogitsOp> kSchedules[] = {
    {KernelSchedule::MmaSplit,
     "what 'mma' does, an unknown number of tokens or at most 256, at least "
     "1024 features, a multiple of 64, and a multiple of 32 experts",
     getSplitChoices},
    {KernelSchedule::Mma,
     "tokens and weights of one 16-bit type in the GPU's memory, a multiple of "
     "8 features whose rows start at multiples of 16 bytes, static weights, "
     "and blocks of 128 threads with more than 48 KiB of shared memory",
     getMmaChoices},
    {KernelSchedule::Float,
     "a configuration as moe-select-kernel-config chooses it", getFloatChoices},
};

ArrayRef<Schedule<RouterLogitsOp>> mlir::moe::getRouterLogitsSchedules() {
  return kSchedules;
}

void mlir::moe::populateRouterLogitsToThreadsPatterns(
    RewritePatternSet &patterns, BlockShape block) {
  patterns.add<ScheduleToThreads<RouterLogitsOp>>(
      patterns.getContext(), getRouterLogitsSchedules(), block);
}

void mlir::moe::addRouterLogitsFacts(KernelFacts &facts, BlockShape block) {
  facts.addConfigs<RouterLogitsOp>([=](RouterLogitsOp op) {
    return getConfigs(getRouterLogitsSchedules(), op, block);
  });
}
