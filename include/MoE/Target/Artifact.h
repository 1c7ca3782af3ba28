//===- Artifact.h - Compiled modules as folders -----------------*- C++ -*-===//
//
// An artifact is a folder: manifest.json, the code, and a C header for it. The
// manifest names every other file with its SHA-256, and manifest.json.sha256
// has its own, so that a loader can refuse a damaged or mixed-up folder before
// it runs code from it.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_TARGET_ARTIFACT_H
#define MOE_TARGET_ARTIFACT_H

#include "MoE/Target/Signature.h"
#include <map>

namespace mlir::moe {

struct StoredFile {
  /// Where it lies; it is moved from there.
  std::string path;
  /// What the manifest says of it: size, SHA-256.
  llvm::json::Value description = nullptr;
};

/// What an artifact holds, before it has a place on disk.
struct Artifact {
  /// "cpu", or a chip.
  std::string target;
  /// For a CPU: which one, as LLVM names it, and its features.
  std::string cpu, features;
  std::vector<FunctionSignature> functions;
  /// For a chip: the functions, with how to launch them (Kernels.h).
  llvm::json::Array deviceFunctions;
  /// For a chip: the kernels of the PTX.
  std::vector<std::string> kernels;
  /// File name to content.
  std::map<std::string, std::string> files;
  /// Files that are on disk already, in the file system of the folder: too
  /// large for memory.
  std::map<std::string, StoredFile> storedFiles;
};

/// The text of manifest.json.
std::string writeManifest(const Artifact &artifact);

/// Publishes the folder by one rename; on failure nothing is left behind, and
/// what was there stays. An artifact that is already at `path` is replaced; a
/// folder without a manifest of ours, or with a file that its manifest does not
/// list, is refused, as anything else is. Stored files are moved into it.
llvm::Error writeArtifact(const Artifact &artifact, StringRef path);

/// The C declarations of the functions of a CPU artifact.
std::string writeCHeader(ArrayRef<FunctionSignature> functions);

} // namespace mlir::moe

#endif // MOE_TARGET_ARTIFACT_H
