//===- Calls.cpp - Functions of artifacts, called with any memory ---------===//
//
// An input is a call as text: the path of an artifact, the name of a function,
// and a line each argument, `in f32 3x8 normal`, and each result that the
// caller has memory for, `out f32 3x2`; or `draw` and anything, of which lines
// are drawn that mostly fit. Tensors lie before a page that nobody may touch,
// or behind one, so that code without a sanitizer shows where it leaves them,
// too.
//
//===----------------------------------------------------------------------===//

#include "Mutator.h"
#include "Target.h"

#include "MoE/Runtime/Artifact.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>

using namespace moe;
using namespace moe::runtime;
namespace fs = std::filesystem;

namespace {

constexpr uint64_t kMaxBytes = 1 << 16;

/// Bytes between pages without access, at the end of what lies between them or
/// at its beginning.
class GuardedMemory {
public:
  GuardedMemory(uint64_t bytes, bool isAtEnd) : bytes(bytes) {
    auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    uint64_t inside = (bytes / page + 1) * page;
    size = inside + 2 * page;
    pages = static_cast<uint8_t *>(
        mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages == MAP_FAILED ||
        mprotect(pages + page, inside, PROT_READ | PROT_WRITE))
      throw std::runtime_error("expected memory for a tensor, found none");
    data = pages + page + (isAtEnd ? inside - bytes : 0);
  }
  GuardedMemory(const GuardedMemory &) = delete;
  GuardedMemory &operator=(const GuardedMemory &) = delete;
  ~GuardedMemory() { munmap(pages, size); }

  uint8_t *get() const { return data; }
  std::string copy() const {
    return {reinterpret_cast<const char *>(data), bytes};
  }

private:
  uint64_t bytes, size;
  uint8_t *pages, *data;
};

/// A line of a call, and its memory.
struct Value {
  Tensor tensor;
  std::string fill;
  std::unique_ptr<GuardedMemory> memory;
};

std::vector<int64_t> readShape(const std::string &text) {
  std::vector<int64_t> shape;
  std::istringstream sizes(text == "scalar" ? "" : text);
  for (std::string size; std::getline(sizes, size, 'x');) {
    errno = 0;
    char *end = nullptr;
    shape.push_back(std::strtoll(size.c_str(), &end, 10));
    if (size.empty() || *end || errno || shape.size() > 8)
      throw std::runtime_error("expected sizes such as 3x8, found " + text);
  }
  return shape;
}

/// Numbers of a width, of which some are at the edges of what a type holds.
void fillNumbers(uint8_t *to, uint64_t bytes, size_t width,
                 const std::string &dtype, const std::string &fill) {
  fuzz::Random random(std::hash<std::string>{}(dtype + fill) + bytes);
  static const std::vector<int64_t> edges = {
      -1, 3, 8, INT32_MAX, INT32_MIN, int64_t(1) << 32, INT64_MAX, INT64_MIN};
  static const std::vector<float> floats = {0.5F,  -1.25F, 3.0F,
                                            -0.0F, 1e-40F, 1e38F};
  bool isFloat = dtype.starts_with("f") || dtype.starts_with("b");
  for (uint64_t at = 0; at + width <= bytes; at += width) {
    int64_t bits = static_cast<int64_t>(random.below(3));
    if (fill == "extreme" && random.below(2))
      bits = random.pick(edges);
    if (isFloat) {
      float number = random.pick(floats);
      if (fill == "nan" && random.below(2))
        number = random.below(2) ? NAN : INFINITY;
      uint32_t word;
      std::memcpy(&word, &number, sizeof word);
      bits = width == 2 ? word >> 16 : word;
      if (width == 8) {
        double wide = number;
        std::memcpy(&bits, &wide, sizeof bits);
      }
    }
    if (width == 1 && fill != "extreme")
      bits &= 1;
    std::memcpy(to + at, &bits, width);
  }
}

std::string describe(const std::vector<int64_t> &shape, int64_t size) {
  std::string text;
  for (int64_t dim : shape)
    text += (text.empty() ? "" : "x") + std::to_string(dim < 0 ? size : dim);
  return text.empty() ? "scalar" : text;
}

/// Lines for values of these types: one in twenty has another size or type.
std::string drawLines(const char *word, const std::vector<ValueType> &types,
                      int64_t size, fuzz::Random &random) {
  static const std::vector<std::string> dtypes = {"f32", "i64", "i1", "index"},
                                        fills = {"normal", "normal", "nan",
                                                 "extreme", "front"};
  std::string lines;
  for (const ValueType &type : types) {
    std::vector<int64_t> shape = type.shape;
    bool isOther = !random.below(20);
    if (isOther && !shape.empty())
      shape[random.below(shape.size())] = static_cast<int64_t>(random.below(9));
    lines += std::string(word) + " " +
             (isOther && random.below(2) ? random.pick(dtypes) : type.dtype) +
             " " + describe(shape, size) + " " +
             (random.below(40) ? random.pick(fills) : "null") + "\n";
  }
  return lines;
}

std::string drawCall(const Function &function, const std::string &seed) {
  fuzz::Random random(std::hash<std::string>{}(seed));
  static const std::vector<int64_t> sizes = {0, 1, 2, 3, 7, 16, 33, 100};
  int64_t size = random.pick(sizes);
  std::string lines = drawLines("in", function.getArguments(), size, random);
  if (random.below(2))
    lines += drawLines("out", function.getResults(), size, random);
  return lines;
}

Value readValue(std::istringstream &line) {
  std::string dtype, shape;
  Value value;
  line >> dtype >> shape >> value.fill;
  value.tensor = {dtype, readShape(shape)};
  if (value.fill == "null")
    return value;
  uint64_t bytes = 0, width = 1;
  try {
    bytes = getByteSize(value.tensor);
    width = getElementSize(dtype);
  } catch (const std::runtime_error &) {
    // No size: the call has to refuse it, whatever lies there.
    bytes = 0;
  }
  if (bytes > kMaxBytes)
    throw std::runtime_error("expected tensors of at most 64 KiB");
  value.memory = std::make_unique<GuardedMemory>(bytes, value.fill != "front");
  value.tensor.data = value.memory->get();
  fillNumbers(value.memory->get(), bytes, width, dtype, value.fill);
  return value;
}

/// Loaded once: a state begins anew with each call.
const Artifact &load(const std::string &name) {
  static std::map<std::string, std::unique_ptr<Artifact>> loaded;
  fs::path folder = fuzz::places.artifacts / name;
  if (name.empty() || name.find_first_of("./") != name.npos ||
      !fs::is_directory(folder))
    throw std::runtime_error("expected the name of an artifact");
  std::unique_ptr<Artifact> &artifact = loaded[name];
  if (!artifact)
    artifact = std::make_unique<Artifact>(folder, "cpu");
  return *artifact;
}

std::vector<Tensor> tensorsOf(const std::vector<Value> &values) {
  std::vector<Tensor> tensors;
  tensors.reserve(values.size());
  for (const Value &value : values)
    tensors.push_back(value.tensor);
  return tensors;
}

std::string bytesOf(const Tensor &tensor) {
  return {static_cast<const char *>(tensor.data), getByteSize(tensor)};
}

/// The bytes of all results, in the function's memory or in the caller's.
std::string call(const Function &function, const std::vector<Tensor> &arguments,
                 const std::vector<Value> &results) {
  std::string bytes;
  function.reset();
  if (!results.empty() || function.getResults().empty()) {
    function.run(arguments, tensorsOf(results));
    for (const Value &result : results)
      bytes += bytesOf(result.tensor);
    return bytes;
  }
  std::vector<std::vector<int64_t>> shapes =
      function.getResultShapes(arguments);
  std::vector<Array> made = function.run(arguments);
  for (size_t i = 0; i < made.size(); ++i) {
    if (made[i].tensor.shape != shapes[i])
      fuzz::fail("results of other sizes than were said");
    bytes += bytesOf(made[i].tensor);
  }
  return bytes;
}

/// What `rows` of calls.mlir gives: the rows at the indices, and no others.
void checkRows(const std::vector<Tensor> &arguments, const std::string &rows) {
  constexpr size_t width = 8 * sizeof(float);
  const auto *indices = static_cast<const int64_t *>(arguments[1].data);
  for (int64_t i = 0; i < arguments[1].shape[0]; ++i)
    if (indices[i] < 0 || indices[i] >= arguments[0].shape[0] ||
        std::memcmp(rows.data() + i * width,
                    static_cast<const char *>(arguments[0].data) +
                        indices[i] * width,
                    width) != 0)
      fuzz::fail("a wrong row");
}

void checkCall(const Function &function, std::vector<Value> &arguments,
               const std::vector<Value> &results) {
  std::vector<Tensor> tensors = tensorsOf(arguments);
  std::vector<std::string> before;
  before.reserve(arguments.size());
  for (const Value &argument : arguments)
    before.push_back(argument.memory ? argument.memory->copy() : "");
  std::string bytes = call(function, tensors, results);
  // It was taken: the same values again, from memory of the other kind.
  for (size_t i = 0; i < arguments.size(); ++i) {
    const Value &argument = arguments[i];
    if (function.getArguments()[i].isUpdated)
      std::memcpy(argument.memory->get(), before[i].data(), before[i].size());
    else if (argument.memory && argument.memory->copy() != before[i])
      fuzz::fail("an argument that the function does not update changed");
  }
  if (call(function, tensors, {}) != bytes)
    fuzz::fail("other values in other memory");
  if (function.getName() == "rows")
    checkRows(tensors, bytes);
}

} // namespace

std::vector<std::string> fuzz::makeCallSeeds() {
  std::vector<std::string> seeds;
  for (const auto &folder : fs::directory_iterator(places.artifacts)) {
    if (!fs::exists(folder.path() / "kernel.o"))
      continue; // Of a GPU: its kernels are slow here.
    std::string name = folder.path().filename().string();
    for (const auto &function : load(name).getFunctions()) {
      // So long that most changes are of what is drawn from.
      std::string drawn = name + "\n" + function->getName() + "\ndraw";
      for (int i = 0; i < 40; ++i)
        seeds.push_back((drawn += " " + std::to_string(i)) + "\n");
      for (int64_t size : {0, 3})
        for (std::string fill : {"normal", "extreme", "null"}) {
          std::string seed = name + "\n" + function->getName() + "\n";
          for (const ValueType &type : function->getArguments())
            seed += "in " + type.dtype + " " + describe(type.shape, size) +
                    " " + fill + "\n";
          seeds.push_back(seed);
          for (const ValueType &type : function->getResults())
            seed += "out " + type.dtype + " " + describe(type.shape, size) +
                    " " + fill + "\n";
          seeds.push_back(seed);
        }
    }
  }
  return seeds;
}

void fuzz::runCall(const std::string &input) {
  std::istringstream text(input);
  std::string artifact, name, word;
  std::getline(text, artifact);
  std::getline(text, name);
  const Function &function = load(artifact).getFunction(name);
  if (size_t at = input.find("\ndraw"); at != input.npos)
    text = std::istringstream(drawCall(function, input.substr(at)));
  std::vector<Value> arguments, results;
  for (std::string line; std::getline(text, line);) {
    std::istringstream words(line);
    words >> word;
    if ((word != "in" && word != "out") || arguments.size() > 32 ||
        results.size() > 32)
      throw std::runtime_error("expected in or out, found " + word);
    (word == "in" ? arguments : results).push_back(readValue(words));
  }
  // Threads that wait for each other would take most of the time.
  moe_set_num_threads(1);
  checkCall(function, arguments, results);
}
