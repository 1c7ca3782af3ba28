//===- Kernels.cpp - From an op's arguments to its kernel -----------------===//

#include "Kernels.h"

#include "MoE/Torch/Kernels.h"

#include <bit>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>

using namespace moe;
using namespace moe::torch_ops;

KernelName &KernelName::number(double value) {
  char digits[17];
  std::snprintf(
      digits, sizeof(digits), "%016llx",
      static_cast<unsigned long long>(std::bit_cast<uint64_t>(value)));
  return add(digits);
}

KernelName &KernelName::tensor(std::string_view dtype,
                               std::vector<int64_t> dims) {
  add(dtype);
  for (int64_t dim : dims)
    text.append("x").append(std::to_string(dim));
  return *this;
}

namespace {
/// All artifacts of the process. They are never unloaded: a call may be
/// running.
struct Registry {
  std::shared_mutex mutex;
  std::vector<std::unique_ptr<runtime::Artifact>> artifacts;
  std::map<std::string, const runtime::Function *, std::less<>> kernels;
};
} // namespace

static Registry &registry() {
  static Registry *instance = new Registry;
  return *instance;
}

void moe::torch_ops::loadKernels(const std::string &folder) {
  auto artifact = std::make_unique<runtime::Artifact>(folder);
  std::unique_lock lock(registry().mutex);
  for (const auto &function : artifact->getFunctions())
    registry().kernels[function->getName()] = function.get();
  registry().artifacts.push_back(std::move(artifact));
}

const runtime::Function &moe::torch_ops::findKernel(const KernelName &name) {
  std::shared_lock lock(registry().mutex);
  auto found = registry().kernels.find(name.str());
  if (found == registry().kernels.end())
    throw std::runtime_error(
        "expected a kernel '" + name.str() + "' in one of the " +
        std::to_string(registry().artifacts.size()) +
        " folders given to moe::torch_ops::loadKernels, found none; write them "
        "with moe_mlir.frontends.aot.package for this model");
  return *found->second;
}
