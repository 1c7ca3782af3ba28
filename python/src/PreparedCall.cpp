//===- PreparedCall.cpp - A call of which only addresses are missing ------===//

#include "PreparedCall.h"

#include <algorithm>
#include <array>
#include <cstdlib>

using namespace moe;

//===----------------------------------------------------------------------===//
// Results
//===----------------------------------------------------------------------===//

namespace {
/// A result: what torch gets to know of it and, behind, its elements. One block
/// is less work than a tensor of torch's allocator, and its view for us. Sizes
/// and strides lie in between.
struct Block {
  dlpack::ManagedTensor managed;

  static dlpack::ManagedTensor *make(const std::vector<int64_t> &shape,
                                     dlpack::DataType type);
};
} // namespace

/// What torch's own tensors are aligned to.
static constexpr size_t kAlignment = 64;

dlpack::ManagedTensor *Block::make(const std::vector<int64_t> &shape,
                                   dlpack::DataType type) {
  int64_t elements = 1, rank = shape.size();
  for (int64_t size : shape)
    elements *= size;
  size_t bytes = elements * ((type.bits + 7) / 8);
  size_t head = sizeof(Block) + 2 * rank * sizeof(int64_t);
  void *memory = std::malloc(head + kAlignment + bytes);
  if (!memory)
    return nullptr;
  auto *block = static_cast<Block *>(memory);
  auto *sizes = reinterpret_cast<int64_t *>(block + 1);
  int64_t *strides = sizes + rank;
  auto end = reinterpret_cast<uintptr_t>(strides + rank);
  void *data = reinterpret_cast<void *>((end + kAlignment - 1) & -kAlignment);
  for (int64_t i = rank, stride = 1; i-- > 0; stride *= shape[i]) {
    sizes[i] = shape[i];
    strides[i] = stride;
  }
  block->managed = {1,
                    0,
                    /*context=*/nullptr,
                    [](dlpack::ManagedTensor *self) { std::free(self); },
                    /*flags=*/0,
                    {data, dlpack::CPU, /*deviceId=*/0,
                     static_cast<int32_t>(rank), type, sizes, strides,
                     /*byteOffset=*/0}};
  return &block->managed;
}

bool PreparedCall::allocate(
    std::span<dlpack::ManagedTensor *> allocated) const {
  for (size_t i = 0; i < results.size(); ++i) {
    allocated[i] = Block::make(results[i].shape, results[i].type);
    if (allocated[i])
      continue;
    while (i-- > 0)
      allocated[i]->deleter(allocated[i]);
    PyErr_NoMemory();
    return false;
  }
  return true;
}

//===----------------------------------------------------------------------===//
// PreparedCall
//===----------------------------------------------------------------------===//

void PreparedCall::setFunction(const Function &function) {
  code = function.getCode();
  entry = function.getEntry();
}

size_t PreparedCall::addDescriptor(const int64_t *shape, int64_t rank) {
  size_t header = descriptors.size();
  descriptors.resize(header + descriptorWords(rank));
  writeDescriptor(nullptr, shape, rank, &descriptors[header]);
  return header;
}

void PreparedCall::addOperand(const dlpack::Tensor &tensor) {
  operands.push_back(addDescriptor(tensor.shape, tensor.rank));
}

void PreparedCall::addResult(dlpack::DataType type, std::vector<int64_t> shape,
                             bool passed) {
  std::optional<size_t> header;
  if (passed)
    header = addDescriptor(shape.data(), shape.size());
  results.push_back({header, type, std::move(shape)});
}

static void setAddress(int64_t *header, void *data) {
  *reinterpret_cast<MoETensorHeader *>(header) = {data, data, 0};
}

/// The sizes of a descriptor; strides follow them.
static int64_t *sizesOf(int64_t *header) {
  static_assert(sizeof(MoETensorHeader) % sizeof(int64_t) == 0);
  return header + sizeof(MoETensorHeader) / sizeof(int64_t);
}

bool PreparedCall::run(std::span<void *const> addresses,
                       std::span<dlpack::ManagedTensor *> allocated,
                       std::span<const Size> sizes) const {
  if (!allocate(allocated))
    return false;
  // Descriptors of this call, since others may run at the same time; behind
  // them what points to them.
  std::array<int64_t, 256> stack;
  std::vector<int64_t> heap;
  size_t size = descriptors.size() + operands.size() + results.size();
  if (size > stack.size())
    heap.resize(size);
  int64_t *words = size > stack.size() ? heap.data() : stack.data();
  std::copy(descriptors.begin(), descriptors.end(), words);
  void **values = reinterpret_cast<void **>(words + descriptors.size());
  void **next = values;
  for (size_t i = 0; i < operands.size(); ++i) {
    setAddress(words + operands[i], addresses[i]);
    *next++ = words + operands[i];
  }
  for (const Size &size : sizes)
    *sizesOf(words + operands[size.operand]) = size.size;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].header)
      continue;
    setAddress(words + *results[i].header, firstElement(allocated[i]->tensor));
    *next++ = words + *results[i].header;
  }
  int64_t status;
  Py_BEGIN_ALLOW_THREADS;
  status = moe_call(entry, values);
  Py_END_ALLOW_THREADS;
  if (!status)
    return true;
  for (dlpack::ManagedTensor *result : allocated.first(results.size()))
    result->deleter(result);
  raiseCallError(status);
  return false;
}
