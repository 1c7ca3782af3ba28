//===- DecoderState.h - What a decoder keeps of the tokens ------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_DECODERSTATE_H
#define MOE_LIB_RUNTIME_LOADER_DECODERSTATE_H

#include "AlignedMemory.h"
#include "Json.h"
#include "Weights.h"

#include "MoE/Runtime/Artifact.h"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::runtime {

constexpr const char *kDecoderFile = "decoder.json";

/// What a cache is at a time, beside the values of its tensors.
struct DecoderState {
  /// A number for all flags and texts that the cache keeps.
  int64_t form = 0;
  /// Integers that grow with the tokens.
  std::vector<int64_t> counters;
  /// Of its tensors, in their order.
  std::vector<std::vector<int64_t>> shapes;
};

/// A tensor of the cache. Programs update it in place, or make another one for
/// its place, which may have other sizes.
class StateTensor {
public:
  /// Throws std::runtime_error where the description is none of a tensor.
  StateTensor(const Json &description, const StoredTensors &stored);

  const std::string &getName() const { return name; }
  /// What it is at first.
  const std::string &getType() const { return initial.dtype; }
  const std::vector<int64_t> &getFirstShape() const { return initial.shape; }

  /// Whether it is zeros at first, of which there are some.
  bool startsWithZeros() const;

  void reset();
  const Tensor &getValue() const { return value; }
  /// Memory for what a call makes, which is the value after `accept`.
  const Tensor &prepare(const std::vector<int64_t> &shape);
  void accept();

private:
  /// New memory is zeros: pages that no call touches stay free.
  class Buffer {
  public:
    /// Keeps no content where it grows.
    void *reserve(uint64_t bytes, const std::string &name);

  private:
    AlignedMemory memory{0, "a tensor"};
    uint64_t capacity = 0;
  };

  std::string name;
  /// Without a place where that is zeros.
  Tensor initial;
  Tensor value, next;
  Buffer memory, spare;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_DECODERSTATE_H
