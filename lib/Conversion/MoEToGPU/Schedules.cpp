//===- Schedules.cpp - The schedules of a kernel, as a table --------------===//

#include "Schedules.h"

#include "MoE/Conversion/GPUSchedules.h"

#include "llvm/ADT/TypeSwitch.h"

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
      .Default(StringRef());
}
