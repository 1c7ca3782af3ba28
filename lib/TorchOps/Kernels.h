//===- Kernels.h - From an op's arguments to its kernel ---------*- C++ -*-===//

#ifndef MOE_LIB_TORCHOPS_KERNELS_H
#define MOE_LIB_TORCHOPS_KERNELS_H

#include "MoE/Runtime/Artifact.h"

#include <string>
#include <string_view>
#include <vector>

namespace moe::torch_ops {

/// The name of one specialisation of an op: attributes, then operands and
/// results with their element types and static dims. `moe_mlir.frontends.aot`
/// forms the same names from the same parts (`kernel_name`).
class KernelName {
public:
  explicit KernelName(std::string_view op) : text(op) {}

  KernelName &choice(std::string_view value) { return add(value); }
  KernelName &flag(bool value) { return add(value ? "true" : "false"); }
  KernelName &integer(int64_t value) { return add(std::to_string(value)); }
  /// By its bits: a decimal would round.
  KernelName &number(double value);
  KernelName &tensor(std::string_view dtype, std::vector<int64_t> dims);

  const std::string &str() const { return text; }

private:
  KernelName &add(std::string_view part) {
    text.append("_").append(part);
    return *this;
  }

  std::string text;
};

/// The loaded kernel of that name. Throws std::runtime_error that says how to
/// make it where there is none.
const runtime::Function &findKernel(const KernelName &name);

} // namespace moe::torch_ops

#endif // MOE_LIB_TORCHOPS_KERNELS_H
