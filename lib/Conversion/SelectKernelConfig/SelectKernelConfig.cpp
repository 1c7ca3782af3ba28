//===- SelectKernelConfig.cpp - Choose how kernels run ops ----------------===//
//
// The families of kernels of the target say, best first, in which
// configurations they can run an op. The first one that agrees with what the op
// asks for becomes its attribute moe.kernel_config, which all later passes
// read. Ops that passes make get theirs when the pass runs again: what an op
// has is kept.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/MoEToCPU.h"
#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Conversion/Passes.h"
#include "MoE/Transforms/KernelFacts.h"
#include "MoE/Transforms/Transforms.h"

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

namespace {
struct SelectKernelConfigPass
    : public mlir::moe::impl::MoESelectKernelConfigPassBase<
          SelectKernelConfigPass> {
  using Base::Base;

  void runOnOperation() override {
    KernelFacts facts = isForGPU(getOperation())
                            ? getGPUKernelFacts(getOperation())
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
    Attribute given = op->getAttr(kKernelConfigAttrName);
    auto wanted = dyn_cast_or_null<KernelConfigAttr>(given);
    if (given && !wanted)
      return op->emitOpError()
             << "expected '" << kKernelConfigAttrName
             << "' to be a #moe.kernel_config, found " << given;
    SmallVector<KernelConfigAttr> configs = facts.getConfigs(op);
    auto *found = llvm::find_if(configs, [&](KernelConfigAttr config) {
      return !wanted || agrees(config, wanted);
    });
    if (found != configs.end()) {
      op->setAttr(kKernelConfigAttrName, *found);
      return success();
    }
    // One that is rewritten first hands on its wish.
    if (!wanted || (configs.empty() && isa<MixingOpInterface>(op)))
      return success();
    InFlightDiagnostic diagnostic = op->emitOpError()
                                    << "expected '" << kKernelConfigAttrName
                                    << "' to be a part of ";
    if (configs.empty())
      diagnostic << "no configuration, as this op has no kernel with a choice "
                    "on the target";
    else
      llvm::interleave(
          configs, [&](KernelConfigAttr config) { diagnostic << config; },
          [&] { diagnostic << " or "; });
    return diagnostic << ", found " << wanted;
  }
};
} // namespace
