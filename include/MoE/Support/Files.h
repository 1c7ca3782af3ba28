//===- Files.h - Files that are written whole, and read safely --*- C++ -*-===//
//
// Whoever writes a file of a user's name goes through here: an interruption, a
// full disk or an error leaves what was there before.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_SUPPORT_FILES_H
#define MOE_SUPPORT_FILES_H

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <span>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

namespace moe {
namespace detail {

inline std::error_code lastError() {
  return std::error_code(errno, std::generic_category());
}

inline std::error_code writeAll(int file,
                                std::span<const std::string_view> pieces) {
  for (std::string_view piece : pieces)
    while (!piece.empty()) {
      ssize_t written = ::write(file, piece.data(), piece.size());
      if (written < 0 && errno == EINTR)
        continue;
      if (written < 0)
        return lastError();
      piece.remove_prefix(static_cast<size_t>(written));
    }
  return {};
}

/// Where a link leads, so that the link stays.
inline std::string followLinks(const std::string &path) {
  char *found = ::realpath(path.c_str(), nullptr);
  std::string followed = found ? found : path;
  std::free(found);
  return followed;
}

/// A new file beside `path` with the permissions of `mode`; its name goes to
/// `name`.
inline int createBeside(const std::string &path, mode_t mode,
                        std::string &name) {
  constexpr int kAttempts = 100;
  for (int i = 0, file = -1; i < kAttempts; ++i) {
    name = path + ".partial-" + std::to_string(::getpid()) + "-" +
           std::to_string(i);
    file = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (file >= 0 || errno != EEXIST)
      return file;
  }
  return -1;
}

} // namespace detail

/// Writes a file as a whole or not at all: beside `path`, then by one rename. A
/// device or a pipe, such as /dev/stdout, is written to as it is.
inline std::error_code writeFile(const std::string &path,
                                 std::span<const std::string_view> pieces) {
  struct stat status = {};
  bool exists = ::stat(path.c_str(), &status) == 0;
  if (exists && !S_ISREG(status.st_mode)) {
    int file = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (file < 0)
      return detail::lastError();
    std::error_code code = detail::writeAll(file, pieces);
    ::close(file);
    return code;
  }
  // What its owner has protected is not replaced by way of its folder.
  if (exists && ::access(path.c_str(), W_OK))
    return detail::lastError();
  std::string target = exists ? detail::followLinks(path) : path, staged;
  int file = detail::createBeside(target, 0666, staged);
  if (file < 0)
    return detail::lastError();
  if (exists)
    (void)!::fchmod(file, status.st_mode & 0777);
  std::error_code code = detail::writeAll(file, pieces);
  if (::close(file) && !code)
    code = detail::lastError();
  if (!code && ::rename(staged.c_str(), target.c_str()))
    code = detail::lastError();
  if (code)
    ::unlink(staged.c_str());
  return code;
}

inline std::error_code writeFile(const std::string &path,
                                 std::string_view content) {
  return writeFile(path, std::span(&content, 1));
}

/// Opens a regular file to read, -1 with errno otherwise. A pipe of that name
/// would be waited for, and a device may do anything when it is opened.
inline int openRegularFile(const std::string &path) {
  int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  struct stat status = {};
  if (file < 0 || (::fstat(file, &status) == 0 && S_ISREG(status.st_mode)))
    return file;
  ::close(file);
  errno = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  return -1;
}

/// Reads a regular file.
inline std::error_code readFile(const std::string &path, std::string &content) {
  int file = openRegularFile(path);
  if (file < 0)
    return detail::lastError();
  content.clear();
  std::error_code code;
  char buffer[1 << 16];
  for (;;) {
    ssize_t count = ::read(file, buffer, sizeof buffer);
    if (count < 0 && errno == EINTR)
      continue;
    if (count < 0)
      code = detail::lastError();
    if (count <= 0)
      break;
    content.append(buffer, static_cast<size_t>(count));
  }
  ::close(file);
  return code;
}

} // namespace moe

#endif // MOE_SUPPORT_FILES_H
