//===- Mgpu.cpp - The functions that MLIR's lowered host code calls -------===//
//
// The ABI of MLIR's libmlir_cuda_runtime, over a GpuDevice.
//
//===----------------------------------------------------------------------===//

#include "MoE/Runtime/GpuDevice.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#define MOE_EXPORT __attribute__((visibility("default")))

using moe::runtime::GpuDevice;
using moe::runtime::gpuDevice;
using moe::runtime::GpuLaunch;
using moe::runtime::GpuTensorMap;

namespace {

/// MLIR's StridedMemRefType<char, rank>; sizes and strides follow.
struct MemRef {
  char *base;
  char *data;
  int64_t offset;
  int64_t sizes[1];
};

uint64_t elementsOf(int64_t rank, const MemRef *memref) {
  uint64_t count = 1;
  for (int64_t i = 0; i < rank; ++i)
    count *= static_cast<uint64_t>(memref->sizes[i]);
  return count;
}

GpuLaunch makeLaunch(intptr_t gx, intptr_t gy, intptr_t gz, intptr_t bx,
                     intptr_t by, intptr_t bz, int32_t smem, void *stream,
                     void **params) {
  auto extent = [](intptr_t value) { return static_cast<uint32_t>(value); };
  auto blocks = [](intptr_t value) { return static_cast<uint64_t>(value); };
  return {{blocks(gx), blocks(gy), blocks(gz)},
          {extent(bx), extent(by), extent(bz)},
          {0, 0, 0},
          static_cast<uint32_t>(smem),
          stream,
          params};
}

/// Bytes of an element of a CUtensorMapDataType.
uint32_t tensorElementBytes(uint32_t type) {
  static constexpr uint32_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4,
                                       8, 2, 4, 4, 4, 1, 1, 1};
  return type < sizeof bytes / sizeof bytes[0] ? bytes[type] : 1;
}

/// Calls a function of the device; its error ends the process.
template <typename Result, typename... Params, typename... Args>
Result callDevice(Result (GpuDevice::*function)(Params...), Args... arguments) {
  try {
    return (gpuDevice().*function)(arguments...);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::abort();
  }
}

/// Null, or why the call failed; valid until the next call of this thread.
template <typename Call>
const char *tryCall(Call call) {
  static thread_local std::string reason;
  try {
    call(gpuDevice());
    return nullptr;
  } catch (const std::exception &error) {
    reason = error.what();
    return reason.c_str();
  }
}

} // namespace

extern "C" {

MOE_EXPORT void *mgpuModuleLoad(void *data, size_t) {
  return callDevice(&GpuDevice::loadModule, data, /*isText=*/false, 0);
}

MOE_EXPORT void *mgpuModuleLoadJIT(void *data, int optLevel, size_t) {
  return callDevice(&GpuDevice::loadModule, data, /*isText=*/true, optLevel);
}

MOE_EXPORT void mgpuModuleUnload(void *module) {
  callDevice(&GpuDevice::unloadModule, module);
}

MOE_EXPORT void *mgpuModuleGetFunction(void *module, const char *name) {
  return callDevice(&GpuDevice::getFunction, module, name);
}

MOE_EXPORT void mgpuLaunchKernel(void *function, intptr_t gridX, intptr_t gridY,
                                 intptr_t gridZ, intptr_t blockX,
                                 intptr_t blockY, intptr_t blockZ, int32_t smem,
                                 void *stream, void **params, void ** /*extra*/,
                                 size_t /*paramsCount*/) {
  callDevice(&GpuDevice::launch, function,
             makeLaunch(gridX, gridY, gridZ, blockX, blockY, blockZ, smem,
                        stream, params));
}

MOE_EXPORT void mgpuLaunchClusterKernel(
    void *function, intptr_t clusterX, intptr_t clusterY, intptr_t clusterZ,
    intptr_t gridX, intptr_t gridY, intptr_t gridZ, intptr_t blockX,
    intptr_t blockY, intptr_t blockZ, int32_t smem, void *stream, void **params,
    void ** /*extra*/, size_t /*paramsCount*/) {
  GpuLaunch launch = makeLaunch(gridX, gridY, gridZ, blockX, blockY, blockZ,
                                smem, stream, params);
  launch.cluster[0] = static_cast<uint32_t>(clusterX);
  launch.cluster[1] = static_cast<uint32_t>(clusterY);
  launch.cluster[2] = static_cast<uint32_t>(clusterZ);
  callDevice(&GpuDevice::launch, function, launch);
}

MOE_EXPORT void *mgpuStreamCreate() {
  return callDevice(&GpuDevice::createStream);
}

MOE_EXPORT void mgpuStreamDestroy(void *stream) {
  callDevice(&GpuDevice::destroyStream, stream);
}

MOE_EXPORT void mgpuStreamSynchronize(void *stream) {
  callDevice(&GpuDevice::synchronizeStream, stream);
}

MOE_EXPORT void mgpuStreamWaitEvent(void *stream, void *event) {
  callDevice(&GpuDevice::waitEvent, stream, event);
}

MOE_EXPORT void *mgpuEventCreate() {
  return callDevice(&GpuDevice::createEvent);
}

MOE_EXPORT void mgpuEventDestroy(void *event) {
  callDevice(&GpuDevice::destroyEvent, event);
}

MOE_EXPORT void mgpuEventSynchronize(void *event) {
  callDevice(&GpuDevice::synchronizeEvent, event);
}

MOE_EXPORT void mgpuEventRecord(void *event, void *stream) {
  callDevice(&GpuDevice::recordEvent, event, stream);
}

MOE_EXPORT void *mgpuMemAlloc(uint64_t bytes, void *stream, bool isHostShared) {
  return callDevice(&GpuDevice::allocate, bytes, stream, isHostShared);
}

MOE_EXPORT void mgpuMemFree(void *pointer, void *stream) {
  callDevice(&GpuDevice::free, pointer, stream);
}

MOE_EXPORT void mgpuMemcpy(void *to, void *from, size_t bytes, void *stream) {
  callDevice(&GpuDevice::copy, to, from, bytes, stream);
}

MOE_EXPORT void mgpuMemset32(void *to, unsigned int value, size_t count,
                             void *stream) {
  callDevice(&GpuDevice::fill, to, value, 4, count, stream);
}

MOE_EXPORT void mgpuMemset16(void *to, unsigned short value, size_t count,
                             void *stream) {
  callDevice(&GpuDevice::fill, to, value, 2, count, stream);
}

MOE_EXPORT void mgpuMemHostRegister(void *pointer, uint64_t bytes) {
  callDevice(&GpuDevice::registerHost, pointer, bytes);
}

MOE_EXPORT void mgpuMemHostRegisterMemRef(int64_t rank, MemRef *memref,
                                          int64_t elementBytes) {
  callDevice(&GpuDevice::registerHost,
             memref->data + memref->offset * elementBytes,
             elementsOf(rank, memref) * static_cast<uint64_t>(elementBytes));
}

MOE_EXPORT void mgpuMemHostUnregister(void *pointer) {
  callDevice(&GpuDevice::unregisterHost, pointer);
}

MOE_EXPORT void mgpuMemHostUnregisterMemRef(int64_t /*rank*/, MemRef *memref,
                                            int64_t elementBytes) {
  callDevice(&GpuDevice::unregisterHost,
             memref->data + memref->offset * elementBytes);
}

MOE_EXPORT void mgpuSetDefaultDevice(int32_t device) {
  callDevice(&GpuDevice::setDefault, device);
}

MOE_EXPORT void mgpuTensorMapEncodeTiled(
    void *map, uint32_t dataType, uint32_t rank, void *address,
    const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
    const uint32_t *elementStrides, uint32_t interleave, uint32_t swizzle,
    uint32_t l2Promotion, uint32_t oobFill) {
  callDevice(&GpuDevice::encodeTensorMap, map,
             GpuTensorMap{dataType, rank, address, dims, strides, box,
                          elementStrides, interleave, swizzle, l2Promotion,
                          oobFill});
}

/// Encodes a map for a memref and returns its address on the device.
MOE_EXPORT void *mgpuTensorMapEncodeTiledMemref(
    int64_t rank, MemRef *memref, const uint32_t dataType,
    const uint32_t interleave, const uint32_t swizzle,
    const uint32_t l2Promotion, const uint32_t oobFill, int64_t *boxSizes) {
  constexpr int64_t kMaxRank = 5;
  if (rank < 1 || rank > kMaxRank) {
    std::fprintf(stderr,
                 "moe gpu runtime: expected a tensor map of rank 1 to 5, found "
                 "%lld\n",
                 static_cast<long long>(rank));
    std::abort();
  }
  uint32_t bytes = tensorElementBytes(dataType);
  const int64_t *memrefStrides = memref->sizes + rank;
  uint64_t dims[kMaxRank], strides[kMaxRank];
  uint32_t box[kMaxRank], ones[kMaxRank];
  // A memref's last dimension is the innermost, a tensor map's first.
  for (int64_t i = 0; i < rank; ++i) {
    int64_t from = rank - 1 - i;
    dims[i] = static_cast<uint64_t>(memref->sizes[from]);
    box[i] = static_cast<uint32_t>(boxSizes[from]);
    ones[i] = 1;
    if (i > 0)
      strides[i - 1] = static_cast<uint64_t>(memrefStrides[from]) * bytes;
  }
  alignas(64) unsigned char map[128];
  callDevice(&GpuDevice::encodeTensorMap, map,
             GpuTensorMap{dataType, static_cast<uint32_t>(rank),
                          memref->data + memref->offset * bytes, dims, strides,
                          box, ones, interleave, swizzle, l2Promotion,
                          oobFill});
  void *device = callDevice(&GpuDevice::allocate, sizeof map, nullptr, false);
  callDevice(&GpuDevice::copy, device, map, sizeof map, nullptr);
  return device;
}

MOE_EXPORT GpuDevice *moe_gpu_device() { return &gpuDevice(); }

MOE_EXPORT const char *moe_gpu_load(const char *ptx, void **module) {
  return tryCall([&](GpuDevice &device) {
    *module = device.loadModule(ptx, /*isText=*/true, GpuDevice::kMaxOptLevel);
  });
}

MOE_EXPORT const char *moe_gpu_find(void *module, const char *name,
                                    void **function) {
  return tryCall(
      [&](GpuDevice &device) { *function = device.getFunction(module, name); });
}

MOE_EXPORT const char *moe_gpu_launch(void *function, const uint64_t *grid,
                                      uint32_t blockSize, uint32_t dynamicSmem,
                                      void *stream, void **params) {
  return tryCall([&](GpuDevice &device) {
    auto blocks = [&](int dim) { return static_cast<intptr_t>(grid[dim]); };
    device.launch(function,
                  makeLaunch(blocks(0), blocks(1), blocks(2), blockSize, 1, 1,
                             static_cast<int32_t>(dynamicSmem), stream,
                             params));
  });
}

MOE_EXPORT uint64_t moe_gpu_num_findings() {
  return callDevice(&GpuDevice::numFindings);
}

MOE_EXPORT const char *moe_gpu_report() {
  static thread_local std::string text;
  text = callDevice(&GpuDevice::report);
  return text.c_str();
}

} // extern "C"
