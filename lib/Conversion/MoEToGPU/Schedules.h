//===- Schedules.h - The schedules of a kernel, as a table ------*- C++ -*-===//
//
// A schedule is a way in which a kernel computes an op. Those of an op are the
// entries of one table, the best one first: what each expects, and the
// configurations in which it runs an op, each with its emitter.
//
// A configuration is chosen from the tables once, by moe-select-kernel-config.
// Where buffers turn out to lie differently than a schedule expects, or blocks
// to have another size, convert-moe-to-gpu takes another entry and says so in a
// remark. An emitter has the plan that its configuration was made from, and
// decides nothing: what no entry can emit is an error of the pattern below.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SCHEDULES_H
#define MOE_LIB_CONVERSION_MOETOGPU_SCHEDULES_H

#include "Emit/WarpBuilder.h"
#include "ThreadLowerings.h"

#include "MoE/Dialect/MoE/IR/KernelConfig.h"

namespace mlir::moe {

/// A configuration in which a schedule runs an op, and what emits the op on
/// buffers in it.
template <typename OpTy>
struct KernelChoice {
  KernelConfigAttr config;
  std::function<void(WarpBuilder &b, OpTy op)> emit;
};

template <typename OpTy>
struct Schedule {
  KernelSchedule kind;
  /// What op and chip need to have it, for those who asked for it.
  StringLiteral requirement;
  /// In which configurations it runs an op on tensors or buffers by blocks of
  /// the chip, best first; none if it cannot.
  SmallVector<KernelChoice<OpTy>> (*getChoices)(OpTy op, BlockShape block);
};

/// The configurations of all schedules, best first.
template <typename OpTy>
SmallVector<KernelConfigAttr> getConfigs(ArrayRef<Schedule<OpTy>> schedules,
                                         OpTy op, BlockShape block) {
  SmallVector<KernelConfigAttr> configs;
  for (const Schedule<OpTy> &schedule : schedules)
    for (const KernelChoice<OpTy> &choice : schedule.getChoices(op, block))
      configs.push_back(choice.config);
  return configs;
}

/// The entry of `kind`; null if there is none.
template <typename OpTy>
const Schedule<OpTy> *findSchedule(ArrayRef<Schedule<OpTy>> schedules,
                                   KernelSchedule kind) {
  auto *found = llvm::find_if(schedules, [&](const Schedule<OpTy> &schedule) {
    return schedule.kind == kind;
  });
  return found == schedules.end() ? nullptr : found;
}

/// Whether a kernel that has the configuration `possible` can run as `config`
/// says. Which loop the op is in is no matter of its kernel.
inline bool canRunAs(KernelConfigAttr possible, KernelConfigAttr config) {
  return possible.getSchedule() == config.getSchedule() &&
         possible.getRows() == config.getRows() &&
         (config.getSharedBytes() == 0 ||
          possible.getSharedBytes() <= config.getSharedBytes());
}

/// Takes the best of `configs` where the layout of the buffers of `op` rules
/// out what was chosen on tensors, with a remark of the pass, and the best of
/// all where nothing was chosen.
void keepPossibleConfig(Operation *op, ArrayRef<KernelConfigAttr> configs,
                        StringRef pass);
/// Takes `config` in place of what was chosen for `op`, with a remark of the
/// pass: the user may have expected that kernel, or asked for it.
void takeConfigInstead(Operation *op, KernelConfigAttr config,
                       const std::string &why, StringRef pass);

/// Emits each op by the schedule that its configuration names.
template <typename OpTy>
struct ScheduleToThreads : OpRewritePattern<OpTy> {
  ScheduleToThreads(MLIRContext *context, ArrayRef<Schedule<OpTy>> schedules,
                    BlockShape block)
      : OpRewritePattern<OpTy>(context), schedules(schedules), block(block) {}

  LogicalResult matchAndRewrite(OpTy op,
                                PatternRewriter &rewriter) const override {
    KernelConfigAttr config = getKernelConfig(op);
    if (!config)
      return rewriter.notifyMatchFailure(
          op, "expected a kernel configuration; run moe-select-kernel-config");
    if (config.getThreads() && config.getThreads() != block.numThreads)
      return rewriter.notifyMatchFailure(op, [&](Diagnostic &diagnostic) {
        diagnostic << "expected blocks of " << config.getThreads()
                   << " threads, found " << block.numThreads;
      });
    const Schedule<OpTy> *schedule =
        findSchedule(schedules, config.getSchedule());
    SmallVector<KernelChoice<OpTy>> choices;
    if (schedule)
      choices = schedule->getChoices(op, block);
    auto *choice =
        llvm::find_if(choices, [&](const KernelChoice<OpTy> &possible) {
          return canRunAs(possible.config, config);
        });
    if (choice == choices.end())
      return rewriter.notifyMatchFailure(op, [&](Diagnostic &diagnostic) {
        diagnostic << "expected "
                   << (schedule ? schedule->requirement
                                : "a schedule of this op")
                   << ", found " << config << " for " << op->getOperandTypes();
      });
    WarpBuilder b(op.getLoc(), rewriter);
    choice->emit(b, op);
    rewriter.eraseOp(op);
    return success();
  }

  ArrayRef<Schedule<OpTy>> schedules;
  BlockShape block;
};

/// Likewise of ops whose kernels make their loops over blocks themselves.
template <typename OpTy>
struct ScheduleToGrid : ScheduleToThreads<OpTy> {
  using ScheduleToThreads<OpTy>::ScheduleToThreads;

  LogicalResult matchAndRewrite(OpTy op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics())
      return rewriter.notifyMatchFailure(op, "expected buffers");
    keepPossibleConfig(op, getConfigs(this->schedules, op, this->block),
                       "moe-distribute-to-grid");
    return ScheduleToThreads<OpTy>::matchAndRewrite(op, rewriter);
  }
};

// The tables, each beside its kernels.
ArrayRef<Schedule<CombineOp>> getCombineSchedules();
ArrayRef<Schedule<GroupedLinearOp>> getGroupedLinearSchedules();
ArrayRef<Schedule<RouterLogitsOp>> getRouterLogitsSchedules();
ArrayRef<Schedule<SoftmaxMixOp>> getSoftmaxMixSchedules();
ArrayRef<Schedule<SoftmaxMixBackwardDqOp>> getSoftmaxMixBackwardDqSchedules();
ArrayRef<Schedule<SoftmaxMixBackwardDkvOp>> getSoftmaxMixBackwardDkvSchedules();
ArrayRef<Schedule<TopKRenormOp>> getTopKRenormSchedules();

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SCHEDULES_H
