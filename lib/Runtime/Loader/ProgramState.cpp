//===- ProgramState.cpp - Buffers that a program updates ------------------===//

#include "ProgramState.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace moe::runtime {

void ProgramState::add(size_t argument, std::optional<size_t> result,
                       const Tensor &initial, const std::string &name) {
  Buffer buffer = {argument, result, initial, {}, {}};
  buffer.value = allocate(initial, "the state '" + name + "'");
  if (result)
    buffer.next = allocate(initial, "the next state '" + name + "'");
  // New memory of this process is zeros: pages that no call touches stay free.
  if (initial.data || device)
    copyInitial(buffer);
  buffers.push_back(std::move(buffer));
}

Tensor ProgramState::allocate(Tensor like, const std::string &name) {
  uint64_t bytes = getByteSize(like);
  like.isOnDevice = device != nullptr;
  if (device)
    like.data = std::get<DeviceMemory>(
                    memory.emplace_back(DeviceMemory(*device, bytes, name)))
                    .get();
  else
    like.data =
        std::get<AlignedMemory>(memory.emplace_back(AlignedMemory(bytes, name)))
            .get();
  return like;
}

bool ProgramState::isNext(size_t result) const {
  return std::ranges::find(buffers, std::optional(result), &Buffer::result) !=
         buffers.end();
}

std::unique_lock<std::mutex> ProgramState::acquire() {
  std::unique_lock<std::mutex> lock(underWay, std::try_to_lock);
  if (!lock)
    throw std::runtime_error("expected one call at a time of '" + function +
                             "', which keeps state, found another under way; "
                             "load the artifact once for each sequence");
  return lock;
}

void ProgramState::copyInitial(const Buffer &buffer) {
  uint64_t bytes = getByteSize(buffer.initial);
  if (!bytes)
    return;
  if (device && !buffer.initial.data)
    device->copy(buffer.value.data, AlignedMemory(bytes, "zeros").get(), bytes,
                 nullptr);
  else if (device)
    device->copy(buffer.value.data, buffer.initial.data, bytes, nullptr);
  else if (buffer.initial.data)
    std::memcpy(buffer.value.data, buffer.initial.data, bytes);
  else
    std::memset(buffer.value.data, 0, bytes);
}

void ProgramState::reset() {
  for (const Buffer &buffer : buffers)
    copyInitial(buffer);
  isWhole = true;
}

void ProgramState::begin(std::span<Tensor> arguments,
                         std::span<Tensor> results) {
  // Calls of several threads overlap where there is nothing to update.
  if (isEmpty())
    return;
  if (!isWhole)
    throw std::runtime_error("expected a reset of '" + function +
                             "' after a call that failed, which may have "
                             "updated a part of its state, found another call");
  for (const Buffer &buffer : buffers) {
    arguments[buffer.argument] = buffer.value;
    if (buffer.result)
      results[*buffer.result] = buffer.next;
  }
  isWhole = false;
}

void ProgramState::end() {
  if (isEmpty())
    return;
  for (Buffer &buffer : buffers)
    if (buffer.result)
      std::swap(buffer.value, buffer.next);
  isWhole = true;
}

} // namespace moe::runtime
