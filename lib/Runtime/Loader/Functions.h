//===- Functions.h - The kinds of functions ---------------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_FUNCTIONS_H
#define MOE_LIB_RUNTIME_LOADER_FUNCTIONS_H

#include "Files.h"
#include "ObjectCode.h"

#include "MoE/Runtime/DeviceMemory.h"

#include <concepts>
#include <memory>
#include <set>
#include <stdexcept>

namespace moe::runtime {

/// What the manifest says of a function, for both kinds.
struct Signature {
  explicit Signature(const Json &json);

  /// Throws where the sizes of inputs of the right types do not agree. A size
  /// that depends on data is -1.
  std::vector<std::vector<int64_t>>
  computeResultShapes(std::span<const Tensor> inputs) const;

  /// The types of the arguments, then those of the results.
  std::vector<ValueType> join() const;

  std::string name;
  std::vector<ValueType> arguments, results;
  /// The sizes of each result, as the manifest writes them.
  std::vector<Json::Array> sizes;

private:
  /// What sizes of a call have to fulfil: the code relies on it.
  struct Relation {
    Json found;
    bool isEquality;
    Json expected;
  };

  void readRelations(const Json &list);
  std::string describeSize(const Json &size) const;
  void verifyRelations(std::span<const Tensor> inputs) const;

  std::vector<Relation> relations;
};

/// A function of a manifest, on the CPU or on a device.
template <std::derived_from<Function> Base>
class ManifestFunction : public Base {
public:
  explicit ManifestFunction(const Json &json) : signature(json) {
    this->name = signature.name;
    this->arguments = signature.arguments;
    this->results = signature.results;
  }

protected:
  const Signature &getSignature() const { return signature; }

private:
  std::vector<std::vector<int64_t>>
  computeResultShapes(std::span<const Tensor> inputs) const final {
    return signature.computeResultShapes(inputs);
  }

  Signature signature;
};

/// One function of kind `Kind` for each that the manifest describes.
template <std::derived_from<Function> Kind, typename... Shared>
std::vector<std::unique_ptr<Function>> makeFunctions(const Json &manifest,
                                                     const Shared &...shared) {
  std::vector<std::unique_ptr<Function>> functions;
  std::set<std::string> names;
  for (const Json &function : manifest.at("functions").array()) {
    functions.push_back(std::make_unique<Kind>(function, shared...));
    if (!names.insert(functions.back()->getName()).second)
      throw std::runtime_error("expected each function once in the manifest, "
                               "found '" +
                               functions.back()->getName() + "' again");
  }
  return functions;
}

/// Opens the library of "cuda" or "sim", which lies beside this one. Throws
/// std::runtime_error that says why kernels cannot run there.
GpuDevice &openDevice(const std::string &kind);

/// Functions that can be asked for their types and cannot run.
std::vector<std::unique_ptr<Function>>
makeDescribedFunctions(const Json &manifest);

/// The functions of an object for this CPU.
std::vector<std::unique_ptr<Function>>
makeHostFunctions(const Json &manifest, std::shared_ptr<ObjectCode> code);

/// The functions of an artifact for the CPU. Throws std::runtime_error where it
/// is for another CPU.
std::vector<std::unique_ptr<Function>>
loadHostFunctions(const ArtifactFiles &files);

/// The functions of an artifact for a chip, which run on `device`.
std::vector<std::unique_ptr<Function>>
makeDeviceFunctions(const Json &manifest, const std::string &ptx,
                    GpuDevice &device);

/// A torch program: its function with the weights bound, which point into the
/// file where kernels accept their place.
std::unique_ptr<Function>
makeProgram(const Json &description,
            std::vector<std::unique_ptr<Function>> functions,
            std::unique_ptr<MappedFile> weights);

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_FUNCTIONS_H
