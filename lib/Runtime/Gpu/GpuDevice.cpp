//===- GpuDevice.cpp - What every device checks of a launch ---------------===//

#include "MoE/Runtime/GpuDevice.h"

#include <stdexcept>

namespace moe::runtime {

/// Of the grids of all chips.
static constexpr uint64_t kMaxBlocks[3] = {0x7fffffff, 0xffff, 0xffff};

static void checkGrid(const GpuLaunch &launch) {
  for (int dim = 0; dim < 3; ++dim)
    if (launch.grid[dim] > kMaxBlocks[dim])
      throw std::runtime_error(
          std::string("moe gpu runtime: expected at most ") +
          std::to_string(kMaxBlocks[dim]) + " blocks along " + "xyz"[dim] +
          ", found " + std::to_string(launch.grid[dim]) +
          ": split the batch, whose sequences or heads are counted there");
}

void GpuDevice::unloadModule(void *module) {
  {
    // Another module's functions may get the addresses of this one's.
    std::lock_guard<std::mutex> guard(allowedMutex);
    allowed.clear();
  }
  unload(module);
}

void GpuDevice::launch(void *function, const GpuLaunch &from) {
  checkGrid(from);
  // Static memory counts towards the 48 KB that need no permission and is not
  // known here: whatever is dynamic is allowed, once a function.
  if (from.dynamicSmem) {
    std::lock_guard<std::mutex> guard(allowedMutex);
    uint32_t &bytes = allowed[function];
    if (bytes < from.dynamicSmem) {
      allowDynamicShared(function, from.dynamicSmem);
      bytes = from.dynamicSmem;
    }
  }
  launchKernel(function, from);
}

} // namespace moe::runtime
