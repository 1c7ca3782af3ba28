//===- ObjectCode.h - Relocatable objects in memory -------------*- C++ -*-===//
//
// Puts the object file of an artifact into memory and binds it to this process,
// so that running an artifact needs neither a linker nor LLVM.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_RUNTIME_LOADER_OBJECTCODE_H
#define MOE_LIB_RUNTIME_LOADER_OBJECTCODE_H

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

namespace moe::runtime {

class ObjectCode {
public:
  /// Loads an ELF object for x86-64. Throws std::runtime_error on a file that
  /// is damaged, of another kind, or needs functions that this process lacks.
  explicit ObjectCode(std::string_view bytes);
  ObjectCode(const ObjectCode &) = delete;
  ObjectCode &operator=(const ObjectCode &) = delete;
  ~ObjectCode();

  /// The address of a global symbol, or null.
  void *find(std::string_view name) const;

private:
  void *memory = nullptr;
  size_t size = 0;
  std::map<std::string, void *, std::less<>> symbols;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_OBJECTCODE_H
