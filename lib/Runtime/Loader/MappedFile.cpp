//===- MappedFile.cpp - Files in the page cache ---------------------------===//

#include "MappedFile.h"

#include "MoE/Support/Files.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace moe::runtime {

MappedFile::MappedFile(const std::string &path) {
  int file = openRegularFile(path);
  struct stat status = {};
  bool isFile = file >= 0 && fstat(file, &status) == 0;
  size = isFile ? static_cast<size_t>(status.st_size) : 0;
  // There is no mapping of no bytes.
  if (size)
    memory = mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  int code = errno;
  if (file >= 0)
    close(file);
  if (!isFile)
    throw std::runtime_error("expected an artifact folder with '" + path +
                             "', found no such file that can be read");
  if (memory == MAP_FAILED)
    throw std::runtime_error("expected to map '" + path +
                             "' into memory, found " + std::strerror(code));
}

MappedFile::~MappedFile() {
  if (size)
    munmap(memory, size);
}

} // namespace moe::runtime
