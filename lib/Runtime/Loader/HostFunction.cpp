//===- HostFunction.cpp - Functions of an object for this CPU -------------===//
//
// A packed entry takes one pointer an argument: to the value of a scalar, to
// the memref descriptor of a tensor.
//
//===----------------------------------------------------------------------===//

#include "Functions.h"

#include "MoE/Runtime/Memory.h"

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
  HostFunction(const Json &json, std::shared_ptr<ObjectCode> object,
               const Json &compiled)
      : ManifestFunction(json), code(std::move(object)) {
    verifyCompiled(json, compiled);
    std::string symbol = "__moe_call_" + name;
    entry = reinterpret_cast<Entry>(code->find(symbol));
    if (!entry)
      refuse("'" + symbol + "', found no such function");
  }

private:
  using Entry = void (*)(void **);

  [[noreturn]] static void refuse(const std::string &expectation) {
    throw std::runtime_error("kernel.o: expected " + expectation +
                             "; the artifact is damaged, compile it again");
  }

  /// Throws unless the manifest says of a function what the object says: the
  /// code reads its arguments as it was compiled to, whatever it is told.
  void verifyCompiled(const Json &json, const Json &compiled) const {
    for (const Json &signature : compiled.array())
      if (signature.at("name").string() == name) {
        if (signature.at("arguments") != json.at("arguments") ||
            signature.at("results") != json.at("results") ||
            signature.at("relations") != json.at("relations"))
          refuse("'" + name +
                 "' to take and give what the manifest says, found other "
                 "types");
        return;
      }
    refuse("a description of '" + name + "', found none");
  }

  void execute(std::span<const Tensor> inputs,
               std::span<const Tensor> outputs) const override {
    std::vector<std::vector<int64_t>> descriptors;
    std::vector<void *> packed;
    // Pointers into `descriptors` stay valid: the inner vectors do not move.
    descriptors.reserve(inputs.size() + outputs.size());
    auto pack = [&](const Tensor &tensor, const ValueType &type) {
      if (tensor.isOnDevice)
        throw std::runtime_error("expected the tensors of '" + name +
                                 "' in the memory of this process, found one "
                                 "on a device");
      if (type.isTensor)
        packed.push_back(descriptors.emplace_back(describe(tensor)).data());
      else
        packed.push_back(tensor.data);
    };
    for (size_t i = 0; i < inputs.size(); ++i)
      pack(inputs[i], arguments[i]);
    for (size_t i = 0; i < outputs.size(); ++i)
      pack(outputs[i], results[i]);
    int64_t status = moe_call(entry, packed.data());
    if (status > 0)
      throw std::runtime_error("expected " + std::to_string(status) +
                               " bytes of memory for '" + name +
                               "', found none free");
    if (status == MoECallError_Index)
      throw std::out_of_range(moe_error());
    if (status < 0)
      throw std::runtime_error(moe_error());
  }

  std::shared_ptr<ObjectCode> code;
  Entry entry;
};

} // namespace

std::vector<std::unique_ptr<Function>>
makeHostFunctions(const Json &manifest, std::shared_ptr<ObjectCode> code) {
  auto *signatures = static_cast<const char *>(code->find("__moe_signatures"));
  Json compiled =
      signatures ? Json::parse(signatures, "kernel.o") : Json(Json::Array());
  return makeFunctions<HostFunction>(manifest, code, compiled);
}

} // namespace moe::runtime
