//===- DeviceMemory.cpp - Tensors on a GPU --------------------------------===//

#include "MoE/Runtime/DeviceMemory.h"

#include "Functions.h"

#include <dlfcn.h>
#include <stdexcept>
#include <utility>

namespace moe::runtime {

//===----------------------------------------------------------------------===//
// The device
//===----------------------------------------------------------------------===//

/// The folder of this library.
static std::string findFolder() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void *>(&findFolder), &info) || !info.dli_fname)
    return "";
  std::string path = info.dli_fname;
  size_t slash = path.rfind('/');
  return slash == path.npos ? "" : path.substr(0, slash + 1);
}

template <typename Fn>
static Fn *find(void *library, const char *name) {
  auto function = reinterpret_cast<Fn *>(dlsym(library, name));
  if (!function)
    throw std::runtime_error(std::string("expected '") + name +
                             "' in the runtime library of the device, found "
                             "none; install all libraries of one version");
  return function;
}

GpuDevice &openDevice(const std::string &kind) {
  std::string path = findFolder() + "libmoe_" + kind + "_runtime.so";
  // Never closed: kernels and streams of a process live as long as it does.
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw std::runtime_error("expected the runtime library of device '" + kind +
                             "' beside libmoe_runtime: " + dlerror());
  if (const char *why = find<const char *()>(library, "moe_gpu_unavailable")())
    throw std::runtime_error(std::string("cannot run kernels on device '") +
                             kind + "': " + why +
                             "; --device=sim runs them in the simulator");
  return *find<GpuDevice *()>(library, "moe_gpu_device")();
}

//===----------------------------------------------------------------------===//
// Memory
//===----------------------------------------------------------------------===//

DeviceMemory::DeviceMemory(GpuDevice &device, uint64_t bytes,
                           const std::string &name)
    : device(device), pointer(device.allocate(bytes, nullptr, false)) {
  device.setName(pointer, name);
}

DeviceMemory::DeviceMemory(DeviceMemory &&other) noexcept
    : device(other.device), pointer(std::exchange(other.pointer, nullptr)) {}

DeviceMemory::~DeviceMemory() {
  if (!pointer)
    return;
  try {
    device.free(pointer, nullptr);
  } catch (const std::exception &) {
    // The device is lost. What lost it has been thrown where it happened.
  }
}

StagedTensors::StagedTensors(GpuDevice &device, std::span<const Tensor> tensors,
                             std::span<const ValueType> types,
                             const std::string &what,
                             const std::string &function, bool copied)
    : device(device) {
  for (size_t i = 0; i < tensors.size(); ++i)
    if (types[i].isTensor)
      add(tensors[i], what + " " + std::to_string(i) + " of " + function,
          copied);
    else
      staged.push_back(tensors[i]);
}

void StagedTensors::add(const Tensor &tensor, const std::string &name,
                        bool copied) {
  Tensor &onDevice = staged.emplace_back(tensor);
  if (tensor.isOnDevice)
    return;
  uint64_t bytes = getByteSize(tensor);
  onDevice.data = memory.emplace_back(device, bytes, name).get();
  onDevice.isOnDevice = true;
  if (copied && bytes)
    device.copy(onDevice.data, tensor.data, bytes, nullptr);
}

static void copyBack(GpuDevice &device, const Tensor &tensor,
                     const Tensor &staged) {
  uint64_t bytes = getByteSize(tensor);
  if (bytes && tensor.data != staged.data)
    device.copy(tensor.data, staged.data, bytes, nullptr);
}

void StagedTensors::copyTo(std::span<const Tensor> tensors) const {
  for (size_t i = 0; i < tensors.size(); ++i)
    copyBack(device, tensors[i], staged[i]);
}

void StagedTensors::copyUpdatesTo(std::span<const Tensor> tensors,
                                  std::span<const ValueType> types) const {
  for (size_t i = 0; i < tensors.size(); ++i)
    if (types[i].isUpdated)
      copyBack(device, tensors[i], staged[i]);
}

} // namespace moe::runtime
