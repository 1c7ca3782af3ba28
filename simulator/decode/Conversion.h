//===- Conversion.h - A cvt instruction's meaning ---------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_CONVERSION_H
#define MOE_LIB_SIMULATOR_CONVERSION_H

#include "Types.h"

#include <bit>

namespace moe::sim {

enum class NumberType : u8 {
  U8,
  S8,
  U16,
  S16,
  U32,
  S32,
  U64,
  S64, // integers first
  F16,
  BF16,
  TF32,
  F32,
  F64,
  E4M3,
  E5M2,
};

enum class Rounding : u8 { Nearest, Zero, Down, Up, NearestAway };

struct Conversion {
  NumberType to = NumberType::F32;
  NumberType from = NumberType::F32;
  Rounding rounding = Rounding::Nearest;
  /// .rni, .rzi, ...: the value becomes a whole number.
  bool toIntegral : 1 = false;
  bool saturate : 1 = false;
  /// .satfinite: overflow gives the largest finite number.
  bool saturateFinite : 1 = false;
  bool ftz : 1 = false;
  bool relu : 1 = false;
  /// Two elements of 8 or 16 bits.
  bool packed : 1 = false;

  i64 pack() const { return std::bit_cast<u32>(*this); }
  static Conversion unpack(i64 bits) {
    return std::bit_cast<Conversion>(static_cast<u32>(bits));
  }
};
static_assert(sizeof(Conversion) == 4);

u32 bytesOf(NumberType type);

/// Converts the element at `from`; the result is in the low bytes.
u64 convert(const u8 *from, const Conversion &conversion);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_CONVERSION_H
