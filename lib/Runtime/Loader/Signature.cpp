//===- Signature.cpp - Types and sizes of a manifest's functions ----------===//

#include "Functions.h"
#include "Sizes.h"

#include <stdexcept>

namespace moe::runtime {

/// More than any function of ours has.
static constexpr size_t kMaxRank = 32;

static ValueType readType(const Json &json) {
  ValueType type;
  type.dtype = json.at("dtype").string();
  getElementSize(type.dtype); // Throws for an unknown one.
  if (const Json *shape = json.find("shape")) {
    type.isTensor = true;
    for (const Json &size : shape->array())
      type.shape.push_back(size.integer());
  }
  type.isUpdated = json.find("updated") != nullptr;
  bool isShape = type.shape.size() <= kMaxRank;
  for (int64_t size : type.shape)
    isShape &= size >= -1;
  if (!isShape)
    throw std::runtime_error("expected sizes of at least 0, or -1 where any is "
                             "taken, in at most " +
                             std::to_string(kMaxRank) +
                             " dimensions in the manifest, found other ones");
  return type;
}

std::vector<ValueType> Signature::join() const {
  std::vector<ValueType> values = arguments;
  values.insert(values.end(), results.begin(), results.end());
  return values;
}

Signature::Signature(const Json &json) : name(json.at("name").string()) {
  for (const Json &argument : json.at("arguments").array())
    arguments.push_back(readType(argument));
  for (const Json &result : json.at("results").array()) {
    results.push_back(readType(result));
    const Json *ofResult = result.find("sizes");
    sizes.push_back(ofResult ? ofResult->array() : Json::Array());
  }
  std::vector<ValueType> values = join();
  for (size_t i = 0; i < results.size(); ++i) {
    if (sizes[i].size() != results[i].shape.size())
      throw std::runtime_error(
          "expected a size for each dimension of " + results[i].toString() +
          " in the manifest, found " + std::to_string(sizes[i].size()));
    for (const Json &size : sizes[i])
      verifySize(size, values);
  }
}

std::vector<std::vector<int64_t>>
Signature::computeResultShapes(std::span<const Tensor> inputs) const {
  std::vector<std::vector<int64_t>> shapes;
  for (const Json::Array &ofResult : sizes) {
    std::vector<int64_t> &shape = shapes.emplace_back();
    for (const Json &size : ofResult) {
      std::optional<int64_t> value = evaluateSize(size, inputs);
      if (!value)
        throw std::runtime_error(
            "expected the caller's memory for the results of '" + name +
            "', because the size of result " +
            std::to_string(shapes.size() - 1) + " depends on data");
      shape.push_back(*value);
    }
  }
  return shapes;
}

namespace {
class DescribedFunction final : public ManifestFunction<Function> {
public:
  using ManifestFunction::ManifestFunction;

private:
  void execute(std::span<const Tensor>,
               std::span<const Tensor>) const override {
    throw std::runtime_error("expected an artifact that was loaded for a "
                             "device to run '" +
                             name + "', found one loaded for \"none\"");
  }
};
} // namespace

std::vector<std::unique_ptr<Function>>
makeDescribedFunctions(const Json &manifest) {
  return makeFunctions<DescribedFunction>(manifest);
}

} // namespace moe::runtime
