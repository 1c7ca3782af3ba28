//===- Weights.cpp - Tensors of a safetensors file ------------------------===//

#include "Weights.h"

#include "Json.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace moe::runtime {
namespace {

[[noreturn]] void refuse(const std::string &what) {
  throw std::runtime_error(std::string(kWeightsFile) + ": " + what);
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

struct Span {
  uint64_t begin, end;
  const std::string *name;
};

void verifyApart(std::vector<Span> spans) {
  std::ranges::sort(spans, {}, [](const Span &span) {
    return std::pair(span.begin, span.end);
  });
  for (size_t i = 1; i < spans.size(); ++i)
    if (spans[i].begin < spans[i - 1].end)
      refuse("expected the data of '" + *spans[i].name +
             "' apart from that "
             "of '" +
             *spans[i - 1].name + "', found both at byte " +
             std::to_string(spans[i].begin));
}

} // namespace

std::string_view getWeightsHeader(std::string_view bytes) {
  uint64_t length = 0;
  if (bytes.size() >= 8)
    std::memcpy(&length, bytes.data(), 8);
  if (bytes.size() < 8 || length > bytes.size() - 8)
    refuse("ends within its header");
  return bytes.substr(0, 8 + length);
}

std::map<std::string, Tensor> readWeights(std::string_view bytes) {
  std::string_view head = getWeightsHeader(bytes);
  Json header = Json::parse(head.substr(8), kWeightsFile);
  std::string_view data = bytes.substr(head.size());
  std::map<std::string, Tensor> weights;
  std::vector<Span> spans;
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
    if (begin > end || end > data.size() || end - begin != getByteSize(tensor))
      refuse("expected the data of '" + name + "' within the file");
    tensor.data = const_cast<char *>(data.data() + begin);
    spans.push_back({begin, end, &name});
    weights.emplace(name, std::move(tensor));
  }
  verifyApart(std::move(spans));
  return weights;
}

StoredTensors::StoredTensors(std::unique_ptr<MappedFile> mapped)
    : file(std::move(mapped)), tensors(readWeights(file->getBytes())) {}

const Tensor &StoredTensors::find(const std::string &name) const {
  auto found = tensors.find(name);
  if (found == tensors.end())
    refuse("expected '" + name + "', found no such tensor");
  return found->second;
}

Tensor StoredTensors::findAligned(const std::string &name) {
  find(name);
  Tensor &tensor = tensors[name];
  if (reinterpret_cast<uintptr_t>(tensor.data) % kTensorAlignment != 0) {
    uint64_t bytes = getByteSize(tensor);
    copies.emplace_back(bytes, "weight '" + name + "'");
    std::memcpy(copies.back().get(), tensor.data, bytes);
    tensor.data = copies.back().get();
  }
  return tensor;
}

} // namespace moe::runtime
