//===- Artifact.cpp - Running compiled artifacts --------------------------===//

#include "MoE/Runtime/Artifact.h"

#include "DecoderProgram.h"
#include "Functions.h"
#include "HostCpu.h"
#include "Weights.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

namespace moe::runtime {

//===----------------------------------------------------------------------===//
// Values
//===----------------------------------------------------------------------===//

size_t getElementSize(const std::string &dtype) {
  if (dtype == "i1" || dtype == "i8")
    return 1;
  if (dtype == "i16" || dtype == "f16" || dtype == "bf16")
    return 2;
  if (dtype == "i32" || dtype == "f32")
    return 4;
  if (dtype == "i64" || dtype == "index" || dtype == "f64")
    return 8;
  throw std::runtime_error("expected i1, i8, i16, i32, i64, index, f16, bf16, "
                           "f32 or f64 as element type, found '" +
                           dtype + "'");
}

int64_t getNumElements(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(count, size, &count))
      throw std::runtime_error("expected sizes whose product is a size, found "
                               "a negative or too large one");
  return count;
}

static std::string toText(std::span<const int64_t> shape) {
  std::string text = "[";
  for (int64_t size : shape)
    text += (text.size() > 1 ? ", " : "") +
            (size < 0 ? std::string("?") : std::to_string(size));
  return text + "]";
}

std::string ValueType::toString() const {
  return isTensor ? dtype + toText(shape) : dtype;
}

uint64_t getByteSize(const Tensor &tensor) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(getNumElements(tensor.shape),
                             static_cast<int64_t>(getElementSize(tensor.dtype)),
                             &bytes))
    throw std::runtime_error("expected a tensor that fits into memory, found " +
                             tensor.dtype + toText(tensor.shape));
  return static_cast<uint64_t>(bytes);
}

Array::Array(std::string dtype, std::vector<int64_t> shape)
    : tensor{std::move(dtype), std::move(shape)} {
  uint64_t bytes = getByteSize(tensor);
  try {
    memory = std::make_unique<uint8_t[]>(bytes);
  } catch (const std::bad_alloc &) {
    throw std::runtime_error("expected " + std::to_string(bytes) +
                             " bytes of memory for " + tensor.dtype +
                             toText(tensor.shape) + ", found less");
  }
  tensor.data = memory.get();
}

//===----------------------------------------------------------------------===//
// Function
//===----------------------------------------------------------------------===//

/// Whether a shape is the expected one, which has -1 where any size is taken.
static bool fits(std::span<const int64_t> shape,
                 std::span<const int64_t> expected) {
  return std::ranges::equal(shape, expected, [](int64_t size, int64_t wanted) {
    return wanted < 0 || size == wanted;
  });
}

static std::string describe(const std::string &function, const char *what,
                            size_t i, std::span<const std::string> names) {
  return std::string(what) + " " + std::to_string(i) +
         (i < names.size() ? " ('" + names[i] + "')" : "") + " of '" +
         function + "'";
}

static void verify(const std::string &function, const char *what,
                   std::span<const Tensor> tensors,
                   std::span<const ValueType> types,
                   std::span<const std::string> names) {
  if (tensors.size() != types.size())
    throw std::runtime_error("expected " + std::to_string(types.size()) + " " +
                             what + "s for '" + function + "', found " +
                             std::to_string(tensors.size()));
  for (size_t i = 0; i < types.size(); ++i) {
    const Tensor &tensor = tensors[i];
    if (tensor.dtype != types[i].dtype || !fits(tensor.shape, types[i].shape))
      throw std::runtime_error(
          "expected " + describe(function, what, i, names) + " to be " +
          types[i].toString() + ", found " + tensor.dtype +
          (types[i].isTensor || !tensor.shape.empty() ? toText(tensor.shape)
                                                      : ""));
    if (getByteSize(tensor) && !tensor.data)
      throw std::runtime_error("expected " +
                               describe(function, what, i, names) +
                               " to have memory, found a null pointer");
  }
}

std::vector<std::vector<int64_t>>
Function::verifyArguments(std::span<const Tensor> given) const {
  verify(name, "argument", given, arguments, names);
  return computeResultShapes(given);
}

static bool overlap(const Tensor &a, const Tensor &b) {
  auto beginOf = [](const Tensor &tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data);
  };
  return beginOf(a) < beginOf(b) + getByteSize(b) &&
         beginOf(b) < beginOf(a) + getByteSize(a);
}

/// Code that writes a result while it reads an argument would take new values
/// for old ones.
static void verifyApart(const std::string &function,
                        std::span<const Tensor> given,
                        std::span<const Tensor> returned,
                        std::span<const std::string> names) {
  for (size_t i = 0; i < returned.size(); ++i) {
    auto require = [&](const Tensor &other, const char *what, size_t position,
                       std::span<const std::string> namesOfOthers) {
      if (getByteSize(returned[i]) && getByteSize(other) &&
          overlap(returned[i], other))
        throw std::runtime_error(
            "expected memory of its own for " +
            describe(function, "result", i, {}) + ", found that of " +
            describe(function, what, position, namesOfOthers));
    };
    for (size_t j = 0; j < given.size(); ++j)
      require(given[j], "argument", j, names);
    for (size_t j = 0; j < i; ++j)
      require(returned[j], "result", j, {});
  }
}

void Function::verifyCall(std::span<const Tensor> given,
                          std::span<const Tensor> returned) const {
  std::vector<std::vector<int64_t>> shapes = verifyArguments(given);
  verify(name, "result", returned, results, {});
  for (size_t i = 0; i < shapes.size(); ++i)
    if (!fits(returned[i].shape, shapes[i]))
      throw std::runtime_error("expected result " + std::to_string(i) +
                               " of '" + name + "' to be " + results[i].dtype +
                               toText(shapes[i]) +
                               " for these arguments, found " +
                               results[i].dtype + toText(returned[i].shape));
  verifyApart(name, given, returned, names);
}

std::vector<std::vector<int64_t>>
Function::getResultShapes(std::span<const Tensor> given) const {
  std::vector<std::vector<int64_t>> shapes = verifyArguments(given);
  for (size_t i = 0; i < shapes.size(); ++i)
    if (std::ranges::count(shapes[i], -1))
      throw std::runtime_error("expected the caller's memory for the results "
                               "of '" +
                               name + "', because the size of result " +
                               std::to_string(i) + " depends on data");
  return shapes;
}

void Function::run(std::span<const Tensor> given,
                   std::span<const Tensor> returned) const {
  verifyCall(given, returned);
  execute(given, returned);
}

std::vector<Array> Function::run(std::span<const Tensor> given) const {
  std::vector<std::vector<int64_t>> shapes = getResultShapes(given);
  std::vector<Array> arrays;
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < shapes.size(); ++i) {
    arrays.emplace_back(results[i].dtype, shapes[i]);
    tensors.push_back(arrays.back().tensor);
  }
  verify(name, "result", tensors, results, {});
  execute(given, tensors);
  return arrays;
}

//===----------------------------------------------------------------------===//
// Artifact
//===----------------------------------------------------------------------===//

struct Artifact::Contents {
  std::string target;
  GpuDevice *device = nullptr;
  std::vector<std::unique_ptr<Function>> functions;
};

static void verifyCpu(const ArtifactFiles &files) {
  const Json &target = files.manifest.at("target");
  std::string missing = findMissingFeatures(target.at("features").string());
  if (!missing.empty())
    throw std::runtime_error(
        "expected " + files.folder +
        " to be compiled for this CPU, found code for " +
        target.at("cpu").string() + ", which has " + missing +
        "; compile it here, or with --cpu=" + recommendCpu());
}

std::vector<std::unique_ptr<Function>>
loadHostFunctions(const ArtifactFiles &files) {
  if (const std::string &target =
          files.manifest.at("target").at("name").string();
      target != "cpu")
    throw std::runtime_error("expected " + files.folder +
                             " to be compiled for the CPU, found target '" +
                             target + "'");
  verifyCpu(files);
  return makeHostFunctions(files.manifest,
                           std::make_shared<ObjectCode>(files.get("kernel.o")));
}

/// PTX runs on its chip and on later ones; that of `sm_90a` on its chip alone.
static void verifyChip(const ArtifactFiles &files, const std::string &target,
                       int32_t chip) {
  char *suffix = nullptr;
  bool isChip = target.rfind("sm_", 0) == 0;
  long needed = isChip ? std::strtol(target.c_str() + 3, &suffix, 10) : 0;
  if (needed <= 0)
    throw std::runtime_error("expected the target of " + files.folder +
                             " to be cpu or a chip such as sm_90, found '" +
                             target + "'; compile it again");
  bool isExact = *suffix != '\0';
  if (chip && (chip < needed || (isExact && chip != needed)))
    throw std::runtime_error(
        "expected a GPU of " + target + (isExact ? "" : " or later") + " for " +
        files.folder + ", found sm_" + std::to_string(chip) +
        "; compile with --target=sm_" + std::to_string(chip));
}

static std::string chooseDevice(const std::string &target,
                                const std::string &wanted) {
  bool isCpu = target == "cpu";
  if (wanted.empty())
    return isCpu ? "cpu" : "cuda";
  if (wanted == "none")
    return wanted;
  if (isCpu ? wanted == "cpu" : wanted == "cuda" || wanted == "sim")
    return wanted;
  throw std::runtime_error(
      std::string("expected device ") + (isCpu ? "cpu" : "cuda or sim") +
      " for an artifact of target " + target + ", found '" + wanted +
      (isCpu ? "'; compile with --target=sm_90 for a GPU"
             : "'; compile with --target=cpu for the CPU"));
}

Artifact::Artifact(const std::string &folder, const std::string &device)
    : Artifact(folder, device, Verification::Quick) {}

Artifact::Artifact(const std::string &folder, const std::string &wanted,
                   Verification verification)
    : contents(std::make_unique<Contents>()) {
  ArtifactFiles files = readArtifact(folder, verification);
  contents->target = files.manifest.at("target").at("name").string();
  std::string device = chooseDevice(contents->target, wanted);
  if (device == "none") {
    contents->functions = makeDescribedFunctions(files.manifest);
  } else if (files.contents.contains(kDecoderFile)) {
    throw std::runtime_error("expected an artifact of functions in " + folder +
                             ", found a decoder; load it with "
                             "moe::runtime::Decoder");
  } else if (device == "cpu") {
    contents->functions = loadHostFunctions(files);
  } else {
    contents->device = &openDevice(device);
    verifyChip(files, contents->target, contents->device->getChip());
    contents->functions = makeDeviceFunctions(
        files.manifest, files.get("kernel.ptx"), *contents->device);
  }
  if (!files.contents.contains("program.json"))
    return;
  Json description = Json::parse(files.get("program.json"), "program.json");
  if (!files.weights)
    throw std::runtime_error("expected '" + std::string(kWeightsFile) +
                             "' in the artifact " + folder +
                             ", found none; compile it again");
  auto program = makeProgram(description, std::move(contents->functions),
                             std::move(files.weights));
  contents->functions.clear();
  contents->functions.push_back(std::move(program));
}

Artifact::~Artifact() = default;

const std::string &Artifact::getTarget() const { return contents->target; }

GpuDevice *Artifact::getDevice() const { return contents->device; }

std::span<const std::unique_ptr<Function>> Artifact::getFunctions() const {
  return contents->functions;
}

const Function &Artifact::getFunction(const std::string &name) const {
  std::string known;
  for (const auto &function : contents->functions) {
    bool isOnly = name.empty() && contents->functions.size() == 1;
    if (isOnly || function->getName() == name)
      return *function;
    known += (known.empty() ? "" : ", ") + function->getName();
  }
  throw std::runtime_error("expected the name of a function among " + known +
                           ", found '" + name + "'");
}

} // namespace moe::runtime
