//===- Syntax.cpp - Words of PTX ------------------------------------------===//

#include "Syntax.h"

#include <algorithm>

namespace moe::sim {

bool Instruction::has(std::string_view word) const {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::string Instruction::opcode() const {
  std::string text;
  for (const std::string &word : words)
    text += (text.empty() ? "" : ".") + word;
  return text;
}

u32 typeBytes(std::string_view type) {
  static constexpr std::pair<std::string_view, u32> sizes[] = {
      {"b8", 1},     {"u8", 1},     {"s8", 1},     {"b16", 2},   {"u16", 2},
      {"s16", 2},    {"f16", 2},    {"bf16", 2},   {"b32", 4},   {"u32", 4},
      {"s32", 4},    {"f32", 4},    {"f16x2", 4},  {"b64", 8},   {"u64", 8},
      {"s64", 8},    {"f64", 8},    {"bf16x2", 4}, {"b128", 16}, {"tf32", 4},
      {"e4m3x2", 2}, {"e5m2x2", 2}, {"u16x2", 4},  {"s16x2", 4}, {"e4m3", 1},
      {"e5m2", 1},   {"f32x2", 8},
  };
  for (auto [name, bytes] : sizes)
    if (name == type)
      return bytes;
  return 0;
}

} // namespace moe::sim
