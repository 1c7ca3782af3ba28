//===- Artifact.cpp - Artifacts, with digests that fit --------------------===//
//
// An input is the path of a file within one of the compiled artifacts, a line
// end, and what the file holds instead. The digests are made to fit: otherwise
// nothing would come past them.
//
//===----------------------------------------------------------------------===//

#include "Target.h"

#include "Loader/DecoderProgram.h"
#include "Loader/Files.h"
#include "Loader/Functions.h"
#include "Loader/Sha256.h"
#include "Loader/Weights.h"

#include "MoE/Runtime/Decoder.h"

#include <algorithm>
#include <fstream>
#include <stdexcept>

using namespace moe;
using namespace moe::runtime;
namespace fs = std::filesystem;

namespace {

/// What a run may take: sizes follow from the file.
constexpr int64_t kMaxElements = 1 << 16;
constexpr int64_t kMaxBlocks = 256;

void writeFile(const fs::path &path, const std::string &content) {
  std::ofstream(path, std::ios::binary) << content;
}

std::string replace(std::string text, const std::string &before,
                    const std::string &after) {
  size_t at = before.empty() ? text.npos : text.find(before);
  if (at != text.npos)
    text.replace(at, before.size(), after);
  return text;
}

std::string digestOfHeader(const std::string &weights) {
  try {
    return sha256(getWeightsHeader(weights));
  } catch (const std::runtime_error &) {
    return "";
  }
}

/// The manifest with what it says of the file's old content replaced.
std::string replaceDigests(std::string manifest, const std::string &file,
                           const std::string &before,
                           const std::string &after) {
  manifest = replace(std::move(manifest), sha256(before), sha256(after));
  if (file != kWeightsFile)
    return manifest;
  manifest = replace(std::move(manifest), digestOfHeader(before),
                     digestOfHeader(after));
  return replace(std::move(manifest), std::to_string(before.size()),
                 std::to_string(after.size()));
}

/// A copy of the artifact with the changed file; the next call undoes it.
fs::path stage(const fs::path &artifact, const std::string &file,
               const std::string &content) {
  fs::path folder = fuzz::places.scratch / artifact.filename();
  if (!fs::exists(folder))
    fs::copy(artifact, folder, fs::copy_options::recursive);
  std::string manifest = fuzz::readFile(artifact / "manifest.json");
  if (file == "manifest.json")
    manifest = content;
  else
    manifest = replaceDigests(manifest, file, fuzz::readFile(artifact / file),
                              content);
  static std::pair<fs::path, std::string> changed;
  if (!changed.second.empty())
    fs::copy_file(changed.first / changed.second,
                  fuzz::places.scratch / changed.first.filename() /
                      changed.second,
                  fs::copy_options::overwrite_existing);
  changed = {artifact, file};
  writeFile(folder / file, content);
  writeFile(folder / "manifest.json", manifest);
  writeFile(folder / "manifest.json.sha256",
            sha256(manifest) + "  manifest.json\n");
  return folder;
}

/// Runs a function on sizes of 3 where any is taken; wrong ones are refused.
void call(const Function &function) {
  std::vector<Array> arguments;
  std::vector<Tensor> tensors;
  for (const ValueType &type : function.getArguments()) {
    std::vector<int64_t> shape = type.shape;
    std::replace(shape.begin(), shape.end(), int64_t(-1), int64_t(3));
    if (getNumElements(shape) > kMaxElements)
      return;
    arguments.emplace_back(type.dtype, shape);
    tensors.push_back(arguments.back().tensor);
  }
  for (const std::vector<int64_t> &shape : function.getResultShapes(tensors))
    if (getNumElements(shape) > kMaxElements)
      return;
  function.run(tensors);
}

/// Whether kernels end soon: a grid that is too large is slow, not wrong.
bool isSmall(const Json &manifest) {
  for (const Json &function : manifest.at("functions").array()) {
    if (const Json *workspace = function.find("workspace"))
      if (workspace->isInteger() && workspace->integer() > kMaxElements)
        return false;
    for (const Json &kernel : function.at("kernels").array())
      for (const Json &size : kernel.at("grid").array())
        if (size.isInteger() && size.integer() > kMaxBlocks)
          return false;
  }
  return true;
}

void runOnSimulator(const ArtifactFiles &files, bool isCallable) {
  auto functions = makeDeviceFunctions(files.manifest, files.get("kernel.ptx"),
                                       runtime::gpuDevice());
  if (isCallable && isSmall(files.manifest))
    for (const auto &function : functions)
      call(*function);
}

/// A prompt, a step, and a step after a reset.
void decode(const fs::path &folder) {
  Decoder decoder(folder);
  if (decoder.getSequences() > kMaxElements)
    return;
  auto run = [&](int64_t tokens) {
    std::vector<int64_t> ids(decoder.getSequences() * tokens, 1);
    decoder.run(ids);
  };
  run(3);
  run(1);
  decoder.reset();
  run(1);
}

void runOnHost(const fs::path &folder) {
  Artifact loaded(folder, "cpu");
  for (const auto &function : loaded.getFunctions())
    call(*function);
}

} // namespace

std::vector<std::string> fuzz::makeArtifactSeeds() {
  std::vector<std::string> seeds;
  for (const auto &artifact : fs::directory_iterator(places.artifacts))
    for (const auto &file : fs::directory_iterator(artifact.path()))
      if (file.path().extension() != ".sha256" &&
          file.path().extension() != ".h")
        seeds.push_back(artifact.path().filename().string() + "/" +
                        file.path().filename().string() + "\n" +
                        readFile(file.path()));
  return seeds;
}

void fuzz::runArtifact(const std::string &input) {
  size_t lineEnd = input.find('\n');
  if (lineEnd == input.npos)
    throw std::runtime_error("expected a path");
  std::string path = input.substr(0, lineEnd);
  size_t slash = path.find('/');
  fs::path artifact = places.artifacts / path.substr(0, slash);
  std::string file = slash == path.npos ? "" : path.substr(slash + 1);
  if (file.empty() || file.find('/') != file.npos ||
      path.find_first_of(std::string("\0", 1)) != path.npos || path[0] == '.' ||
      !fs::is_regular_file(artifact / file))
    throw std::runtime_error("expected the path of a file of an artifact");
  fs::path folder = stage(artifact, file, input.substr(lineEnd + 1));
  // Threads that wait for each other would take most of the time.
  moe_set_num_threads(1);
  Artifact described(folder, "none");
  ArtifactFiles files = readArtifact(folder);
  // Changed code is linked, and not run: it may do anything.
  if (files.contents.contains("kernel.ptx"))
    runOnSimulator(files, file != "kernel.ptx");
  else if (file == "kernel.o")
    makeHostFunctions(files.manifest,
                      std::make_shared<ObjectCode>(files.get("kernel.o")));
  else if (files.contents.contains(kDecoderFile))
    decode(folder);
  else
    runOnHost(folder);
}
