//===- DeviceMemory.h - Tensors on a GPU ------------------------*- C++ -*-===//

#ifndef MOE_RUNTIME_DEVICEMEMORY_H
#define MOE_RUNTIME_DEVICEMEMORY_H

#include "MoE/Runtime/Artifact.h"
#include "MoE/Runtime/GpuDevice.h"

namespace moe::runtime {

/// Memory of a device, freed with this.
class MOE_RUNTIME_EXPORT DeviceMemory {
public:
  /// `name` is what reports of the simulator call it. Throws
  /// std::runtime_error where the device has not so much left.
  DeviceMemory(GpuDevice &device, uint64_t bytes, const std::string &name);
  DeviceMemory(DeviceMemory &&other) noexcept;
  ~DeviceMemory();

  /// An address on the device; null for no bytes on hardware.
  void *get() const { return pointer; }

private:
  GpuDevice &device;
  void *pointer;
};

/// Tensors on the device: their own memory where they are there already, else
/// memory that this holds.
class MOE_RUNTIME_EXPORT StagedTensors {
public:
  /// None yet.
  explicit StagedTensors(GpuDevice &device) : device(device) {}
  /// All of `tensors`; those that `types` call scalars stay with the host, as
  /// kernels take their values. `what` and a number name each in reports.
  StagedTensors(GpuDevice &device, std::span<const Tensor> tensors,
                std::span<const ValueType> types, const std::string &what,
                const std::string &function, bool copied);

  /// Puts the tensor on the device, with its elements if `copied`.
  void add(const Tensor &tensor, const std::string &name, bool copied);
  /// In the order of `add`; valid until the next `add`.
  std::span<const Tensor> get() const { return staged; }
  /// Copies the elements back to the tensors, in the order of `add`.
  void copyTo(std::span<const Tensor> tensors) const;
  /// Copies those back that `types` say a call has updated.
  void copyUpdatesTo(std::span<const Tensor> tensors,
                     std::span<const ValueType> types) const;

private:
  GpuDevice &device;
  std::vector<Tensor> staged;
  std::vector<DeviceMemory> memory;
};

} // namespace moe::runtime

#endif // MOE_RUNTIME_DEVICEMEMORY_H
