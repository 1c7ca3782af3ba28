//===- SoftmaxMixBackward.cpp - The gradient of softmax_mix to threads ----===//

#include "SoftmaxMixBackward.h"
#include "MixEmitter.h"
#include "Schedules.h"

using namespace mlir;
using namespace mlir::moe;

static bool fitsRegisters(ArrayRef<Value> rows) {
  return llvm::all_of(rows, [](Value row) {
    if (!row)
      return true;
    int64_t width = getShaped(row).getShape().back();
    return !ShapedType::isDynamic(width) && width <= kMaxGradientWidth;
  });
}

static bool hasThreadKernel(SoftmaxMixBackwardDqOp op) {
  return fitsRegisters(op.getOut("dq"));
}

static bool hasThreadKernel(SoftmaxMixBackwardDkvOp op) {
  return fitsRegisters({op.getOut("dk"), op.getOut("dv")});
}

//===----------------------------------------------------------------------===//
// Schedules
//===----------------------------------------------------------------------===//

template <typename OpTy>
static KernelConfigAttr makeConfig(OpTy op, int64_t rows, int64_t threads,
                                   KernelSchedule schedule, KernelLoop loop) {
  return KernelConfigAttr::get(op.getContext(), rows, threads, schedule, loop,
                               /*shared_bytes=*/0);
}

/// On tensor cores a block goes over all columns for each tile.
template <typename OpTy>
static SmallVector<KernelChoice<OpTy>> getTensorChoices(OpTy op,
                                                        BlockShape block) {
  std::optional<TensorGradientPlan> plan =
      planGradientOnTensorCores(MixGradient(op), block.sharedBytes);
  if (!plan)
    return {};
  return {{makeConfig(op, plan->tileRows, kMixThreads, KernelSchedule::Mma,
                      KernelLoop::Own),
           [plan = *plan](WarpBuilder &b, OpTy op) {
             plan.emit(b, MixGradient(op));
           }}};
}

template <typename OpTy>
static SmallVector<KernelChoice<OpTy>> getFloatChoices(OpTy op,
                                                       BlockShape block) {
  if (!hasThreadKernel(op))
    return {};
  return {{makeConfig(op, /*rows=*/0, /*threads=*/0, KernelSchedule::Float,
                      KernelLoop::Shared),
           [=](WarpBuilder &b, OpTy op) {
             emitGradientOnFloatUnits(b, MixGradient(op),
                                      Workers::ofBlock(b, block));
           }}};
}

template <typename OpTy>
static constexpr Schedule<OpTy> kSchedules[] = {
    {KernelSchedule::Mma,
     "queries and keys of one 16-bit type, a multiple of 8 features whose rows "
     "start at multiples of 16 bytes, and up to 256 columns of the values; few "
     "enough of both for the registers",
     getTensorChoices<OpTy>},
    {KernelSchedule::Float, "rows of a static width of at most 1024",
     getFloatChoices<OpTy>},
};

ArrayRef<Schedule<SoftmaxMixBackwardDqOp>>
mlir::moe::getSoftmaxMixBackwardDqSchedules() {
  return kSchedules<SoftmaxMixBackwardDqOp>;
}

ArrayRef<Schedule<SoftmaxMixBackwardDkvOp>>
mlir::moe::getSoftmaxMixBackwardDkvSchedules() {
  return kSchedules<SoftmaxMixBackwardDkvOp>;
}

//===----------------------------------------------------------------------===//
// Facts and patterns
//===----------------------------------------------------------------------===//

template <typename OpTy>
static void addFacts(KernelFacts &facts, BlockShape block) {
  facts.addForms<OpTy>([](OpTy op) { return hasThreadKernel(op); },
                       "rows of a static width of at most 1024; else memory "
                       "grows with the queries times the keys");
  facts.addConfigs<OpTy>([=](OpTy op) {
    return getConfigs(ArrayRef(kSchedules<OpTy>), op, block);
  });
}

void mlir::moe::addSoftmaxMixBackwardFacts(KernelFacts &facts,
                                           BlockShape block) {
  addFacts<SoftmaxMixBackwardDqOp>(facts, block);
  addFacts<SoftmaxMixBackwardDkvOp>(facts, block);
}

void mlir::moe::populateSoftmaxMixBackwardToThreadsPatterns(
    RewritePatternSet &patterns, BlockShape block) {
  patterns.add<ScheduleToThreads<SoftmaxMixBackwardDqOp>>(
      patterns.getContext(), getSoftmaxMixBackwardDqSchedules(), block);
  patterns.add<ScheduleToThreads<SoftmaxMixBackwardDkvOp>>(
      patterns.getContext(), getSoftmaxMixBackwardDkvSchedules(), block);
}
