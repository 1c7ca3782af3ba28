//===- GPUSchedules.h - What the schedules of a GPU expect ------*- C++ -*-===//

#ifndef MOE_CONVERSION_GPUSCHEDULES_H
#define MOE_CONVERSION_GPUSCHEDULES_H

#include "MoE/Dialect/MoE/IR/KernelConfig.h"

namespace mlir::moe {

/// What the kernel of `op` that follows `schedule` expects of op and chip;
/// empty where GPUs have no such kernel.
StringRef getScheduleRequirement(Operation *op, KernelSchedule schedule);

} // namespace mlir::moe

#endif // MOE_CONVERSION_GPUSCHEDULES_H
