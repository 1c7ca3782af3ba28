//===- Weights.h - Tensors of a safetensors file ----------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_WEIGHTS_H
#define MOE_LIB_RUNTIME_LOADER_WEIGHTS_H

#include "AlignedMemory.h"
#include "MappedFile.h"

#include "MoE/Runtime/Artifact.h"

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace moe::runtime {

constexpr const char *kWeightsFile = "weights.safetensors";

/// The part of a file in the safetensors format that says where its tensors
/// lie. Throws std::runtime_error where the file ends within it.
std::string_view getWeightsHeader(std::string_view bytes);

/// The tensors of such a file by name. They point into `bytes`, which nobody
/// may write to. Throws std::runtime_error unless each lies within the file and
/// apart from all others.
std::map<std::string, Tensor> readWeights(std::string_view bytes);

/// The tensors of an artifact's file by name, while this lives.
class StoredTensors {
public:
  explicit StoredTensors(std::unique_ptr<MappedFile> file);

  /// Throws std::runtime_error where there is no such tensor.
  const Tensor &find(const std::string &name) const;
  /// The same where kernels take it: compilers of before have put tensors
  /// anywhere, of which this makes one copy.
  Tensor findAligned(const std::string &name);

private:
  std::unique_ptr<MappedFile> file;
  std::map<std::string, Tensor> tensors;
  std::vector<AlignedMemory> copies;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_WEIGHTS_H
