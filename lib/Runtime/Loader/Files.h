//===- Files.h - The files of an artifact -----------------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_FILES_H
#define MOE_LIB_RUNTIME_LOADER_FILES_H

#include "Json.h"
#include "MappedFile.h"

#include "MoE/Runtime/Artifact.h"

#include <map>
#include <memory>
#include <string>

namespace moe::runtime {

struct ArtifactFiles {
  std::string folder;
  Json manifest;
  /// File name to content, verified against the manifest, but for the weights.
  std::map<std::string, std::string> contents;
  /// Of a torch program, else null.
  std::unique_ptr<MappedFile> weights;

  /// A file that must be there.
  const std::string &get(const std::string &name) const;
};

/// Throws std::runtime_error that says what is wrong with which file.
ArtifactFiles readArtifact(const std::string &folder,
                           Verification verification = Verification::Quick);

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_FILES_H
