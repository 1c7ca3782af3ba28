//===- Files.h - The files of an artifact -----------------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_FILES_H
#define MOE_LIB_RUNTIME_LOADER_FILES_H

#include "Json.h"

#include "MoE/Runtime/Artifact.h"

#include <map>
#include <string>

namespace moe::runtime {

struct ArtifactFiles {
  std::string folder;
  Json manifest;
  /// File name to content, verified against the manifest.
  std::map<std::string, std::string> contents;

  /// A file that must be there.
  const std::string &get(const std::string &name) const;
};

/// Throws std::runtime_error that says what is wrong with which file.
ArtifactFiles readArtifact(const std::string &folder);

/// The tensors of a file in the safetensors format, by name. They point into
/// `bytes`.
std::map<std::string, Tensor> readWeights(std::string &bytes);

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_FILES_H
