//===- DeviceMemory.h - Tensors on a GPU ------------------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_DEVICEMEMORY_H
#define MOE_LIB_RUNTIME_LOADER_DEVICEMEMORY_H

#include "MoE/Runtime/Artifact.h"
#include "MoE/Runtime/GpuDevice.h"

namespace moe::runtime {

/// Opens the library of "cuda" or "sim", which lies beside this one. Throws
/// std::runtime_error that says why kernels cannot run there.
GpuDevice &openDevice(const std::string &kind);

/// Memory of a device, freed with this.
class DeviceMemory {
public:
  DeviceMemory(GpuDevice &device, uint64_t bytes, const std::string &name);
  DeviceMemory(DeviceMemory &&other) noexcept;
  ~DeviceMemory();

  void *get() const { return pointer; }

private:
  GpuDevice &device;
  void *pointer;
};

/// Bytes of a tensor's elements.
uint64_t getByteSize(const Tensor &tensor);

/// Tensors on the device: their own memory where they are there already, else
/// memory that this holds.
class StagedTensors {
public:
  explicit StagedTensors(GpuDevice &device) : device(device) {}

  /// Puts the tensor on the device, with its elements if `copied`.
  void add(const Tensor &tensor, const std::string &name, bool copied);
  /// A scalar stays with the host: kernels take its value.
  void addScalar(const Tensor &tensor) { staged.push_back(tensor); }
  std::span<const Tensor> get() const { return staged; }
  /// Copies the elements back to the tensors, in the order of `add`.
  void copyTo(std::span<const Tensor> tensors) const;

private:
  GpuDevice &device;
  std::vector<Tensor> staged;
  std::vector<DeviceMemory> memory;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_DEVICEMEMORY_H
