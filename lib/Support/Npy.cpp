//===- Npy.cpp - NumPy's file format --------------------------------------===//

#include "MoE/Support/Npy.h"

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

/// The text after `key` in the header's dictionary.
std::string field(const std::string &header, const std::string &key,
                  const std::string &path) {
  size_t at = header.find("'" + key + "':");
  if (at == std::string::npos)
    refuse(path, "expected '" + key + "' in the header");
  return header.substr(at + key.size() + 3);
}

} // namespace

NpyArray readNpy(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    refuse(path, "cannot be opened");
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)),
                          std::istreambuf_iterator<char>());
  if (bytes.size() < 10 || std::memcmp(bytes.data(), kMagic, kMagicBytes) != 0)
    refuse(path, "expected a .npy file");
  bool wide = bytes[6] >= 2;
  uint32_t length = 0;
  std::memcpy(&length, bytes.data() + 8, wide ? 4 : 2);
  size_t start = (wide ? 12 : 10) + size_t(length);
  if (start > bytes.size())
    refuse(path, "ends within its header");
  std::string header(bytes.data() + (wide ? 12 : 10), length);
  if (field(header, "fortran_order", path).find("True") <
      field(header, "fortran_order", path).find(','))
    refuse(path, "expected an array in C order");
  NpyArray array;
  std::string type = field(header, "descr", path);
  size_t open = type.find('\''), close = type.find('\'', open + 1);
  if (close == std::string::npos)
    refuse(path, "expected a simple element type");
  array.type = type.substr(open + 1, close - open - 1);
  std::string shape = field(header, "shape", path);
  shape = shape.substr(shape.find('(') + 1);
  for (const char *at = shape.c_str(); *at && *at != ')';) {
    char *end;
    uint64_t extent = std::strtoull(at, &end, 10);
    if (end == at) {
      ++at;
      continue;
    }
    array.shape.push_back(extent);
    at = end;
  }
  array.data.assign(bytes.begin() + static_cast<long>(start), bytes.end());
  return array;
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
  std::ofstream file(path, std::ios::binary);
  uint16_t length = static_cast<uint16_t>(header.size());
  file.write(kMagic, kMagicBytes);
  file.write("\x01\x00", 2);
  file.write(reinterpret_cast<const char *>(&length), 2);
  file << header;
  file.write(reinterpret_cast<const char *>(array.data.data()),
             static_cast<std::streamsize>(array.data.size()));
  if (!file)
    refuse(path, "cannot be written");
}

} // namespace moe
