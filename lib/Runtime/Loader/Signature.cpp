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
  readRelations(json.at("relations"));
}

void Signature::readRelations(const Json &list) {
  for (const Json &relation : list.array()) {
    const Json::Array &parts = relation.array(3);
    const std::string &kind = parts[1].string();
    if (kind != "==" && kind != "<=")
      throw std::runtime_error("expected sizes in the manifest to be == or <= "
                               "others, found '" +
                               kind + "'");
    verifySize(parts[0], arguments);
    verifySize(parts[2], arguments);
    relations.push_back({parts[0], kind == "==", parts[2]});
  }
}

/// "size 0 of argument 1", or for an expression what it is made of.
std::string Signature::describeSize(const Json &size) const {
  std::string sources = describeSources(size, arguments.size());
  bool isOne = size.isArray() && size.array().at(0).string() == "arg";
  return isOne ? sources : "what is computed from " + sources;
}

void Signature::verifyRelations(std::span<const Tensor> inputs) const {
  for (const Relation &relation : relations) {
    std::optional<int64_t> found = evaluateSize(relation.found, inputs);
    std::optional<int64_t> expected = evaluateSize(relation.expected, inputs);
    if (!found || !expected ||
        (relation.isEquality ? *found == *expected : *found <= *expected))
      continue;
    std::string reason = describeSources(relation.expected, arguments.size());
    throw std::runtime_error(
        "'" + name + "': expected " + describeSize(relation.found) + " to be " +
        (relation.isEquality ? "" : "at most ") + std::to_string(*expected) +
        (reason.empty() ? "" : ", by " + reason) + ", found " +
        std::to_string(*found));
  }
}

std::vector<std::vector<int64_t>>
Signature::computeResultShapes(std::span<const Tensor> inputs) const {
  verifyRelations(inputs);
  std::vector<std::vector<int64_t>> shapes;
  for (const Json::Array &ofResult : sizes) {
    std::vector<int64_t> &shape = shapes.emplace_back();
    for (const Json &size : ofResult) {
      std::optional<int64_t> value = evaluateSize(size, inputs);
      if (value)
        getNumElements({&*value, 1}); // Throws for a negative one.
      shape.push_back(value.value_or(-1));
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
