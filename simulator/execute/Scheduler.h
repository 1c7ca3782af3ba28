//===- Scheduler.h - Shared by the warp and the grid scheduler --*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_SCHEDULER_H
#define MOE_LIB_SIMULATOR_SCHEDULER_H

#include "Machine.h"

#include <string>

namespace moe::sim {

/// Where every warp is and what it waits for.
std::string describeWaiting(const Cluster &cluster);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_SCHEDULER_H
