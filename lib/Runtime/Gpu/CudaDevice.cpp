//===- CudaDevice.cpp - The CUDA driver as a GPU --------------------------===//
//
// libcuda.so.1 is opened at run time, so this library loads on machines
// without a driver and says there why kernels cannot run. The declarations
// below are the driver API's, whose ABI is fixed; no CUDA header is needed.
//
//===----------------------------------------------------------------------===//

#include "MoE/Runtime/GpuDevice.h"

#include <dlfcn.h>
#include <mutex>
#include <stdexcept>

namespace moe::runtime {
namespace {

using Result = int;
using DevicePointer = unsigned long long;

struct LaunchAttribute {
  unsigned id;
  char padding[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } clusterDimension;
  };
};
static_assert(sizeof(LaunchAttribute) == 72);
constexpr unsigned kClusterDimension = 4;

struct LaunchConfig {
  unsigned gridX, gridY, gridZ;
  unsigned blockX, blockY, blockZ;
  unsigned sharedBytes;
  void *stream;
  LaunchAttribute *attributes;
  unsigned numAttributes;
};

constexpr int kStaticSharedSize = 1; // CU_FUNC_ATTRIBUTE_...
constexpr int kMaxDynamicSharedSize = 8;
constexpr unsigned kJitErrorLog = 5; // CU_JIT_...
constexpr unsigned kJitErrorLogBytes = 6;
constexpr unsigned kJitOptimizationLevel = 7;
constexpr int kCapabilityMajor = 75; // CU_DEVICE_ATTRIBUTE_...
constexpr int kCapabilityMinor = 76;
constexpr int kMaxSharedOptIn = 97;
constexpr unsigned kAttachGlobal = 1;
constexpr unsigned kDisableTiming = 2;

/// The driver's entry points, or why there are none.
struct Driver {
  const char *missing = nullptr;
  Result (*init)(unsigned) = nullptr;
  Result (*getErrorString)(Result, const char **) = nullptr;
  Result (*deviceGet)(int *, int) = nullptr;
  Result (*deviceGetAttribute)(int *, int, int) = nullptr;
  Result (*contextRetain)(void **, int) = nullptr;
  Result (*contextSet)(void *) = nullptr;
  Result (*moduleLoad)(void **, const void *, unsigned, unsigned *,
                       void **) = nullptr;
  Result (*moduleUnload)(void *) = nullptr;
  Result (*moduleGetFunction)(void **, void *, const char *) = nullptr;
  Result (*functionGetAttribute)(int *, int, void *) = nullptr;
  Result (*functionSetAttribute)(void *, int, int) = nullptr;
  Result (*launch)(const LaunchConfig *, void *, void **, void **) = nullptr;
  Result (*allocate)(DevicePointer *, size_t) = nullptr;
  Result (*allocateManaged)(DevicePointer *, size_t, unsigned) = nullptr;
  Result (*release)(DevicePointer) = nullptr;
  Result (*copy)(DevicePointer, DevicePointer, size_t, void *) = nullptr;
  Result (*fill32)(DevicePointer, unsigned, size_t, void *) = nullptr;
  Result (*fill16)(DevicePointer, unsigned short, size_t, void *) = nullptr;
  Result (*hostRegister)(void *, size_t, unsigned) = nullptr;
  Result (*hostUnregister)(void *) = nullptr;
  Result (*streamCreate)(void **, unsigned) = nullptr;
  Result (*streamDestroy)(void *) = nullptr;
  Result (*streamSynchronize)(void *) = nullptr;
  Result (*streamWaitEvent)(void *, void *, unsigned) = nullptr;
  Result (*eventCreate)(void **, unsigned) = nullptr;
  Result (*eventDestroy)(void *) = nullptr;
  Result (*eventSynchronize)(void *) = nullptr;
  Result (*eventRecord)(void *, void *) = nullptr;
  Result (*tensorMapEncodeTiled)(void *, unsigned, unsigned, void *,
                                 const uint64_t *, const uint64_t *,
                                 const uint32_t *, const uint32_t *, unsigned,
                                 unsigned, unsigned, unsigned) = nullptr;

  Driver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      missing = "expected the CUDA driver, found no libcuda.so.1";
      return;
    }
    load(library, "cuInit", init);
    load(library, "cuGetErrorString", getErrorString);
    load(library, "cuDeviceGet", deviceGet);
    load(library, "cuDeviceGetAttribute", deviceGetAttribute);
    load(library, "cuDevicePrimaryCtxRetain", contextRetain);
    load(library, "cuCtxSetCurrent", contextSet);
    load(library, "cuModuleLoadDataEx", moduleLoad);
    load(library, "cuModuleUnload", moduleUnload);
    load(library, "cuModuleGetFunction", moduleGetFunction);
    load(library, "cuFuncGetAttribute", functionGetAttribute);
    load(library, "cuFuncSetAttribute", functionSetAttribute);
    load(library, "cuLaunchKernelEx", launch);
    load(library, "cuMemAlloc_v2", allocate);
    load(library, "cuMemAllocManaged", allocateManaged);
    load(library, "cuMemFree_v2", release);
    load(library, "cuMemcpyAsync", copy);
    load(library, "cuMemsetD32Async", fill32);
    load(library, "cuMemsetD16Async", fill16);
    load(library, "cuMemHostRegister_v2", hostRegister);
    load(library, "cuMemHostUnregister", hostUnregister);
    load(library, "cuStreamCreate", streamCreate);
    load(library, "cuStreamDestroy_v2", streamDestroy);
    load(library, "cuStreamSynchronize", streamSynchronize);
    load(library, "cuStreamWaitEvent", streamWaitEvent);
    load(library, "cuEventCreate", eventCreate);
    load(library, "cuEventDestroy_v2", eventDestroy);
    load(library, "cuEventSynchronize", eventSynchronize);
    load(library, "cuEventRecord", eventRecord);
    load(library, "cuTensorMapEncodeTiled", tensorMapEncodeTiled);
    if (!missing && init(0) != 0)
      missing = "expected a CUDA device, found none that starts";
    int device;
    if (!missing && deviceGet(&device, 0) != 0)
      missing = "expected a CUDA device, found none";
  }

private:
  template <typename Fn>
  void load(void *library, const char *name, Fn &fn) {
    fn = reinterpret_cast<Fn>(dlsym(library, name));
    if (!fn && !missing)
      missing = "expected a CUDA driver of version 12 or later, found an "
                "older one";
  }
};

const Driver &driver() {
  static const Driver instance;
  return instance;
}

class CudaDevice final : public GpuDevice {
public:
  int32_t getChip() override {
    enter();
    return 10 * getAttribute(kCapabilityMajor) + getAttribute(kCapabilityMinor);
  }

  void *load(const void *data, bool isText, int optLevel) override {
    enter();
    char log[4096] = "";
    auto asPointer = [](uintptr_t value) {
      return reinterpret_cast<void *>(value);
    };
    unsigned options[] = {kJitOptimizationLevel, kJitErrorLog,
                          kJitErrorLogBytes};
    void *values[] = {asPointer(optLevel), log, asPointer(sizeof log - 1)};
    void *module = nullptr;
    check(driver().moduleLoad(&module, data, isText ? 3 : 0, options, values),
          "cuModuleLoadDataEx", log);
    return module;
  }

  void unload(void *module) override {
    enter();
    check(driver().moduleUnload(module), "cuModuleUnload");
  }

  void *find(void *module, const char *name) override {
    enter();
    void *function = nullptr;
    check(driver().moduleGetFunction(&function, module, name),
          "cuModuleGetFunction");
    return function;
  }

  void allowDynamicShared(void *function, uint32_t bytes) override {
    enter();
    int staticBytes = 0, most = getAttribute(kMaxSharedOptIn);
    check(driver().functionGetAttribute(&staticBytes, kStaticSharedSize,
                                        function),
          "cuFuncGetAttribute");
    // The driver would say "invalid argument".
    if (int64_t{staticBytes} + bytes > most)
      throw std::runtime_error(
          "moe cuda runtime: expected at most " + std::to_string(most) +
          " bytes of shared memory on this GPU, found " +
          std::to_string(staticBytes) + " static and " + std::to_string(bytes) +
          " dynamic ones: compile for its chip");
    check(driver().functionSetAttribute(function, kMaxDynamicSharedSize,
                                        static_cast<int>(bytes)),
          "cuFuncSetAttribute");
  }

  void launchKernel(void *function, const GpuLaunch &from) override {
    enter();
    LaunchAttribute cluster = {};
    cluster.id = kClusterDimension;
    cluster.clusterDimension = {from.cluster[0], from.cluster[1],
                                from.cluster[2]};
    auto blocks = [&](int dim) {
      return static_cast<unsigned>(from.grid[dim]);
    };
    LaunchConfig config = {blocks(0),        blocks(1),
                           blocks(2),        from.block[0],
                           from.block[1],    from.block[2],
                           from.dynamicSmem, from.stream,
                           &cluster,         from.cluster[0] ? 1u : 0u};
    check(driver().launch(&config, function, from.params, nullptr),
          "cuLaunchKernelEx");
  }

  void *allocate(uint64_t bytes, void *, bool hostShared) override {
    enter();
    if (bytes == 0)
      return nullptr;
    DevicePointer pointer = 0;
    check(hostShared ? driver().allocateManaged(&pointer, bytes, kAttachGlobal)
                     : driver().allocate(&pointer, bytes),
          "cuMemAlloc");
    return reinterpret_cast<void *>(pointer);
  }

  void free(void *pointer, void *) override {
    enter();
    if (pointer)
      check(driver().release(reinterpret_cast<DevicePointer>(pointer)),
            "cuMemFree");
  }

  void setName(void *, const std::string &) override {}

  void copy(void *to, const void *from, uint64_t bytes, void *stream) override {
    enter();
    check(driver().copy(reinterpret_cast<DevicePointer>(to),
                        reinterpret_cast<DevicePointer>(from), bytes, stream),
          "cuMemcpyAsync");
    // The source of a copy without a stream may be on the caller's stack.
    if (!stream)
      check(driver().streamSynchronize(nullptr), "cuStreamSynchronize");
  }

  void fill(void *to, uint32_t value, uint32_t width, uint64_t count,
            void *stream) override {
    enter();
    auto target = reinterpret_cast<DevicePointer>(to);
    check(width == 4
              ? driver().fill32(target, value, count, stream)
              : driver().fill16(target, static_cast<unsigned short>(value),
                                count, stream),
          "cuMemset");
  }

  void registerHost(void *pointer, uint64_t bytes) override {
    enter();
    check(driver().hostRegister(pointer, bytes, 0), "cuMemHostRegister");
  }

  void unregisterHost(void *pointer) override {
    enter();
    check(driver().hostUnregister(pointer), "cuMemHostUnregister");
  }

  void *createStream() override {
    enter();
    void *stream = nullptr;
    check(driver().streamCreate(&stream, 1 /*non-blocking*/), "cuStreamCreate");
    return stream;
  }

  void destroyStream(void *stream) override {
    check(driver().streamDestroy(stream), "cuStreamDestroy");
  }

  void synchronizeStream(void *stream) override {
    enter();
    check(driver().streamSynchronize(stream), "cuStreamSynchronize");
  }

  void waitEvent(void *stream, void *event) override {
    check(driver().streamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
  }

  void *createEvent() override {
    enter();
    void *event = nullptr;
    check(driver().eventCreate(&event, kDisableTiming), "cuEventCreate");
    return event;
  }

  void destroyEvent(void *event) override {
    check(driver().eventDestroy(event), "cuEventDestroy");
  }

  void synchronizeEvent(void *event) override {
    check(driver().eventSynchronize(event), "cuEventSynchronize");
  }

  void recordEvent(void *event, void *stream) override {
    check(driver().eventRecord(event, stream), "cuEventRecord");
  }

  void setDefault(int32_t device) override {
    ordinal() = device;
    enter();
  }

  void encodeTensorMap(void *map, const GpuTensorMap &d) override {
    enter();
    check(driver().tensorMapEncodeTiled(map, d.dataType, d.rank, d.address,
                                        d.dims, d.strides, d.box,
                                        d.elementStrides, d.interleave,
                                        d.swizzle, d.l2Promotion, d.oobFill),
          "cuTensorMapEncodeTiled");
  }

  uint64_t numFindings() override { return 0; }
  std::string report() override { return {}; }

private:
  static int32_t &ordinal() {
    static thread_local int32_t device = 0;
    return device;
  }

  static int getAttribute(int which) {
    int device = 0, value = 0;
    check(driver().deviceGet(&device, ordinal()), "cuDeviceGet");
    check(driver().deviceGetAttribute(&value, which, device),
          "cuDeviceGetAttribute");
    return value;
  }

  /// Whether a kernel has failed, maybe long before the call that says so. The
  /// context stays unusable.
  static bool isOfEarlierKernel(Result result) {
    constexpr Result illegalAddress = 700, launchTimeout = 702, assertion = 710,
                     hardwareStack = 714, launchFailed = 719;
    return result == illegalAddress || result == launchTimeout ||
           result == assertion ||
           (result >= hardwareStack && result <= launchFailed);
  }

  /// `log` may say more than the error's number.
  static void check(Result result, const char *call, const char *log = "") {
    if (result == 0)
      return;
    const char *text = "unknown error";
    driver().getErrorString(result, &text);
    std::string message = std::string("moe cuda runtime: ") + call +
                          " failed: " + text + (*log ? "\n" : "") + log;
    if (isOfEarlierKernel(result)) {
      std::string last = gpuDevice().getLastKernel();
      message += "; a kernel that was launched before has failed" +
                 (last.empty() ? "" : ", the last one was '" + last + "'") +
                 ": CUDA_LAUNCH_BLOCKING=1 tells which, and no GPU work of "
                 "this process runs any more";
    }
    throw std::runtime_error(message);
  }

  /// Makes the device's primary context, which torch uses too, current.
  static void enter() {
    if (driver().missing)
      throw std::runtime_error(std::string("moe cuda runtime: ") +
                               driver().missing);
    int device = 0;
    check(driver().deviceGet(&device, ordinal()), "cuDeviceGet");
    static std::mutex mutex;
    static void *contexts[64] = {};
    std::lock_guard<std::mutex> guard(mutex);
    void *&context = contexts[device & 63];
    if (!context)
      check(driver().contextRetain(&context, device),
            "cuDevicePrimaryCtxRetain");
    check(driver().contextSet(context), "cuCtxSetCurrent");
  }
};

} // namespace

GpuDevice &gpuDevice() {
  static CudaDevice device;
  return device;
}

} // namespace moe::runtime

extern "C" __attribute__((visibility("default"))) const char *
moe_gpu_unavailable() {
  return moe::runtime::driver().missing;
}
