//===- Npy.cpp - NumPy's file format --------------------------------------===//

#include "MoE/Support/Npy.h"

#include "MoE/Support/Files.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace moe {
namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr size_t kMagicBytes = 6;

[[noreturn]] void refuse(const std::string &path, const std::string &what) {
  throw std::runtime_error(path + ": " + what);
}

/// The header: a dictionary of Python whose form NEP 1 prescribes.
class Header {
public:
  Header(std::string_view text, const std::string &source)
      : text(text), source(source) {}

  /// What lies between the quotes.
  std::string_view string(std::string_view key) {
    std::string_view rest = field(key);
    size_t close = rest.empty() ? rest.npos : rest.find(rest[0], 1);
    if ((!rest.starts_with('\'') && !rest.starts_with('"')) ||
        close == rest.npos)
      refuse(source, "expected a simple element type");
    return rest.substr(1, close - 1);
  }

  bool boolean(std::string_view key) {
    std::string_view rest = field(key);
    if (!rest.starts_with("True") && !rest.starts_with("False"))
      refuse(source, "expected True or False as " + std::string(key));
    return rest.starts_with("True");
  }

  /// (), (3,), (3, 4) or (3, 4,)
  std::vector<uint64_t> tuple(std::string_view key) {
    std::string_view rest = field(key);
    std::vector<uint64_t> values;
    for (bool canFollow = consume(rest, '('); !consume(rest, ')');
         canFollow = consume(rest, ',')) {
      uint64_t value = 0;
      auto [end, error] =
          std::from_chars(rest.data(), rest.data() + rest.size(), value);
      if (!canFollow || error != std::errc())
        refuse(source, "expected a shape such as (3, 4) in the header");
      rest.remove_prefix(end - rest.data());
      values.push_back(value);
    }
    return values;
  }

private:
  /// The text after `key` in the dictionary.
  std::string_view field(std::string_view key) {
    size_t at = text.find("'" + std::string(key) + "':");
    if (at == text.npos)
      refuse(source, "expected '" + std::string(key) + "' in the header");
    std::string_view rest = text.substr(at + key.size() + 3);
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    return rest;
  }

  static bool consume(std::string_view &rest, char c) {
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    if (!rest.starts_with(c))
      return false;
    rest.remove_prefix(1);
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    return true;
  }

  std::string_view text;
  const std::string &source;
};

} // namespace

NpyArray parseNpy(std::string_view bytes, const std::string &source) {
  if (bytes.size() < 10 || !bytes.starts_with(kMagic))
    refuse(source, "expected a .npy file");
  // Since version 2 the length of the header has four bytes.
  size_t lengthBytes = bytes[kMagicBytes] >= 2 ? 4 : 2, start = 8 + lengthBytes;
  uint32_t length = 0;
  if (bytes.size() >= start)
    std::memcpy(&length, bytes.data() + 8, lengthBytes);
  if (bytes.size() < start || length > bytes.size() - start)
    refuse(source, "ends within its header");
  Header header(bytes.substr(start, length), source);
  if (header.boolean("fortran_order"))
    refuse(source, "expected an array in C order");
  std::string_view data = bytes.substr(start + length);
  return {std::string(header.string("descr")),
          header.tuple("shape"),
          {data.begin(), data.end()}};
}

NpyArray readNpy(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    refuse(path, "cannot be opened");
  return parseNpy(std::string(std::istreambuf_iterator<char>(file), {}), path);
}

void writeNpy(const std::string &path, const NpyArray &array) {
  std::string header =
      "{'descr': '" + array.type + "', 'fortran_order': False, 'shape': (";
  for (uint64_t extent : array.shape)
    header += std::to_string(extent) + ",";
  header += "), }";
  // The data starts at a multiple of 64.
  while ((10 + header.size() + 1) % 64)
    header += ' ';
  header += '\n';
  auto length = static_cast<uint16_t>(header.size());
  std::string start(kMagic, kMagicBytes);
  start += std::string("\x01\x00", 2);
  start.append(reinterpret_cast<const char *>(&length), sizeof length);
  start += header;
  std::string_view data(reinterpret_cast<const char *>(array.data.data()),
                        array.data.size());
  std::string_view pieces[] = {start, data};
  if (std::error_code code = writeFile(path, pieces))
    refuse(path, "cannot be written: " + code.message());
}

} // namespace moe
