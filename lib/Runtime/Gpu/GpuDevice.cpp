//===- GpuDevice.cpp - What every device does with modules and launches ---===//

#include "MoE/Runtime/GpuDevice.h"

#include <sstream>
#include <stdexcept>

namespace moe::runtime {

//===----------------------------------------------------------------------===//
// Errors that say where
//===----------------------------------------------------------------------===//

/// Calls; puts what `describe` says in front of an error's text.
template <typename Call, typename Describe>
static auto withContext(Call call, Describe describe) {
  try {
    return call();
  } catch (const std::exception &error) {
    throw std::runtime_error(describe() + ": " + error.what());
  }
}

/// "a module of kernels 'a', 'b' for sm_80", as far as the data tells.
static std::string describeModule(const void *data, bool isText) {
  if (!isText)
    return "a binary module";
  std::istringstream text(static_cast<const char *>(data));
  std::string word, target, names;
  while (text >> word) {
    if (word == ".target" && target.empty())
      text >> target;
    if (word == ".entry" && text >> word)
      names +=
          (names.empty() ? "'" : ", '") + word.substr(0, word.find('(')) + "'";
  }
  return "a module of kernels " + (names.empty() ? "without names" : names) +
         (target.empty() ? "" : " for " + target.substr(0, target.find(',')));
}

static std::string describeChip(GpuDevice &device) {
  try {
    int32_t chip = device.getChip();
    return chip ? " on a GPU of sm_" + std::to_string(chip) : "";
  } catch (const std::exception &) {
    // The device is lost; the error that is being described says so.
    return "";
  }
}

static std::string describeLaunch(const std::string &name,
                                  const GpuLaunch &launch) {
  auto join = [](const auto &extents) {
    return std::to_string(extents[0]) + " x " + std::to_string(extents[1]) +
           " x " + std::to_string(extents[2]);
  };
  return "launching kernel '" + name + "' on " + join(launch.grid) +
         " blocks of " + join(launch.block) + " threads with " +
         std::to_string(launch.dynamicSmem) + " bytes of dynamic shared memory";
}

//===----------------------------------------------------------------------===//
// Modules
//===----------------------------------------------------------------------===//

void *GpuDevice::loadModule(const void *data, bool isText, int optLevel) {
  return withContext([&] { return load(data, isText, optLevel); },
                     [&] {
                       return "loading " + describeModule(data, isText) +
                              describeChip(*this);
                     });
}

void GpuDevice::unloadModule(void *module) {
  {
    // Another module's functions may get the addresses of this one's.
    std::lock_guard<std::mutex> guard(mutex);
    std::erase_if(functions, [&](const auto &entry) {
      return entry.second.module == module;
    });
  }
  unload(module);
}

void *GpuDevice::getFunction(void *module, const char *name) {
  void *function =
      withContext([&] { return find(module, name); },
                  [&] { return std::string("finding kernel '") + name + "'"; });
  std::lock_guard<std::mutex> guard(mutex);
  Function &known = functions[function];
  known.module = module;
  known.name = name;
  return function;
}

//===----------------------------------------------------------------------===//
// Launches
//===----------------------------------------------------------------------===//

static void checkGrid(const GpuLaunch &launch) {
  for (int dim = 0; dim < 3; ++dim)
    if (launch.grid[dim] > GpuDevice::kMaxBlocks[dim])
      throw std::runtime_error(
          std::string("moe gpu runtime: expected at most ") +
          std::to_string(GpuDevice::kMaxBlocks[dim]) + " blocks along " +
          "xyz"[dim] + ", found " + std::to_string(launch.grid[dim]) +
          ": split the batch, whose sequences or heads are counted there");
}

/// Checks a launch and allows what it needs; returns the kernel's name.
std::string GpuDevice::prepare(void *function, const GpuLaunch &launch) {
  std::lock_guard<std::mutex> guard(mutex);
  Function &known = functions[function];
  withContext(
      [&] {
        checkGrid(launch);
        // Static memory counts towards the 48 KB that need no permission and
        // is not known here: whatever is dynamic is allowed, once a function.
        if (known.allowedShared < launch.dynamicSmem) {
          allowDynamicShared(function, launch.dynamicSmem);
          known.allowedShared = launch.dynamicSmem;
        }
      },
      [&] { return describeLaunch(known.name, launch); });
  return known.name;
}

void GpuDevice::launch(void *function, const GpuLaunch &from) {
  std::string name = prepare(function, from);
  withContext([&] { launchKernel(function, from); },
              [&] { return describeLaunch(name, from); });
  std::lock_guard<std::mutex> guard(lastKernelMutex);
  lastKernel = std::move(name);
}

std::string GpuDevice::getLastKernel() {
  std::lock_guard<std::mutex> guard(lastKernelMutex);
  return lastKernel;
}

} // namespace moe::runtime
