//===- Schedules.cpp - The schedules of a kernel, as a table --------------===//

#include "Schedules.h"

#include "MoE/Conversion/GPUSchedules.h"

#include "mlir/IR/Remarks.h"
#include "llvm/ADT/TypeSwitch.h"
#include "llvm/Support/FormatVariadic.h"

using namespace mlir;
using namespace mlir::moe;

template <typename OpTy>
static StringRef getRequirement(ArrayRef<Schedule<OpTy>> schedules,
                                KernelSchedule kind) {
  const Schedule<OpTy> *found = findSchedule(schedules, kind);
  return found ? StringRef(found->requirement) : StringRef();
}

StringRef mlir::moe::getScheduleRequirement(Operation *op,
                                            KernelSchedule schedule) {
  return TypeSwitch<Operation *, StringRef>(op)
      .Case([&](CombineOp) {
        return getRequirement(getCombineSchedules(), schedule);
      })
      .Case([&](GroupedLinearOp) {
        return getRequirement(getGroupedLinearSchedules(), schedule);
      })
      .Case([&](RouterLogitsOp) {
        return getRequirement(getRouterLogitsSchedules(), schedule);
      })
      .Case([&](SoftmaxMixOp) {
        return getRequirement(getSoftmaxMixSchedules(), schedule);
      })
      .Case([&](SoftmaxMixBackwardDqOp) {
        return getRequirement(getSoftmaxMixBackwardDqSchedules(), schedule);
      })
      .Case([&](SoftmaxMixBackwardDkvOp) {
        return getRequirement(getSoftmaxMixBackwardDkvSchedules(), schedule);
      })
      .Case([&](TopKRenormOp) {
        return getRequirement(getTopKRenormSchedules(), schedule);
      })
      .Default(StringRef());
}

void mlir::moe::takeConfigInstead(Operation *op, KernelConfigAttr config,
                                  const std::string &why, StringRef pass) {
  KernelSchedule chosen = getKernelConfig(op).getSchedule();
  remark::missed(op->getLoc(),
                 remark::RemarkOpts::name("KernelConfig").category(pass))
      << llvm::formatv("{0} runs with schedule {1} in place of {2}",
                       op->getName(),
                       stringifyKernelSchedule(config.getSchedule()),
                       stringifyKernelSchedule(chosen))
             .str()
      << remark::reason("{0}", why);
  op->setAttr(kKernelConfigAttrName, config);
}

void mlir::moe::keepPossibleConfig(Operation *op,
                                   ArrayRef<KernelConfigAttr> configs,
                                   StringRef pass) {
  KernelConfigAttr chosen = getKernelConfig(op);
  if (configs.empty())
    return;
  if (!chosen) {
    op->setAttr(kKernelConfigAttrName, configs.front());
    return;
  }
  if (llvm::any_of(configs, [&](KernelConfigAttr config) {
        return canRunAs(config, chosen);
      }))
    return;
  // A tile of other rows than were asked for leaves the kernel what it is.
  auto *same = llvm::find_if(configs, [&](KernelConfigAttr config) {
    return config.getSchedule() == chosen.getSchedule();
  });
  if (same != configs.end()) {
    op->setAttr(kKernelConfigAttrName, *same);
    return;
  }
  StringRef requirement = getScheduleRequirement(op, chosen.getSchedule());
  takeConfigInstead(op, configs.front(),
                    requirement.empty()
                        ? "the op has no such kernel on GPUs"
                        : ("its kernel expects " + requirement).str(),
                    pass);
}
