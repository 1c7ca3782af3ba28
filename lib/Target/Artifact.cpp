//===- Artifact.cpp - Compiled modules as folders -------------------------===//

#include "MoE/Target/Artifact.h"

#include "llvm/ADT/ScopeExit.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Config/llvm-config.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/SHA256.h"
#include "llvm/Support/raw_ostream.h"
#include <cstdio>
#include <fcntl.h>

using namespace mlir;
using namespace mlir::moe;

namespace fs = llvm::sys::fs;
namespace json = llvm::json;

static constexpr StringLiteral kManifest = "manifest.json";

//===----------------------------------------------------------------------===//
// Manifest
//===----------------------------------------------------------------------===//

static std::string sha256(StringRef text) {
  auto digest = llvm::SHA256::hash(
      ArrayRef(reinterpret_cast<const uint8_t *>(text.data()), text.size()));
  return llvm::toHex(digest, /*LowerCase=*/true);
}

static json::Value describeFunction(const FunctionSignature &function,
                                    bool isCPU) {
  json::Value value = toJSON(function);
  if (isCPU) {
    (*value.getAsObject())["symbol"] = interfaceSymbol(function.name);
    (*value.getAsObject())["packed_symbol"] = packedSymbol(function.name);
  }
  return value;
}

std::string mlir::moe::writeManifest(const Artifact &artifact) {
  bool isCPU = artifact.target == "cpu";
  json::Array functions(artifact.deviceFunctions);
  for (const FunctionSignature &function : artifact.functions)
    functions.push_back(describeFunction(function, isCPU));
  json::Object files;
  for (const auto &[name, content] : artifact.files)
    files[name] = json::Object{{"sha256", sha256(content)},
                               {"size", static_cast<int64_t>(content.size())}};
  for (const auto &[name, file] : artifact.storedFiles)
    files[name] = file.description;
  json::Object target{{"name", artifact.target}};
  if (isCPU) {
    target["cpu"] = artifact.cpu;
    target["features"] = artifact.features;
  }
  json::Object manifest{
      {"format", "moe-mlir-artifact"},
      {"format_version", 1},
      {"compiler",
       json::Object{{"moe_mlir", MOE_VERSION}, {"llvm", LLVM_VERSION_STRING}}},
      {"target", std::move(target)},
      {"functions", std::move(functions)},
      {"files", std::move(files)}};
  if (!isCPU)
    manifest["kernels"] = json::Array(artifact.kernels);
  return llvm::formatv("{0:2}\n", json::Value(std::move(manifest)));
}

//===----------------------------------------------------------------------===//
// Publication
//===----------------------------------------------------------------------===//

static llvm::Error failedTo(const Twine &what, std::error_code code) {
  return llvm::createStringError(code,
                                 "cannot " + what + ": " + code.message());
}

/// Only what this function's callers wrote before may be replaced.
static llvm::Error verifyReplaceable(StringRef path) {
  if (!fs::exists(path))
    return llvm::Error::success();
  SmallString<128> manifest(path);
  llvm::sys::path::append(manifest, kManifest);
  std::error_code code;
  bool empty = fs::is_directory(path) &&
               fs::directory_iterator(path, code) == fs::directory_iterator();
  if (empty || fs::exists(manifest))
    return llvm::Error::success();
  return llvm::createStringError(
      "expected '" + path +
      "' to be free, empty or an older artifact, found something else; choose "
      "another name");
}

/// Puts the staged folder at `path` in one step; what was there ends up at
/// `staged`, which the caller removes.
static llvm::Error exchange(StringRef staged, StringRef path) {
  std::string from = staged.str(), to = path.str();
  if (!fs::exists(path)) {
    if (std::error_code code = fs::rename(from, to))
      return failedTo("move the artifact to '" + path + "'", code);
    return llvm::Error::success();
  }
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE))
    return failedTo("replace the artifact '" + path + "'",
                    std::error_code(errno, std::generic_category()));
  return llvm::Error::success();
}

llvm::Error mlir::moe::writeArtifact(const Artifact &artifact, StringRef path) {
  path = path.rtrim('/');
  if (llvm::Error error = verifyReplaceable(path))
    return error;
  // A sibling, so that the rename stays within one file system.
  SmallString<128> staged;
  fs::createUniquePath(path + ".staging-%%%%%%%%", staged, false);
  if (std::error_code code = fs::create_directory(
          staged, /*IgnoreExisting=*/false, fs::perms::all_all))
    return failedTo("create a folder beside '" + path + "'", code);
  llvm::scope_exit cleanup([&] { fs::remove_directories(staged); });

  std::map<std::string, std::string> files = artifact.files;
  std::string manifest = writeManifest(artifact);
  // In the form that `sha256sum --check` reads.
  files[(kManifest + ".sha256").str()] =
      (sha256(manifest) + "  " + kManifest + "\n").str();
  files[kManifest.str()] = std::move(manifest);
  for (const auto &[name, content] : files) {
    SmallString<128> file(staged);
    llvm::sys::path::append(file, name);
    std::error_code code;
    llvm::raw_fd_ostream stream(file, code);
    if (!code) {
      stream << content;
      stream.close();
      code = stream.error();
      stream.clear_error();
    }
    if (code)
      return failedTo("write '" + file + "'", code);
  }
  for (const auto &[name, stored] : artifact.storedFiles) {
    SmallString<128> file(staged);
    llvm::sys::path::append(file, name);
    if (std::error_code code = fs::rename(stored.path, file))
      return failedTo("move '" + stored.path + "' into the artifact", code);
  }
  return exchange(staged, path);
}
