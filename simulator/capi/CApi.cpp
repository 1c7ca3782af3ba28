//===- CApi.cpp - The simulator for C and ctypes --------------------------===//

#include "MoE/Simulator/CApi.h"
#include "MoE/Simulator/Simulator.h"
#include "MoE/Simulator/TensorMap.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#define MOE_SIM_EXPORT __attribute__((visibility("default")))

using namespace moe::sim;

struct MoeSimModule {
  std::unique_ptr<Module> module;
};

namespace {

char *copyString(const std::string &text) {
  char *copy = static_cast<char *>(std::malloc(text.size() + 1));
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

Launch convertLaunch(const MoeSimLaunch &from) {
  Launch launch;
  for (int i = 0; i < 3; ++i) {
    launch.grid[i] = from.grid[i];
    launch.block[i] = from.block[i];
    launch.cluster[i] = from.cluster[i];
  }
  launch.dynamicSmem = from.dynamic_smem;
  launch.checks.race = from.checks & MOE_SIM_CHECK_RACE;
  launch.checks.bounds = from.checks & MOE_SIM_CHECK_BOUNDS;
  launch.checks.uninit = from.checks & MOE_SIM_CHECK_UNINIT;
  launch.checks.align = from.checks & MOE_SIM_CHECK_ALIGN;
  launch.allows.equalStores = from.checks & MOE_SIM_ALLOW_EQUAL_STORES;
  launch.allows.unfencedInit = from.checks & MOE_SIM_ALLOW_UNFENCED_INIT;
  launch.allows.equalSharedStores =
      from.checks & MOE_SIM_ALLOW_EQUAL_SHARED_STORES;
  launch.allows.repeatedSetmaxnreg =
      from.checks & MOE_SIM_ALLOW_REPEATED_SETMAXNREG;
  if (from.checks & MOE_SIM_DECLARED_ALIGNMENT)
    launch.sharedAlignment = SharedAlignment::Declared;
  launch.optsIn = !(from.checks & MOE_SIM_NO_SMEM_OPT_IN);
  launch.nonportableCluster = from.checks & MOE_SIM_NONPORTABLE_CLUSTER;
  launch.tracesShared = from.checks & MOE_SIM_TRACE_SHARED;
  launch.policy = from.policy;
  launch.seed = from.seed;
  launch.numerics = static_cast<Numerics>(from.numerics);
  launch.threads = from.threads;
  auto *params = static_cast<const uint8_t *>(from.params);
  launch.params.assign(params, params + from.params_size);
  for (uint64_t i = 0; i < from.num_buffers; ++i) {
    const MoeSimBuffer &buffer = from.buffers[i];
    launch.buffers.push_back({buffer.data, buffer.bytes,
                              buffer.name ? buffer.name : "",
                              buffer.read_only != 0});
  }
  return launch;
}

/// Names in PTX need no escapes in JSON.
std::string describe(const KernelInfo &kernel) {
  std::string text = "{\"name\": \"" + kernel.name + "\", \"params\": [";
  for (const ParamInfo &param : kernel.params)
    text += std::string(&param == &kernel.params.front() ? "" : ", ") +
            "{\"name\": \"" + param.name + "\", \"type\": \"" + param.type +
            "\", \"offset\": " + std::to_string(param.offset) +
            ", \"size\": " + std::to_string(param.bytes) +
            ", \"count\": " + std::to_string(param.count) + "}";
  return text + "], \"param_bytes\": " + std::to_string(kernel.paramBytes) +
         ", \"shared_bytes\": " + std::to_string(kernel.sharedBytes) +
         ", \"local_bytes\": " + std::to_string(kernel.localBytes) +
         ", \"instructions\": " + std::to_string(kernel.instructions) +
         ", \"max_threads\": " + std::to_string(kernel.maxThreads) + "}";
}

} // namespace

extern "C" {

MOE_SIM_EXPORT MoeSimModule *moe_sim_load(const char *ptx, uint64_t length,
                                          char **error) {
  try {
    return new MoeSimModule{Module::load({ptx, length})};
  } catch (const std::exception &e) {
    *error = copyString(e.what());
    return nullptr;
  }
}

MOE_SIM_EXPORT void moe_sim_unload(MoeSimModule *module) { delete module; }

MOE_SIM_EXPORT char *moe_sim_describe(const MoeSimModule *module) {
  std::string text = "{\"kernels\": [";
  bool first = true;
  for (const KernelInfo &kernel : module->module->kernels()) {
    text += (first ? "" : ", ") + describe(kernel);
    first = false;
  }
  return copyString(text + "]}");
}

MOE_SIM_EXPORT char *moe_sim_launch(MoeSimModule *module, const char *kernel,
                                    const MoeSimLaunch *launch, char **error) {
  try {
    if (launch->struct_size != sizeof(MoeSimLaunch))
      throw std::invalid_argument("expected a launch descriptor of " +
                                  std::to_string(sizeof(MoeSimLaunch)) +
                                  " bytes, found " +
                                  std::to_string(launch->struct_size) +
                                  ": the caller was built for another version");
    return copyString(
        module->module->launch(kernel, convertLaunch(*launch)).json());
  } catch (const std::exception &e) {
    *error = copyString(e.what());
    return nullptr;
  }
}

MOE_SIM_EXPORT char *moe_sim_encode_tensor_map(
    void *out, void *address, uint32_t dataType, uint32_t rank,
    const uint64_t *dims, const uint64_t *outerStrides, const uint32_t *box,
    const uint32_t *elementStrides, uint32_t swizzle, uint32_t nanFill) {
  TensorMap map;
  TensorMapFields fields{reinterpret_cast<uint64_t>(address),
                         dataType,
                         rank,
                         dims,
                         outerStrides,
                         box,
                         elementStrides,
                         /*interleave=*/0,
                         swizzle,
                         nanFill != 0};
  if (const char *why = encodeTensorMap(map, fields))
    return copyString(why);
  std::memcpy(out, &map, sizeof map);
  return nullptr;
}

MOE_SIM_EXPORT void moe_sim_free(char *text) { std::free(text); }

} // extern "C"
