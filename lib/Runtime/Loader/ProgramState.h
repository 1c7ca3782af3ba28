//===- ProgramState.h - Buffers that a program updates ----------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_PROGRAMSTATE_H
#define MOE_LIB_RUNTIME_LOADER_PROGRAMSTATE_H

#include "AlignedMemory.h"

#include "MoE/Runtime/DeviceMemory.h"

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace moe::runtime {

/// What a program keeps from call to call: the buffers that the model updates
/// in place, such as a cache of keys and values. Code for a CPU writes into the
/// buffer. Kernels read one place and write another, which holds the value once
/// the call is done.
class ProgramState {
public:
  /// `device` is null for the memory of this process.
  ProgramState(std::string function, GpuDevice *device)
      : function(std::move(function)), device(device) {}

  /// A buffer that is an argument of the function and whose next value is a
  /// result, if it has one of its own. `initial` is the first value; zeros
  /// where it points nowhere.
  void add(size_t argument, std::optional<size_t> result, const Tensor &initial,
           const std::string &name);

  bool isEmpty() const { return buffers.empty(); }
  /// Whether the result is the next value of a buffer.
  bool isNext(size_t result) const;

  /// Keeps others away from the functions below. Throws std::runtime_error
  /// while another call is under way.
  std::unique_lock<std::mutex> acquire();
  void reset();
  /// Before a call: puts the values among its arguments, and the places of the
  /// next ones among its results. Throws std::runtime_error after a call that
  /// has not come to `end`, until `reset`.
  void begin(std::span<Tensor> arguments, std::span<Tensor> results);
  /// After a call: makes what it has written the value.
  void end();

private:
  struct Buffer {
    size_t argument;
    std::optional<size_t> result;
    Tensor initial, value, next;
  };

  Tensor allocate(Tensor like, const std::string &name);
  void copyInitial(const Buffer &buffer);

  std::string function;
  GpuDevice *device;
  std::vector<Buffer> buffers;
  std::vector<std::variant<AlignedMemory, DeviceMemory>> memory;
  std::mutex underWay;
  bool isWhole = true;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_PROGRAMSTATE_H
