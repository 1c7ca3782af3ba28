//===- Artifact.cpp - Compiled modules as folders -------------------------===//

#include "MoE/Target/Artifact.h"

#include "MoE/Support/Files.h"
#include "llvm/ADT/ScopeExit.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringSet.h"
#include "llvm/Config/llvm-config.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/SHA256.h"
#include <cstdio>
#include <fcntl.h>
#include <optional>

using namespace mlir;
using namespace mlir::moe;

namespace fs = llvm::sys::fs;
namespace json = llvm::json;

static constexpr StringLiteral kManifest = "manifest.json";
static constexpr StringLiteral kDigest = "manifest.json.sha256";
static constexpr StringLiteral kFormat = "moe-mlir-artifact";
/// docs/Versions.md says when a number goes up.
static constexpr int64_t kFormatVersion = 2, kDecoderFormatVersion = 3;

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
      {"format", kFormat},
      {"format_version", artifact.files.count("decoder.json")
                             ? kDecoderFormatVersion
                             : kFormatVersion},
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

/// The names of the files that the manifest in `folder` lists, itself and its
/// digest; nullopt where the folder has no manifest of ours.
static std::optional<llvm::StringSet<>> listOwnFiles(StringRef folder) {
  SmallString<128> path(folder);
  llvm::sys::path::append(path, kManifest);
  std::string text;
  if (::moe::readFile(path.str().str(), text))
    return std::nullopt;
  llvm::Expected<json::Value> manifest = json::parse(text);
  if (!manifest) {
    llvm::consumeError(manifest.takeError());
    return std::nullopt;
  }
  const json::Object *object = manifest->getAsObject();
  const json::Object *files = object ? object->getObject("files") : nullptr;
  if (!files || object->getString("format") != kFormat)
    return std::nullopt;
  llvm::StringSet<> names = {kManifest, kDigest};
  for (const auto &[name, description] : *files)
    names.insert(StringRef(name));
  return names;
}

static llvm::Error refuseToReplace(StringRef path, const Twine &found) {
  return llvm::createStringError(
      "expected '" + path +
      "' to be free, empty or an older artifact alone, found " + found +
      "; choose another name");
}

/// Only what this function's callers wrote before may be replaced: a folder
/// with files of somebody else's is left as it is. On success `names` are the
/// files that go.
static llvm::Error verifyReplaceable(StringRef folder, StringRef path,
                                     llvm::StringSet<> &names) {
  std::optional<llvm::StringSet<>> own = listOwnFiles(folder);
  std::error_code code;
  for (fs::directory_iterator at(folder, code, /*follow_symlinks=*/false), end;
       at != end && !code; at.increment(code)) {
    if (!own)
      return refuseToReplace(path, "something else");
    StringRef name = llvm::sys::path::filename(at->path());
    auto status = at->status();
    if (!own->contains(name) || !status ||
        status->type() != fs::file_type::regular_file)
      return refuseToReplace(path, "'" + name +
                                       "' in it, which is not of the artifact");
    names.insert(name);
  }
  if (code)
    return failedTo("read the folder '" + path + "'", code);
  return llvm::Error::success();
}

/// Removes an artifact, and nothing that has come into its folder meanwhile.
static void removeFiles(StringRef folder, const llvm::StringSet<> &names) {
  for (StringRef name : names.keys()) {
    SmallString<128> file(folder);
    llvm::sys::path::append(file, name);
    fs::remove(file);
  }
  fs::remove(folder);
}

/// Puts the staged folder at `path` in one step. What was there is then at
/// `staged`; if it is no artifact alone any more, it is put back.
static llvm::Error exchange(StringRef staged, StringRef path,
                            llvm::StringSet<> &stagedNames) {
  std::string from = staged.str(), to = path.str();
  if (!fs::exists(path)) {
    if (std::error_code code = fs::rename(from, to))
      return failedTo("move the artifact to '" + path + "'", code);
    stagedNames.clear();
    return llvm::Error::success();
  }
  auto swap = [&] {
    return renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(),
                     RENAME_EXCHANGE);
  };
  if (swap())
    return failedTo("replace the artifact '" + path + "'",
                    std::error_code(errno, std::generic_category()));
  llvm::StringSet<> replaced;
  llvm::Error foreign = verifyReplaceable(staged, path, replaced);
  if (!foreign) {
    stagedNames = std::move(replaced);
    return foreign;
  }
  if (swap()) {
    stagedNames.clear();
    return llvm::joinErrors(std::move(foreign),
                            llvm::createStringError("the files that were in '" +
                                                    path + "' are in '" +
                                                    staged + "'"));
  }
  return foreign;
}

/// Where the artifact goes: behind links, so that they stay.
static llvm::Error findPlace(StringRef &path, SmallVectorImpl<char> &real) {
  path = path.rtrim('/');
  if (!fs::exists(path))
    return llvm::Error::success();
  if (!fs::is_directory(path))
    return refuseToReplace(path, "a file");
  if (std::error_code code = fs::real_path(path, real))
    return failedTo("find the folder '" + path + "'", code);
  path = StringRef(real.data(), real.size());
  return llvm::Error::success();
}

static llvm::Error writeFiles(const std::map<std::string, std::string> &files,
                              StringRef folder, llvm::StringSet<> &names) {
  for (const auto &[name, content] : files) {
    SmallString<128> file(folder);
    llvm::sys::path::append(file, name);
    names.insert(name);
    if (std::error_code code = ::moe::writeFile(file.str().str(), content))
      return failedTo("write '" + file + "'", code);
  }
  return llvm::Error::success();
}

llvm::Error mlir::moe::writeArtifact(const Artifact &artifact, StringRef path) {
  SmallString<128> real;
  llvm::StringSet<> names;
  if (llvm::Error error = findPlace(path, real))
    return error;
  if (fs::exists(path))
    if (llvm::Error error = verifyReplaceable(path, path, names))
      return error;
  // A sibling, so that the rename stays within one file system.
  SmallString<128> staged;
  fs::createUniquePath(path + ".staging-%%%%%%%%", staged, false);
  if (std::error_code code = fs::create_directory(
          staged, /*IgnoreExisting=*/false, fs::perms::all_all))
    return failedTo("create a folder beside '" + path + "'", code);
  names.clear();
  llvm::scope_exit cleanup([&] { removeFiles(staged, names); });

  std::map<std::string, std::string> files = artifact.files;
  std::string manifest = writeManifest(artifact);
  // In the form that `sha256sum --check` reads.
  files[kDigest.str()] = (sha256(manifest) + "  " + kManifest + "\n").str();
  files[kManifest.str()] = std::move(manifest);
  if (llvm::Error error = writeFiles(files, staged, names))
    return error;
  for (const auto &[name, stored] : artifact.storedFiles) {
    SmallString<128> file(staged);
    llvm::sys::path::append(file, name);
    names.insert(name);
    if (std::error_code code = fs::rename(stored.path, file))
      return failedTo("move '" + stored.path + "' into the artifact", code);
  }
  return exchange(staged, path, names);
}
