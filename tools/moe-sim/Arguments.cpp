//===- Arguments.cpp - Kernel arguments on the command line ---------------===//

#include "Arguments.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>

namespace moe::sim {
namespace {

constexpr uint64_t kAlignment = 256;

struct ElementType {
  const char *name;
  const char *npy;
  uint64_t bytes;
  char kind; // f, i, u, or h and b for the 16-bit floats
};

constexpr ElementType kTypes[] = {
    {"f64", "<f8", 8, 'f'},  {"f32", "<f4", 4, 'f'}, {"f16", "<f2", 2, 'h'},
    {"bf16", "<u2", 2, 'b'}, {"i64", "<i8", 8, 'i'}, {"i32", "<i4", 4, 'i'},
    {"i16", "<i2", 2, 'i'},  {"i8", "|i1", 1, 'i'},  {"u64", "<u8", 8, 'u'},
    {"u32", "<u4", 4, 'u'},  {"u16", "<u2", 2, 'u'}, {"u8", "|u1", 1, 'u'}};

const ElementType &typeNamed(const std::string &name) {
  for (const ElementType &type : kTypes)
    if (name == type.name)
      return type;
  throw std::invalid_argument(
      "expected a type f16, bf16, f32, f64, i8 ... i64 or u8 ... u64, found '" +
      name + "'");
}

const ElementType &typeOfNpy(const std::string &npy) {
  for (const ElementType &type : kTypes)
    if (npy == type.npy)
      return type;
  throw std::invalid_argument("unknown .npy element type '" + npy + "'");
}

template <typename T>
void put(uint8_t *to, T value) {
  std::memcpy(to, &value, sizeof value);
}

void store(uint8_t *to, const ElementType &type, double value) {
  if (type.kind == 'f') {
    type.bytes == 8 ? put(to, value) : put(to, static_cast<float>(value));
  } else if (type.kind == 'h') {
    put(to, static_cast<_Float16>(value));
  } else if (type.kind == 'b') {
    float f = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    put(to, static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
  } else {
    int64_t whole = static_cast<int64_t>(value);
    std::memcpy(to, &whole, type.bytes);
  }
}

template <typename T>
T get(const uint8_t *from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

std::string printElement(const uint8_t *from, const ElementType &type) {
  char text[40];
  double value = 0;
  switch (type.kind) {
  case 'f':
    value = type.bytes == 8 ? get<double>(from) : get<float>(from);
    break;
  case 'h':
    value = get<_Float16>(from);
    break;
  case 'b': {
    uint32_t bits = static_cast<uint32_t>(get<uint16_t>(from)) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    value = f;
    break;
  }
  default: {
    uint64_t bits = 0;
    std::memcpy(&bits, from, type.bytes);
    uint64_t shift = 64 - 8 * type.bytes;
    if (type.kind == 'i')
      return std::to_string(static_cast<int64_t>(bits << shift) >>
                            static_cast<int>(shift));
    return std::to_string(bits);
  }
  }
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

void allocate(Argument &argument, uint64_t bytes) {
  argument.bytes = bytes;
  argument.storage.resize(bytes + kAlignment);
  uint64_t base = reinterpret_cast<uint64_t>(argument.storage.data());
  argument.data =
      argument.storage.data() + (kAlignment - base % kAlignment) % kAlignment;
}

void fill(Argument &argument, const ElementType &type, uint64_t count,
          const std::string &how, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (uint64_t i = 0; i < count; ++i) {
    uint8_t *to = argument.data + i * type.bytes;
    bool isFloat = type.kind != 'i' && type.kind != 'u';
    if (how == "iota")
      store(to, type, static_cast<double>(i));
    else if (how == "zeros" || how == "ones")
      store(to, type, how == "ones");
    else if (how == "random")
      store(to, type,
            isFloat ? normal(random) : static_cast<double>(random() % 100));
    else
      throw std::invalid_argument(
          "expected zeros, ones, iota, random or @file.npy, found '" + how +
          "'");
  }
}

std::vector<std::string> splitColons(const std::string &text) {
  std::vector<std::string> parts;
  size_t at = 0;
  // A path may hold colons: at most four parts.
  while (parts.size() < 3) {
    size_t colon = text.find(':', at);
    if (colon == std::string::npos)
      break;
    parts.push_back(text.substr(at, colon - at));
    at = colon + 1;
  }
  parts.push_back(text.substr(at));
  return parts;
}

} // namespace

Argument Argument::parse(const std::string &text, uint64_t seed) {
  std::vector<std::string> parts = splitColons(text);
  Argument argument;
  if (parts[0] != "buf") {
    if (parts.size() != 2)
      throw std::invalid_argument("expected --arg TYPE:VALUE or "
                                  "buf:TYPE:COUNT:CONTENTS, found '" +
                                  text + "'");
    const ElementType &type = typeNamed(parts[0]);
    argument.type = type.name;
    allocate(argument, type.bytes);
    // Through integers, so that 64-bit values stay exact.
    if (type.kind == 'i' || type.kind == 'u') {
      uint64_t value = std::strtoull(parts[1].c_str(), nullptr, 0);
      std::memcpy(argument.data, &value, type.bytes);
    } else {
      store(argument.data, type, std::strtod(parts[1].c_str(), nullptr));
    }
    return argument;
  }
  argument.isBuffer = true;
  if (parts.size() == 4 && parts[3][0] == '@') {
    NpyArray array = readNpy(parts[3].substr(1));
    argument.type = parts[1] == "bf16" ? "bf16" : typeOfNpy(array.type).name;
    if (!parts[1].empty() && argument.type != parts[1])
      throw std::invalid_argument("expected elements of " + parts[1] +
                                  ", found " + argument.type + " in " +
                                  parts[3].substr(1));
    allocate(argument, array.data.size());
    std::copy(array.data.begin(), array.data.end(), argument.data);
    argument.shape = array.shape;
    return argument;
  }
  if (parts.size() != 4)
    throw std::invalid_argument("expected buf:TYPE:COUNT:CONTENTS, found '" +
                                text + "'");
  const ElementType &type = typeNamed(parts[1]);
  uint64_t count = std::strtoull(parts[2].c_str(), nullptr, 0);
  argument.type = type.name;
  argument.shape = {count};
  allocate(argument, count * type.bytes);
  fill(argument, type, count, parts[3], seed);
  return argument;
}

std::string Argument::print() const {
  const ElementType &element = typeNamed(type);
  std::string text;
  for (uint64_t at = 0; at + element.bytes <= bytes; at += element.bytes)
    text += (at ? " " : "") + printElement(data + at, element);
  return text;
}

NpyArray Argument::toNpy() const {
  return {typeNamed(type).npy, shape, std::vector<uint8_t>(data, data + bytes)};
}

} // namespace moe::sim
