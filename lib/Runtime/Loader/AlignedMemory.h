//===- AlignedMemory.h - Memory for tensors of the loader -------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_ALIGNEDMEMORY_H
#define MOE_LIB_RUNTIME_LOADER_ALIGNEDMEMORY_H

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

namespace moe::runtime {

/// Where tensors start in files that the compiler wrote, and in this memory.
constexpr size_t kTensorAlignment = 64;

/// Zeros, on pages that the system gives when they are first touched.
class AlignedMemory {
public:
  AlignedMemory(uint64_t bytes, const std::string &name)
      : memory(std::calloc(bytes + kTensorAlignment, 1), std::free) {
    if (!memory)
      throw std::runtime_error("expected " + std::to_string(bytes) +
                               " bytes of memory for " + name + ", found less");
  }

  void *get() const {
    auto address = reinterpret_cast<uintptr_t>(memory.get());
    return static_cast<char *>(memory.get()) +
           (-address & (kTensorAlignment - 1));
  }

private:
  std::unique_ptr<void, decltype(&std::free)> memory;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_ALIGNEDMEMORY_H
