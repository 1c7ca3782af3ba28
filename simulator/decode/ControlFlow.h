//===- ControlFlow.h - Basic blocks of a kernel -----------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_CONTROLFLOW_H
#define MOE_LIB_SIMULATOR_CONTROLFLOW_H

#include "Program.h"

#include <vector>

namespace moe::sim {

/// Instructions [begin, end) that run one after the other.
struct BasicBlock {
  u32 begin = 0;
  u32 end = 0;
  std::vector<u32> successors;
};

/// In the order of the text; the first one is the entry.
std::vector<BasicBlock> findBasicBlocks(const Kernel &kernel);

/// A number for every instruction, such that diverged lanes meet again as soon
/// as they can if those with the lowest number always run first: before an
/// instruction come all from which it can be reached without going round a
/// loop, and behind a loop everything that it exits to.
std::vector<u32> reconvergenceOrder(const Kernel &kernel);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_CONTROLFLOW_H
