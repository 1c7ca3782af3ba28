//===- Formats.h - Small floating-point formats -----------------*- C++ -*-===//
//
// Included by files that are compiled once per instruction set: internal
// linkage throughout, as in Lanewise.h.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_SIMULATOR_FORMATS_H
#define MOE_LIB_SIMULATOR_FORMATS_H

#include "Types.h"

#include <bit>
#include <cmath>

namespace moe::sim {
namespace {

[[maybe_unused]] inline float f16ToFloat(u16 h) {
  return static_cast<float>(std::bit_cast<_Float16>(h));
}

/// Rounds to nearest even; every NaN becomes the canonical 0x7fff.
[[maybe_unused]] inline u16 floatToF16(float f) {
  if (f != f)
    return 0x7fff;
  return std::bit_cast<u16>(static_cast<_Float16>(f));
}

[[maybe_unused]] inline float bf16ToFloat(u16 b) {
  return std::bit_cast<float>(static_cast<u32>(b) << 16);
}

[[maybe_unused]] inline u16 floatToBF16(float f) {
  u32 x = std::bit_cast<u32>(f);
  u32 rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
  return f != f ? 0x7fff : static_cast<u16>(rounded);
}

/// Rounds to odd, so that a second rounding to a shorter format is as if there
/// had been only one.
[[maybe_unused]] inline float doubleToFloatOdd(double x) {
  float f = static_cast<float>(x);
  if (static_cast<double>(f) == x || x != x || std::isinf(f))
    return std::isinf(f) && !std::isinf(x) ? std::copysign(0x1.fffffep127f, f)
                                           : f;
  u32 bits = std::bit_cast<u32>(f);
  if (std::fabs(static_cast<double>(f)) > std::fabs(x))
    --bits;
  return std::bit_cast<float>(bits | 1);
}

/// a * b + c for operands whose product is exact in double, rounded to odd.
[[maybe_unused]] inline float fmaOdd(float a, float b, float c) {
  double product = static_cast<double>(a) * b;
  double sum = product + c;
  double back = sum - product;
  double error = (product - (sum - back)) + (c - back);
  if (error != 0 && std::isfinite(sum)) {
    u64 bits = std::bit_cast<u64>(sum);
    if ((bits & 1) == 0) {
      bool towardZero = (error > 0) != (sum > 0);
      sum = std::bit_cast<double>(towardZero ? bits - 1 : bits + 1);
    }
  }
  return doubleToFloatOdd(sum);
}

[[maybe_unused]] inline float flushToZero(float x) {
  u32 bits = std::bit_cast<u32>(x);
  return (bits & 0x7f800000) == 0 ? std::bit_cast<float>(bits & 0x80000000) : x;
}

} // namespace
} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_FORMATS_H
