//===- DecoderState.cpp - What a decoder keeps of the tokens --------------===//

#include "DecoderState.h"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace moe::runtime {

void *StateTensor::Buffer::reserve(uint64_t bytes, const std::string &name) {
  if (bytes > capacity) {
    // A tensor of the cache grows token by token.
    uint64_t larger = capacity ? bytes + bytes / 2 : bytes;
    memory = AlignedMemory(larger, "the state '" + name + "'");
    capacity = larger;
  }
  return memory.get();
}

StateTensor::StateTensor(const Json &description, const StoredTensors &stored)
    : name(description.at("name").string()),
      initial{description.at("dtype").string(), {}} {
  for (const Json &size : description.at("shape").array())
    initial.shape.push_back(size.integer());
  if (const Json *place = description.find("stored_as");
      place && !place->isNull()) {
    const Tensor &first = stored.find(place->string());
    if (first.dtype != initial.dtype || first.shape != initial.shape)
      throw std::runtime_error(
          std::string(kDecoderFile) + ": expected the first value of '" + name +
          "' to be of its type, found another in " + kWeightsFile);
    initial.data = first.data;
  }
  value = initial;
  value.data = memory.reserve(getByteSize(initial), name); // Checks the sizes.
  if (initial.data)
    reset();
}

bool StateTensor::startsWithZeros() const {
  return !initial.data && getByteSize(initial);
}

void StateTensor::reset() {
  uint64_t bytes = getByteSize(initial);
  value.shape = initial.shape;
  value.data = memory.reserve(bytes, name);
  if (bytes && initial.data)
    std::memcpy(value.data, initial.data, bytes);
  else if (bytes)
    std::memset(value.data, 0, bytes);
}

const Tensor &StateTensor::prepare(const std::vector<int64_t> &shape) {
  next = {initial.dtype, shape};
  next.data = spare.reserve(getByteSize(next), name);
  return next;
}

void StateTensor::accept() {
  std::swap(value, next);
  std::swap(memory, spare);
}

} // namespace moe::runtime
