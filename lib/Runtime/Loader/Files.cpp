//===- Files.cpp - The files of an artifact -------------------------------===//

#include "Files.h"
#include "Sha256.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace moe::runtime {
namespace {

constexpr const char *kFormat = "moe-mlir-artifact";
constexpr int64_t kFormatVersion = 1;

std::string readFile(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw std::runtime_error("expected an artifact folder with '" + path +
                             "', found no such file that can be read");
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void verifyFormat(const Json &manifest, const std::string &path) {
  const Json *format = manifest.find("format");
  if (!format || !format->isString() || format->string() != kFormat)
    throw std::runtime_error("expected " + path +
                             " to be a manifest of moe-compile, found another "
                             "file");
  int64_t version = manifest.at("format_version").integer();
  if (version != kFormatVersion)
    throw std::runtime_error("expected artifact format " +
                             std::to_string(kFormatVersion) + " in " + path +
                             ", found " + std::to_string(version) +
                             "; compile again with this version");
}

void verifyDigest(const std::string &content, const std::string &path,
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
  verifyDigest(text, path, readFile(path + ".sha256").substr(0, 64));
}

std::string readVerified(const std::string &folder, const std::string &name,
                         const Json &expected) {
  if (name.empty() || name.find('/') != name.npos || name[0] == '.' ||
      name.find('\0') != name.npos)
    throw std::runtime_error(
        "expected plain file names in the manifest, found '" + name + "'");
  std::string path = folder + "/" + name, content = readFile(path);
  verifyDigest(content, path, expected.at("sha256").string());
  return content;
}

std::string toElementType(const std::string &safetensors) {
  static const std::map<std::string, std::string> names = {
      {"BOOL", "i1"}, {"I8", "i8"},   {"I16", "i16"},
      {"I32", "i32"}, {"I64", "i64"}, {"BF16", "bf16"},
      {"F16", "f16"}, {"F32", "f32"}, {"F64", "f64"}};
  auto found = names.find(safetensors);
  if (found == names.end())
    throw std::runtime_error(
        "expected weights of a known element type, found " + safetensors);
  return found->second;
}

} // namespace

const std::string &ArtifactFiles::get(const std::string &name) const {
  auto found = contents.find(name);
  if (found == contents.end())
    throw std::runtime_error("expected '" + name + "' in the artifact " +
                             folder + ", found none; compile it again");
  return found->second;
}

ArtifactFiles readArtifact(const std::string &folder) {
  ArtifactFiles files;
  files.folder = folder;
  std::string path = folder + "/manifest.json";
  std::string text = readFile(path);
  files.manifest = Json::parse(text, path);
  // First, so that another version is named and not called damaged.
  verifyFormat(files.manifest, path);
  verifyManifest(text, path);
  for (const auto &[name, expected] : files.manifest.at("files").object())
    files.contents[name] = readVerified(folder, name, expected);
  return files;
}

std::map<std::string, Tensor> readWeights(std::string &bytes) {
  static const std::string source = "weights.safetensors";
  uint64_t length = 0;
  if (bytes.size() >= 8)
    std::memcpy(&length, bytes.data(), 8);
  if (bytes.size() < 8 || length > bytes.size() - 8)
    throw std::runtime_error(source + ": ends within its header");
  Json header = Json::parse(std::string_view(bytes).substr(8, length), source);
  uint64_t start = 8 + length, available = bytes.size() - start;
  std::map<std::string, Tensor> weights;
  for (const auto &[name, description] : header.object()) {
    if (name == "__metadata__")
      continue;
    Tensor tensor;
    tensor.dtype = toElementType(description.at("dtype").string());
    for (const Json &size : description.at("shape").array())
      tensor.shape.push_back(size.integer());
    const Json::Array &offsets = description.at("data_offsets").array(2);
    auto begin = static_cast<uint64_t>(offsets[0].integer());
    auto end = static_cast<uint64_t>(offsets[1].integer());
    if (begin > end || end > available || end - begin != getByteSize(tensor))
      throw std::runtime_error(source + ": expected the data of '" + name +
                               "' within the file");
    tensor.data = bytes.data() + start + begin;
    weights.emplace(name, std::move(tensor));
  }
  return weights;
}

} // namespace moe::runtime
