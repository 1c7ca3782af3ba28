//===- SelectKernelConfig.cpp - Choose how kernels run ops ----------------===//
//
// The families of kernels of the target say, best first, in which
// configurations they can run an op. The first one that agrees with what the op
// asks for becomes its attribute moe.kernel_config, which all later passes
// read. Ops that passes make get theirs when the pass runs again: what an op
// has is kept.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/Chips.h"
#include "MoE/Conversion/GPUSchedules.h"
#include "MoE/Conversion/MoEToCPU.h"
#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Conversion/Passes.h"
#include "MoE/Transforms/KernelFacts.h"
#include "MoE/Transforms/Transforms.h"
#include "MoE/Transforms/WantedKernelConfigs.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOESELECTKERNELCONFIGPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// Whether `config` has all that `wanted` says; what that leaves out is free.
static bool agrees(KernelConfigAttr config, KernelConfigAttr wanted) {
  auto isFree = [](auto wish, auto value) {
    return wish == decltype(wish)() || wish == value;
  };
  return isFree(wanted.getRows(), config.getRows()) &&
         isFree(wanted.getThreads(), config.getThreads()) &&
         isFree(wanted.getSchedule(), config.getSchedule()) &&
         isFree(wanted.getLoop(), config.getLoop()) &&
         isFree(wanted.getSharedBytes(), config.getSharedBytes());
}

static bool isOfGPU(KernelSchedule schedule) {
  return schedule != KernelSchedule::Queries &&
         schedule != KernelSchedule::PairsOnce;
}

namespace {
struct SelectKernelConfigPass
    : public mlir::moe::impl::MoESelectKernelConfigPassBase<
          SelectKernelConfigPass> {
  using Base::Base;

  void runOnOperation() override {
    if (failed(verifyWantedKernelConfigs(getOperation())))
      return signalPassFailure();
    bool isGPU = isForGPU(getOperation());
    target = isGPU ? getChip(getOperation()).name : "the CPU";
    KernelFacts facts = isGPU ? getGPUKernelFacts(getOperation())
                              : getCPUKernelFacts(&getContext(), tileRows);
    WalkResult result = getOperation()->walk([&](Operation *op) {
      return failed(select(op, facts)) ? WalkResult::interrupt()
                                       : WalkResult::advance();
    });
    if (result.wasInterrupted())
      signalPassFailure();
  }

private:
  LogicalResult select(Operation *op, const KernelFacts &facts) {
    KernelConfigAttr wanted = getWantedKernelConfig(op);
    SmallVector<KernelConfigAttr> configs = facts.getConfigs(op);
    auto *found = llvm::find_if(configs, [&](KernelConfigAttr config) {
      return !wanted || agrees(config, wanted);
    });
    if (found != configs.end()) {
      op->setAttr(kKernelConfigAttrName, *found);
      return success();
    }
    // One that is rewritten first hands on its wish; pairs are taken once by
    // its own kernel alone.
    bool handsOn = configs.empty() && isa<MixingOpInterface>(op) && wanted &&
                   wanted.getSchedule() != KernelSchedule::PairsOnce;
    return !wanted || handsOn ? success() : refuse(op, wanted, configs);
  }

  LogicalResult refuse(Operation *op, KernelConfigAttr wanted,
                       ArrayRef<KernelConfigAttr> configs) {
    bool hasChoice = !configs.empty();
    InFlightDiagnostic diagnostic = op->emitOpError();
    diagnostic << "has no " << (hasChoice ? "such kernel" : "choice of kernels")
               << " on " << target << ": expected "
               << (hasChoice ? "a part of a configuration below"
                             : "no configuration")
               << ", found " << wanted;
    KernelSchedule schedule = wanted.getSchedule();
    if (schedule != KernelSchedule::Any &&
        isOfGPU(schedule) != isForGPU(getOperation()))
      diagnostic << ", whose schedule is one of "
                 << (isOfGPU(schedule) ? "GPUs" : "CPUs");
    else if (llvm::none_of(configs, [&](KernelConfigAttr config) {
               return config.getSchedule() == schedule;
             }))
      if (StringRef needs = getScheduleRequirement(op, schedule);
          !needs.empty())
        diagnostic << ", whose kernel expects " << needs;
    for (KernelConfigAttr config : configs)
      diagnostic.attachNote() << "possible: " << config;
    return diagnostic;
  }

  /// What the error names.
  StringRef target;
};
} // namespace
