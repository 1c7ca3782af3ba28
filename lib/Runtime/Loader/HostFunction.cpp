//===- HostFunction.cpp - Functions of an object for this CPU -------------===//
//
// A packed entry takes one pointer an argument: to the value of a scalar, to
// the memref descriptor of a tensor.
//
//===----------------------------------------------------------------------===//

#include "Functions.h"

#include <stdexcept>

namespace moe::runtime {
namespace {

/// {allocated, aligned, offset, sizes.., strides..}
std::vector<int64_t> describe(const Tensor &tensor) {
  auto address = static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.data));
  std::vector<int64_t> descriptor = {address, address, 0};
  descriptor.insert(descriptor.end(), tensor.shape.begin(), tensor.shape.end());
  size_t rank = tensor.shape.size();
  descriptor.resize(3 + 2 * rank);
  int64_t stride = 1;
  for (size_t dim = rank; dim-- > 0;) {
    descriptor[3 + rank + dim] = stride;
    stride *= tensor.shape[dim];
  }
  return descriptor;
}

class HostFunction final : public ManifestFunction<Function> {
public:
  HostFunction(const Json &json, std::shared_ptr<ObjectCode> object)
      : ManifestFunction(json), code(std::move(object)) {
    const std::string &symbol = json.at("packed_symbol").string();
    entry = reinterpret_cast<Entry>(code->find(symbol));
    if (!entry)
      throw std::runtime_error("kernel.o: expected '" + symbol +
                               "', found no such function; the artifact is "
                               "damaged, compile it again");
  }

private:
  using Entry = void (*)(void **);

  void execute(std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) const override {
    std::vector<std::vector<int64_t>> descriptors;
    std::vector<void *> packed;
    // Pointers into `descriptors` stay valid: the inner vectors do not move.
    descriptors.reserve(inputs.size() + outputs.size());
    auto pack = [&](const Tensor &tensor, const ValueType &type) {
      if (type.isTensor)
        packed.push_back(descriptors.emplace_back(describe(tensor)).data());
      else
        packed.push_back(tensor.data);
    };
    for (size_t i = 0; i < inputs.size(); ++i)
      pack(inputs[i], arguments[i]);
    for (size_t i = 0; i < outputs.size(); ++i)
      pack(outputs[i], results[i]);
    entry(packed.data());
  }

  std::shared_ptr<ObjectCode> code;
  Entry entry;
};

} // namespace

std::vector<std::unique_ptr<Function>>
makeHostFunctions(const Json &manifest, std::shared_ptr<ObjectCode> code) {
  return makeFunctions<HostFunction>(manifest, code);
}

} // namespace moe::runtime
