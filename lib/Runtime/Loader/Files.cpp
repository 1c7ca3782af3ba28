//===- Files.cpp - The files of an artifact -------------------------------===//

#include "Files.h"
#include "Sha256.h"
#include "Weights.h"

#include "MoE/Support/Files.h"

#include <stdexcept>

namespace moe::runtime {
namespace {

constexpr const char *kFormat = "moe-mlir-artifact";
/// Decoders are of the version after that of all other artifacts.
constexpr int64_t kFormatVersion = 2, kDecoderFormatVersion = 3;
/// Weights of up to this size are read and checked whenever they are loaded.
constexpr size_t kMaxVerifiedBytes = 64 << 20;

std::string read(const std::string &path) {
  std::string content;
  if (moe::readFile(path, content))
    throw std::runtime_error("expected an artifact folder with '" + path +
                             "', found no such file that can be read");
  return content;
}

void verifyFormat(const Json &manifest, const std::string &path) {
  const Json *format = manifest.find("format");
  if (!format || !format->isString() || format->string() != kFormat)
    throw std::runtime_error("expected " + path +
                             " to be a manifest of moe-compile, found another "
                             "file");
  int64_t version = manifest.at("format_version").integer();
  if (version != kFormatVersion && version != kDecoderFormatVersion)
    throw std::runtime_error(
        "expected artifact format " + std::to_string(kFormatVersion) + " or " +
        std::to_string(kDecoderFormatVersion) + " in " + path + ", found " +
        std::to_string(version) + "; compile again with this version");
}

void verifyDigest(std::string_view content, const std::string &path,
                  const std::string &expected) {
  std::string found = sha256(content);
  if (found != expected)
    throw std::runtime_error("expected " + path + " to have SHA-256 " +
                             expected + ", found " + found +
                             "; the artifact is damaged, compile it again");
}

/// The digest of the manifest stands in a file beside it, as sha256sum writes
/// and checks them: sizes and grids that a flipped bit has changed would give
/// wrong results, not errors.
void verifyManifest(const std::string &text, const std::string &path) {
  verifyDigest(text, path, read(path + ".sha256").substr(0, 64));
}

std::string readVerified(const std::string &folder, const std::string &name,
                         const Json &expected) {
  if (name.empty() || name.find('/') != name.npos || name[0] == '.' ||
      name.find('\0') != name.npos)
    throw std::runtime_error(
        "expected plain file names in the manifest, found '" + name + "'");
  std::string path = folder + "/" + name, content = read(path);
  verifyDigest(content, path, expected.at("sha256").string());
  return content;
}

/// Nothing would tell a truncated file from a whole one before it is read.
void verifySize(std::string_view content, const std::string &path,
                int64_t expected) {
  if (content.size() != static_cast<uint64_t>(expected))
    throw std::runtime_error("expected " + path + " to have " +
                             std::to_string(expected) + " bytes, found " +
                             std::to_string(content.size()) +
                             "; the artifact is damaged, compile it again");
}

/// Weights are not read before a kernel needs them: of a large file only what
/// says where they lie, unless all is asked for. Compilers of before have left
/// no digest of that part alone.
std::unique_ptr<MappedFile> mapVerified(const std::string &folder,
                                        const Json &expected,
                                        Verification verification) {
  std::string path = folder + "/" + kWeightsFile;
  auto file = std::make_unique<MappedFile>(path);
  std::string_view bytes = file->getBytes();
  verifySize(bytes, path, expected.at("size").integer());
  const Json *header = expected.find("header_sha256");
  if (verification == Verification::All || !header ||
      bytes.size() <= kMaxVerifiedBytes)
    verifyDigest(bytes, path, expected.at("sha256").string());
  else
    verifyDigest(getWeightsHeader(bytes), "the header of " + path,
                 header->string());
  return file;
}

} // namespace

const std::string &ArtifactFiles::get(const std::string &name) const {
  auto found = contents.find(name);
  if (found == contents.end())
    throw std::runtime_error("expected '" + name + "' in the artifact " +
                             folder + ", found none; compile it again");
  return found->second;
}

ArtifactFiles readArtifact(const std::string &folder,
                           Verification verification) {
  ArtifactFiles files;
  files.folder = folder;
  std::string path = folder + "/manifest.json";
  std::string text = read(path);
  files.manifest = Json::parse(text, path);
  // First, so that another version is named and not called damaged.
  verifyFormat(files.manifest, path);
  verifyManifest(text, path);
  for (const auto &[name, expected] : files.manifest.at("files").object())
    if (name == kWeightsFile)
      files.weights = mapVerified(folder, expected, verification);
    else
      files.contents[name] = readVerified(folder, name, expected);
  return files;
}

} // namespace moe::runtime
