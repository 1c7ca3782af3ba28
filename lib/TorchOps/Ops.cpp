//===- Ops.cpp - The routing ops behind torch's dispatcher ----------------===//
//
// Registered on torch's stable ABI: one binary serves every torch from 2.11 on.
// The schemas are those of python/moe_mlir/ops; what differs is where kernels
// come from, artifacts instead of the compiler. Every op here works token by
// token: leading dims are joined in front of the kernel and restored behind it.
//
//===----------------------------------------------------------------------===//

#include "Kernels.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using namespace moe;
using namespace moe::torch_ops;
using ::torch::headeronly::ScalarType;
using ::torch::stable::Tensor;

//===----------------------------------------------------------------------===//
// Tensors as the runtime sees them
//===----------------------------------------------------------------------===//

static std::string_view dtypeName(ScalarType type) {
  switch (type) {
  case ScalarType::Bool:
    return "i1";
  case ScalarType::Int:
    return "i32";
  case ScalarType::Long:
    return "i64";
  case ScalarType::Half:
    return "f16";
  case ScalarType::BFloat16:
    return "bf16";
  case ScalarType::Float:
    return "f32";
  default:
    throw std::runtime_error(
        "expected a tensor of bool, int32, int64, "
        "float16, bfloat16 or float32, found another dtype");
  }
}

static std::vector<int64_t> leadingDims(const Tensor &tensor, int64_t kept) {
  if (tensor.dim() < kept)
    throw std::runtime_error("expected a tensor with " + std::to_string(kept) +
                             " dims or more, found " +
                             std::to_string(tensor.dim()));
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < tensor.dim() - kept; ++i)
    dims.push_back(tensor.size(i));
  return dims;
}

static std::string toText(const std::vector<int64_t> &dims) {
  std::string text;
  for (int64_t dim : dims)
    text += (text.empty() ? "" : ", ") + std::to_string(dim);
  return "[" + text + "]";
}

namespace {
/// One call of a kernel: its name and its operands grow together.
class Call {
public:
  explicit Call(std::string_view op) : name(op) {}

  /// An operand whose leading dims are joined into one that is not static.
  void addRows(const Tensor &tensor, int64_t kept) {
    int64_t rows = 1;
    for (int64_t dim : leadingDims(tensor, kept))
      rows *= dim;
    add(tensor, {rows}, kept);
  }
  /// An operand that has a row for each of `like`, and is called `argument`.
  void addRowsOf(const Tensor &like, int64_t keptOfLike, const Tensor &tensor,
                 int64_t kept, const char *argument) {
    std::vector<int64_t> expected = leadingDims(like, keptOfLike);
    if (leadingDims(tensor, kept) != expected)
      throw std::runtime_error(std::string("expected ") + argument +
                               " to have the leading dims " + toText(expected) +
                               " of scores, found " +
                               toText(leadingDims(tensor, kept)));
    addRows(tensor, kept);
  }
  /// An operand whose dims are all static.
  void addWhole(const Tensor &tensor) { add(tensor, {}, tensor.dim()); }

  /// A result [leading.., width].
  Tensor addResult(const Tensor &like, const std::vector<int64_t> &leading,
                   int64_t width, ScalarType type) {
    std::vector<int64_t> shape = leading;
    shape.push_back(width);
    Tensor result = ::torch::stable::new_empty(like, shape, type);
    name.tensor(dtypeName(type), {width});
    int64_t rows = 1;
    for (int64_t dim : leading)
      rows *= dim;
    results.push_back({std::string(dtypeName(type)),
                       {rows, width},
                       result.mutable_data_ptr()});
    return result;
  }

  void run() const { findKernel(name).run(operands, results); }

  KernelName name;

private:
  void add(const Tensor &tensor, std::vector<int64_t> shape, int64_t kept) {
    std::vector<int64_t> dims;
    for (int64_t i = tensor.dim() - kept; i < tensor.dim(); ++i)
      dims.push_back(tensor.size(i));
    shape.insert(shape.end(), dims.begin(), dims.end());
    std::string_view dtype = dtypeName(tensor.scalar_type());
    name.tensor(dtype, dims);
    owned.push_back(::torch::stable::contiguous(tensor));
    // Kernels do not write operands.
    operands.push_back({std::string(dtype), std::move(shape),
                        const_cast<void *>(owned.back().const_data_ptr())});
  }

  std::vector<Tensor> owned;
  std::vector<runtime::Tensor> operands, results;
};
} // namespace

//===----------------------------------------------------------------------===//
// The ops
//===----------------------------------------------------------------------===//

static std::tuple<Tensor, Tensor> topkRenorm(const Tensor &scores, int64_t k,
                                             const std::string &kind,
                                             bool renorm, double routeScale,
                                             const std::optional<Tensor> &mask,
                                             ScalarType indexType) {
  Call call("topk_renorm");
  call.name.choice(kind).flag(renorm).number(routeScale);
  call.addRows(scores, 1);
  if (mask)
    call.addRowsOf(scores, 1, *mask, 0, "mask");
  std::vector<int64_t> leading = leadingDims(scores, 1);
  Tensor gates = call.addResult(scores, leading, k, ScalarType::Float);
  Tensor indices = call.addResult(scores, leading, k, indexType);
  call.run();
  return {gates, indices};
}

static std::tuple<Tensor, Tensor> groupedTopk(
    const Tensor &scores, int64_t k, const std::optional<Tensor> &bias,
    const std::optional<Tensor> &forced, const std::optional<Tensor> &mask,
    const std::optional<Tensor> &numValid, const std::string &score,
    int64_t numGroups, int64_t keptGroups, const std::string &groupScore,
    bool renorm, double eps, double routeScale, ScalarType indexType) {
  Call call("topk_renorm");
  call.name.choice(score == "none" ? "probs" : "logits").choice(score);
  call.name.integer(numGroups).integer(keptGroups);
  call.name.choice(groupScore == "top2" ? "top2_sum" : groupScore);
  call.name.flag(renorm).number(eps).number(routeScale);
  call.addRows(scores, 1);
  if (bias)
    call.addWhole(*bias);
  if (forced)
    call.addRowsOf(scores, 1, *forced, 1, "forced");
  if (mask)
    call.addRowsOf(scores, 1, *mask, 0, "mask");
  if (numValid)
    call.addWhole(*numValid);
  std::vector<int64_t> leading = leadingDims(scores, 1);
  Tensor gates = call.addResult(scores, leading, k, ScalarType::Float);
  Tensor indices = call.addResult(scores, leading, k, indexType);
  call.run();
  return {gates, indices};
}

static Tensor routerLogits(const Tensor &h, const Tensor &weight,
                           const std::optional<Tensor> &bias) {
  Call call("router_logits");
  call.addRows(h, 1);
  call.addWhole(weight);
  if (bias)
    call.addWhole(*bias);
  Tensor z =
      call.addResult(h, leadingDims(h, 1), weight.size(0), ScalarType::Float);
  call.run();
  return z;
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe, library) {
  library.def(
      "topk_renorm(Tensor scores, int k, str kind, bool renorm, float "
      "route_scale, Tensor? mask, ScalarType index_dtype) -> (Tensor gates, "
      "Tensor indices)");
  library.def(
      "grouped_topk(Tensor scores, int k, Tensor? bias, Tensor? forced, "
      "Tensor? mask, Tensor? num_valid, str score, int n_group, int "
      "topk_group, str group_score, bool renorm, float eps, float "
      "route_scale, ScalarType index_dtype) -> (Tensor gates, Tensor indices)");
  library.def("router_logits(Tensor h, Tensor weight, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(moe, CPU, library) {
  library.impl("topk_renorm", TORCH_BOX(&topkRenorm));
  library.impl("grouped_topk", TORCH_BOX(&groupedTopk));
  library.impl("router_logits", TORCH_BOX(&routerLogits));
}
