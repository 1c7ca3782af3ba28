//===- MappedFile.h - Files in the page cache -------------------*- C++ -*-===//

#ifndef MOE_LIB_RUNTIME_LOADER_MAPPEDFILE_H
#define MOE_LIB_RUNTIME_LOADER_MAPPEDFILE_H

#include <cstddef>
#include <string>
#include <string_view>

namespace moe::runtime {

/// The bytes of a file, read-only and on the pages of the system's cache, which
/// all processes share that map the file. Nothing is read before it is used.
class MappedFile {
public:
  /// Throws std::runtime_error where there is no such file.
  explicit MappedFile(const std::string &path);
  MappedFile(const MappedFile &) = delete;
  MappedFile &operator=(const MappedFile &) = delete;
  ~MappedFile();

  std::string_view getBytes() const {
    return {static_cast<const char *>(memory), size};
  }

private:
  void *memory = nullptr;
  size_t size = 0;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_MAPPEDFILE_H
