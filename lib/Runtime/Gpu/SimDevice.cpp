//===- SimDevice.cpp - The PTX simulator as a GPU -------------------------===//
//
// Streams run in order of submission, so they and events are names only. The
// environment configures the checks:
//
//   MOE_SIM_SEED, MOE_SIM_POLICY   as Launch has them
//   MOE_SIM_CHECKS=0               runs without checks
//   MOE_SIM_QUIET=1                keeps findings for moe_gpu_report
//
// Between moe_sim_begin_capture and moe_sim_end_capture launches are recorded,
// for moe_sim_replay, and whatever a capturing stream does not permit is an
// error: loading modules, allocating, waiting.
//
//===----------------------------------------------------------------------===//

#include "MoE/Runtime/GpuDevice.h"
#include "MoE/Simulator/Simulator.h"
#include "MoE/Simulator/TensorMap.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace moe::runtime {
namespace {

constexpr uint64_t kAlignment = 256; // as cudaMalloc

[[noreturn]] void fail(const std::string &what) {
  throw std::runtime_error("moe sim runtime: " + what);
}

uint64_t setting(const char *name, uint64_t otherwise) {
  const char *text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 0) : otherwise;
}

struct Kernel;

struct LoadedModule {
  std::unique_ptr<sim::Module> module;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

struct Kernel {
  LoadedModule *module;
  sim::KernelInfo info;
  /// MAX_DYNAMIC_SHARED_SIZE_BYTES.
  uint32_t allowedShared = 0;
};

/// A launch as a graph keeps it: parameters by value.
struct CapturedLaunch {
  Kernel *kernel;
  sim::Launch launch;
};

class SimDevice final : public GpuDevice {
public:
  int32_t getChip() override { return 0; }

  void *load(const void *data, bool isText, int) override {
    refuseInCapture("loading a module");
    auto *text = static_cast<const char *>(data);
    if (!isText && std::memcmp(text, "//", 2) && text[0] != '.')
      fail("expected PTX text, found a binary: compile with format=isa");
    auto loaded = std::make_unique<LoadedModule>();
    loaded->module = sim::Module::load(text);
    for (sim::KernelInfo &info : loaded->module->kernels())
      loaded->kernels[info.name] =
          std::make_unique<Kernel>(Kernel{loaded.get(), info, 0});
    return loaded.release();
  }

  void unload(void *module) override {
    refuseInCapture("unloading a module");
    delete static_cast<LoadedModule *>(module);
  }

  void *find(void *module, const char *name) override {
    auto &kernels = static_cast<LoadedModule *>(module)->kernels;
    auto it = kernels.find(name);
    if (it == kernels.end())
      fail(std::string("expected a kernel of the module, found '") + name +
           "'");
    return it->second.get();
  }

  void allowDynamicShared(void *function, uint32_t bytes) override {
    static_cast<Kernel *>(function)->allowedShared = bytes;
  }

  void launchKernel(void *function, const GpuLaunch &from) override {
    auto &kernel = *static_cast<Kernel *>(function);
    sim::Launch launch;
    for (int i = 0; i < 3; ++i) {
      launch.grid[i] = static_cast<uint32_t>(from.grid[i]);
      launch.block[i] = from.block[i];
      launch.cluster[i] = from.cluster[i];
    }
    launch.dynamicSmem = from.dynamicSmem;
    launch.optsIn = kernel.allowedShared >= from.dynamicSmem;
    launch.seed = setting("MOE_SIM_SEED", 0);
    launch.policy = static_cast<uint32_t>(setting("MOE_SIM_POLICY", 0));
    if (!setting("MOE_SIM_CHECKS", 1))
      launch.checks = {false, false, false, false};
    launch.params.resize(kernel.info.paramBytes);
    bool isCounted = from.numParams >= 0;
    if (isCounted &&
        static_cast<size_t>(from.numParams) != kernel.info.params.size())
      fail("expected " + std::to_string(kernel.info.params.size()) +
           " parameters for kernel '" + kernel.info.name + "', found " +
           std::to_string(from.numParams));
    for (size_t i = 0; i < kernel.info.params.size(); ++i) {
      const sim::ParamInfo &param = kernel.info.params[i];
      if (isCounted && param.bytes > sizeof(uint64_t))
        fail("expected parameters of at most eight bytes for kernel '" +
             kernel.info.name + "', found " + std::to_string(param.bytes));
      std::memcpy(launch.params.data() + param.offset, from.params[i],
                  param.bytes);
    }
    std::lock_guard<std::mutex> guard(mutex);
    if (isCapturing)
      graph.push_back({&kernel, std::move(launch)});
    else
      run(kernel, std::move(launch));
  }

  void beginCapture() {
    std::lock_guard<std::mutex> guard(mutex);
    if (isCapturing)
      fail("expected no capture within a capture");
    graph.clear();
    isCapturing = true;
  }

  void endCapture() {
    std::lock_guard<std::mutex> guard(mutex);
    if (!isCapturing)
      fail("expected a capture to end, found none that has begun");
    isCapturing = false;
  }

  void replay() {
    refuseInCapture("replaying a graph");
    std::lock_guard<std::mutex> guard(mutex);
    for (const CapturedLaunch &captured : graph)
      run(*captured.kernel, captured.launch);
  }

  void *allocate(uint64_t bytes, void *, bool) override {
    refuseInCapture("allocating memory");
    uint64_t rounded = (bytes + kAlignment) / kAlignment * kAlignment;
    void *pointer = std::aligned_alloc(kAlignment, rounded);
    if (!pointer)
      fail("out of memory for a buffer of " + std::to_string(bytes) + " bytes");
    // NaN in every format: fresh memory holds nothing useful.
    std::memset(pointer, 0xff, rounded);
    add(pointer, bytes, "allocation ");
    return pointer;
  }

  void free(void *pointer, void *) override {
    refuseInCapture("freeing memory");
    unregisterHost(pointer);
    std::free(pointer);
  }

  void setName(void *pointer, const std::string &name) override {
    std::lock_guard<std::mutex> guard(mutex);
    if (auto it = buffers.find(pointer); it != buffers.end())
      it->second.name = name;
  }

  void copy(void *to, const void *from, uint64_t bytes, void *) override {
    refuseInCapture("a copy that the graph does not record");
    std::memmove(to, from, bytes);
  }

  void fill(void *to, uint32_t value, uint32_t width, uint64_t count,
            void *) override {
    refuseInCapture("a fill that the graph does not record");
    for (uint64_t i = 0; i < count; ++i)
      std::memcpy(static_cast<char *>(to) + i * width, &value, width);
  }

  void registerHost(void *pointer, uint64_t bytes) override {
    add(pointer, bytes, "host buffer ");
  }

  void unregisterHost(void *pointer) override {
    std::lock_guard<std::mutex> guard(mutex);
    buffers.erase(pointer);
  }

  void *createStream() override { return &token; }
  void destroyStream(void *) override {}
  void synchronizeStream(void *) override {
    refuseInCapture("waiting for a stream");
  }
  void waitEvent(void *, void *) override {}
  void *createEvent() override { return &token; }
  void destroyEvent(void *) override {}
  void synchronizeEvent(void *) override {
    refuseInCapture("waiting for an event");
  }
  void recordEvent(void *, void *) override {}
  void setDefault(int32_t) override {}

  void encodeTensorMap(void *out, const GpuTensorMap &from) override {
    sim::TensorMap map;
    sim::TensorMapFields fields{reinterpret_cast<uint64_t>(from.address),
                                from.dataType,
                                from.rank,
                                from.dims,
                                from.strides,
                                from.box,
                                from.elementStrides,
                                from.interleave,
                                from.swizzle,
                                from.oobFill != 0};
    if (const char *why = sim::encodeTensorMap(map, fields))
      fail(why);
    std::memcpy(out, &map, sizeof map);
  }

  uint64_t numFindings() override {
    std::lock_guard<std::mutex> guard(mutex);
    return findings;
  }

  std::string report() override {
    std::lock_guard<std::mutex> guard(mutex);
    return text;
  }

private:
  void refuseInCapture(const std::string &what) {
    std::lock_guard<std::mutex> guard(mutex);
    if (isCapturing)
      fail(what + " is not permitted while a stream captures: run these shapes "
                  "once before the capture");
  }

  /// With the mutex held.
  void run(Kernel &kernel, sim::Launch launch) {
    for (const auto &[address, buffer] : buffers)
      launch.buffers.push_back(buffer);
    record(kernel.module->module->launch(kernel.info.name, launch));
  }

  void add(void *pointer, uint64_t bytes, const char *what) {
    std::lock_guard<std::mutex> guard(mutex);
    buffers[pointer] = {pointer, bytes, what + std::to_string(++serial), false};
  }

  void record(const sim::Report &report) {
    findings += report.findings.size();
    for (const sim::Finding &finding : report.findings) {
      std::string line =
          std::string(sim::name(finding.kind)) + ": " + finding.message + "\n";
      text += line;
      if (!setting("MOE_SIM_QUIET", 0))
        std::fputs(line.c_str(), stderr);
    }
  }

  std::mutex mutex;
  std::map<void *, sim::Buffer> buffers;
  uint64_t serial = 0;
  uint64_t findings = 0;
  std::string text;
  std::vector<CapturedLaunch> graph;
  bool isCapturing = false;
  char token = 0;
};

SimDevice &simDevice() {
  static SimDevice device;
  return device;
}

/// Null, or why the call failed; valid until the next call of this thread.
const char *tryCall(void (SimDevice::*function)()) {
  static thread_local std::string reason;
  try {
    (simDevice().*function)();
    return nullptr;
  } catch (const std::exception &error) {
    reason = error.what();
    return reason.c_str();
  }
}

} // namespace

GpuDevice &gpuDevice() { return simDevice(); }

#define MOE_EXPORT extern "C" __attribute__((visibility("default")))

MOE_EXPORT const char *moe_gpu_unavailable() { return nullptr; }

MOE_EXPORT const char *moe_sim_begin_capture() {
  return tryCall(&SimDevice::beginCapture);
}

MOE_EXPORT const char *moe_sim_end_capture() {
  return tryCall(&SimDevice::endCapture);
}

MOE_EXPORT const char *moe_sim_replay() { return tryCall(&SimDevice::replay); }

} // namespace moe::runtime
