//===- Operands.cpp - What compiled code asks of its operands -------------===//

#include "Operands.h"

#include "Arrays.h"
#include "Tensors.h"
#include <algorithm>
#include <cstring>

namespace nb = nanobind;
using namespace moe;

//===----------------------------------------------------------------------===//
// Conditions
//===----------------------------------------------------------------------===//

OperandCondition OperandCondition::exactly(const dlpack::Tensor &tensor) {
  return {tensor.type,
          {tensor.shape, tensor.shape + tensor.rank},
          /*isContiguous=*/true};
}

std::string_view OperandCondition::unmet(const dlpack::Tensor &tensor) const {
  if (std::memcmp(&tensor.type, &type, sizeof(type)))
    return "dtype";
  if (tensor.rank != static_cast<int64_t>(shape.size()))
    return "rank";
  for (int32_t i = 0; i < tensor.rank; ++i)
    if (shape[i] >= 0 && shape[i] != tensor.shape[i])
      return "shape";
  return isContiguous && !isRowMajor(tensor) ? "strides" : "";
}

/// False for what is no tensor, or has no memory that code can read. Never
/// leaves an exception.
static bool borrow(nb::handle object, dlpack::Tensor &tensor) {
  const dlpack::ExchangeAPI *api = exchangeAPI(Py_TYPE(object.ptr()));
  if (api && !api->borrow(object.ptr(), &tensor))
    return true;
  PyErr_Clear();
  return false;
}

void OperandConditions::add(nb::handle sample, std::vector<int64_t> shape,
                            bool isContiguous) {
  dlpack::Tensor tensor;
  if (!borrow(sample, tensor))
    throw nb::type_error("expected a tensor on the CPU for a sample");
  conditions.push_back({tensor.type, std::move(shape), isContiguous});
}

std::optional<std::pair<size_t, std::string_view>>
OperandConditions::firstUnmet(nb::list operands,
                              const std::vector<size_t> &positions) const {
  if (operands.size() != conditions.size())
    throw nb::value_error("expected an operand for each condition");
  for (size_t position : positions) {
    dlpack::Tensor tensor;
    std::string_view unmet = borrow(operands[position], tensor)
                                 ? conditions.at(position).unmet(tensor)
                                 : "memory";
    if (!unmet.empty())
      return std::pair(position, unmet);
  }
  return std::nullopt;
}

//===----------------------------------------------------------------------===//
// Memory
//===----------------------------------------------------------------------===//

std::optional<std::pair<size_t, size_t>>
moe::findAliasing(std::vector<MemorySpan> spans,
                  const std::vector<bool> &isUpdated) {
  std::ranges::sort(spans, {}, &MemorySpan::begin);
  // Of the spans so far the one that reaches furthest: whatever overlaps any of
  // them overlaps this one.
  const MemorySpan *last = nullptr;
  for (const MemorySpan &span : spans) {
    if (last && span.begin < last->end) {
      if (isUpdated[span.position])
        return std::pair(span.position, last->position);
      if (isUpdated[last->position])
        return std::pair(last->position, span.position);
    }
    if (!last || span.end > last->end)
      last = &span;
  }
  return std::nullopt;
}

bool UpdatedMemory::isDisjoint(std::span<void *const> addresses) {
  bool stays = layout.size() == addresses.size();
  for (size_t i = 0; stays && i < addresses.size(); ++i)
    stays = operands[i].moves || layout[i] == addresses[i];
  if (!stays && !findLayout(addresses))
    return false;
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (!operands[i].moves || !operands[i].bytes)
      continue;
    auto begin = reinterpret_cast<uintptr_t>(addresses[i]);
    // The only one that may overlap is the first that ends behind its begin.
    auto next = std::ranges::upper_bound(updated, begin, {}, &MemorySpan::end);
    if (next != updated.end() && next->begin < begin + operands[i].bytes)
      return false;
  }
  return true;
}

bool UpdatedMemory::findLayout(std::span<void *const> addresses) {
  layout.clear();
  updated.clear();
  std::vector<MemorySpan> spans;
  std::vector<bool> isUpdated;
  for (size_t i = 0; i < addresses.size(); ++i) {
    isUpdated.push_back(operands[i].isUpdated);
    if (operands[i].moves || !operands[i].bytes)
      continue;
    auto begin = reinterpret_cast<uintptr_t>(addresses[i]);
    spans.push_back({begin, begin + operands[i].bytes, i});
    if (operands[i].isUpdated)
      updated.push_back(spans.back());
  }
  if (findAliasing(std::move(spans), isUpdated))
    return false;
  std::ranges::sort(updated, {}, &MemorySpan::begin);
  layout.assign(addresses.begin(), addresses.end());
  return true;
}

/// The memory of a tensor with elements; strides of arrays may be negative.
static std::optional<MemorySpan> spanOf(const dlpack::Tensor &tensor,
                                        size_t position) {
  int64_t size = (tensor.type.bits + 7) / 8, below = 0, above = size;
  int64_t stride = size;
  for (int32_t i = tensor.rank; i-- > 0;) {
    if (!tensor.shape[i])
      return std::nullopt;
    int64_t step = tensor.strides ? tensor.strides[i] * size : stride;
    int64_t reach = (tensor.shape[i] - 1) * step;
    (reach < 0 ? below : above) += reach;
    stride *= tensor.shape[i];
  }
  auto first = reinterpret_cast<uintptr_t>(firstElement(tensor));
  return MemorySpan{first + below, first + above, position};
}

std::optional<std::pair<size_t, size_t>>
moe::aliasingPair(nb::handle operands, const std::vector<size_t> &updated) {
  std::vector<MemorySpan> spans;
  size_t position = 0;
  for (nb::handle operand : operands) {
    dlpack::Tensor tensor;
    nb::ndarray<nb::ro> array;
    if (!borrow(operand, tensor)) {
      if (!nb::try_cast(operand, array))
        throw nb::type_error("expected tensors or arrays");
      tensor = viewOf(array);
    }
    if (std::optional<MemorySpan> span = spanOf(tensor, position++))
      spans.push_back(*span);
  }
  std::vector<bool> isUpdated(position);
  for (size_t i : updated)
    isUpdated.at(i) = true;
  return findAliasing(std::move(spans), isUpdated);
}
