//===- Npy.h - NumPy's file format ------------------------------*- C++ -*-===//

#ifndef MOE_SUPPORT_NPY_H
#define MOE_SUPPORT_NPY_H

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moe {

struct NpyArray {
  /// "<f4" and so on.
  std::string type;
  std::vector<uint64_t> shape;
  std::vector<uint8_t> data;
};

/// Throw std::runtime_error. `source` is what messages call the bytes.
NpyArray parseNpy(std::string_view bytes, const std::string &source);
NpyArray readNpy(const std::string &path);
void writeNpy(const std::string &path, const NpyArray &array);

} // namespace moe

#endif // MOE_SUPPORT_NPY_H
