//===- RoundingOps.cpp - Directed rounding and rare conversions -----------===//
//
// Exact values in long double, rounded once by the rule that the instruction
// names. Slow and general; ConversionOps.cpp and FloatOps.cpp have the common
// cases.
//
//===----------------------------------------------------------------------===//

#include "Formats.h"
#include "Handlers.h"
#include "Machine.h"
#include "decode/Conversion.h"

#include <cfenv>
#include <cmath>
#include <limits>

namespace moe::sim {
namespace {

using Real = long double;
static_assert(std::numeric_limits<Real>::digits >= 64,
              "64-bit integers must be exact");

//===----------------------------------------------------------------------===//
// Rounding to a format
//===----------------------------------------------------------------------===//

struct Layout {
  int precision;
  int minExponent; // of the smallest normal number
  Real largest;
};

Layout layoutOf(NumberType type) {
  switch (type) {
  case NumberType::F16:
    return {11, -14, 65504.0L};
  case NumberType::BF16:
    return {8, -126, 0x1.fep127L};
  case NumberType::TF32:
    return {11, -126, 0x1.ffcp127L};
  case NumberType::E4M3:
    return {4, -6, 448.0L};
  case NumberType::E5M2:
    return {3, -14, 57344.0L};
  case NumberType::F64:
    return {53, -1022, std::numeric_limits<double>::max()};
  default:
    return {24, -126, std::numeric_limits<float>::max()};
  }
}

Real roundIntegral(Real x, Rounding rounding) {
  switch (rounding) {
  case Rounding::Zero:
    return std::trunc(x);
  case Rounding::Down:
    return std::floor(x);
  case Rounding::Up:
    return std::ceil(x);
  case Rounding::NearestAway:
    return std::round(x);
  case Rounding::Nearest:
    break;
  }
  Real low = std::floor(x), rest = x - low;
  if (rest == 0.5L)
    return std::fmod(low, 2.0L) == 0 ? low : low + 1;
  return rest < 0.5L ? low : low + 1;
}

Real roundTo(Real x, const Layout &layout, Rounding rounding, bool finite) {
  if (x == 0 || x != x || std::isinf(x))
    return finite && std::isinf(x) ? std::copysign(layout.largest, x) : x;
  int exponent = std::max(std::ilogb(x), layout.minExponent);
  int unit = exponent - layout.precision + 1;
  Real rounded =
      std::ldexp(roundIntegral(std::ldexp(x, -unit), rounding), unit);
  if (std::fabs(rounded) <= layout.largest)
    return rounded == 0 ? std::copysign(0.0L, x) : rounded;
  bool towardZero = rounding == Rounding::Zero ||
                    (rounding == Rounding::Down && x > 0) ||
                    (rounding == Rounding::Up && x < 0);
  return std::copysign(finite || towardZero
                           ? layout.largest
                           : std::numeric_limits<Real>::infinity(),
                       x);
}

//===----------------------------------------------------------------------===//
// Bits
//===----------------------------------------------------------------------===//

u8 encodeSmall(Real x, int mantissaBits, int bias, u8 nan) {
  if (x != x)
    return nan;
  u8 sign = std::signbit(x) ? 0x80 : 0;
  x = std::fabs(x);
  if (std::isinf(x))
    return sign | 0x7c; // e5m2 only; e4m3 saturates
  if (x == 0)
    return sign;
  int exponent = std::max(std::ilogb(x), 1 - bias);
  int mantissa = static_cast<int>(std::ldexp(x, mantissaBits - exponent));
  int biased = exponent + bias;
  if (mantissa < 1 << mantissaBits)
    biased = 0;
  return static_cast<u8>(sign | biased << mantissaBits |
                         (mantissa & ((1 << mantissaBits) - 1)));
}

Real decodeE5M2(u8 x) { return f16ToFloat(static_cast<u16>(x << 8)); }

Real decodeE4M3(u8 x) {
  Real sign = x & 0x80 ? -1 : 1;
  int exponent = x >> 3 & 15, mantissa = x & 7;
  if (exponent == 15 && mantissa == 7)
    return std::numeric_limits<Real>::quiet_NaN();
  if (exponent == 0)
    return sign * std::ldexp(static_cast<Real>(mantissa), -9);
  return sign * std::ldexp(static_cast<Real>(8 + mantissa), exponent - 10);
}

template <typename T>
T loadBytes(const u8 *from) {
  T value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

Real load(const u8 *from, NumberType type) {
  switch (type) {
  case NumberType::U8:
    return loadBytes<u8>(from);
  case NumberType::S8:
    return loadBytes<i8>(from);
  case NumberType::U16:
    return loadBytes<u16>(from);
  case NumberType::S16:
    return loadBytes<i16>(from);
  case NumberType::U32:
    return loadBytes<u32>(from);
  case NumberType::S32:
    return loadBytes<i32>(from);
  case NumberType::U64:
    return static_cast<Real>(loadBytes<u64>(from));
  case NumberType::S64:
    return static_cast<Real>(loadBytes<i64>(from));
  case NumberType::F16:
    return f16ToFloat(loadBytes<u16>(from));
  case NumberType::BF16:
    return bf16ToFloat(loadBytes<u16>(from));
  case NumberType::F64:
    return loadBytes<double>(from);
  case NumberType::E4M3:
    return decodeE4M3(*from);
  case NumberType::E5M2:
    return decodeE5M2(*from);
  default:
    return loadBytes<float>(from);
  }
}

template <typename T>
u64 saturated(Real x, bool fromDouble) {
  // NaN: 0, except into or from 64 bits (PTX ISA, cvt).
  if (x != x)
    return fromDouble || sizeof(T) == 8 ? 1ull << (sizeof(T) * 8 - 1) : 0;
  Real low = static_cast<Real>(std::numeric_limits<T>::min());
  Real high = static_cast<Real>(std::numeric_limits<T>::max());
  T value = x <= low    ? std::numeric_limits<T>::min()
            : x >= high ? std::numeric_limits<T>::max()
                        : static_cast<T>(x);
  return static_cast<u64>(static_cast<std::make_unsigned_t<T>>(value));
}

u64 integerBits(Real x, NumberType type, bool fromDouble) {
  switch (type) {
  case NumberType::U8:
    return saturated<u8>(x, fromDouble);
  case NumberType::S8:
    return saturated<i8>(x, fromDouble);
  case NumberType::U16:
    return saturated<u16>(x, fromDouble);
  case NumberType::S16:
    return saturated<i16>(x, fromDouble);
  case NumberType::U32:
    return saturated<u32>(x, fromDouble);
  case NumberType::S32:
    return saturated<i32>(x, fromDouble);
  case NumberType::U64:
    return saturated<u64>(x, fromDouble);
  default:
    return saturated<i64>(x, fromDouble);
  }
}

u64 floatBits(Real x, NumberType type) {
  switch (type) {
  case NumberType::F16:
    return floatToF16(static_cast<float>(x));
  case NumberType::BF16:
    return floatToBF16(static_cast<float>(x));
  case NumberType::E4M3:
    return encodeSmall(x, 3, 7, 0x7f);
  case NumberType::E5M2:
    return encodeSmall(x, 2, 15, 0x7f);
  case NumberType::F64:
    return std::bit_cast<u64>(static_cast<double>(x));
  default:
    return x != x ? 0x7fffffff : std::bit_cast<u32>(static_cast<float>(x));
  }
}

bool isInteger(NumberType type) { return type <= NumberType::S64; }

Real flush(Real x, NumberType type) {
  bool subnormal = (type == NumberType::F32 || type == NumberType::TF32) &&
                   std::fabs(x) < 0x1p-126L;
  return subnormal ? std::copysign(0.0L, x) : x;
}

} // namespace

u32 bytesOf(NumberType type) {
  switch (type) {
  case NumberType::U8:
  case NumberType::S8:
  case NumberType::E4M3:
  case NumberType::E5M2:
    return 1;
  case NumberType::U16:
  case NumberType::S16:
  case NumberType::F16:
  case NumberType::BF16:
    return 2;
  case NumberType::U64:
  case NumberType::S64:
  case NumberType::F64:
    return 8;
  default:
    return 4;
  }
}

u64 convert(const u8 *from, const Conversion &c) {
  Real x = load(from, c.from);
  if (c.ftz)
    x = flush(x, c.from);
  if (c.relu && x < 0)
    x = 0;
  if (c.toIntegral && !isInteger(c.from)) {
    Real integral = roundIntegral(x, c.rounding);
    x = integral == 0 ? std::copysign(0.0L, x) : integral;
  }
  if (isInteger(c.to))
    return integerBits(x, c.to, c.from == NumberType::F64);
  if (c.saturate)
    x = x > 0 ? (x < 1 ? x : 1.0L) : 0.0L;
  if (!c.toIntegral)
    x = roundTo(x, layoutOf(c.to), c.rounding, c.saturateFinite);
  if (c.ftz)
    x = flush(x, c.to);
  return floatBits(x, c.to);
}

namespace {

/// One element, or packs: two sources into the halves of one destination, or
/// the halves of one source into the halves of one destination.
void runConversion(Warp &warp, const Inst &inst, u32 mask) {
  Conversion c = Conversion::unpack(inst.imm);
  u32 fromBytes = bytesOf(c.from), toBytes = bytesOf(c.to);
  u32 parts = c.packed ? 2 : 1;
  for (u32 l : Lanes(mask)) {
    u64 bits = 0;
    for (u32 part = 0; part < parts; ++part) {
      // cvt.f16x2.f32 d, a, b: a is the upper half.
      bool twoSources = c.packed && inst.ns == 2;
      u32 source = twoSources ? inst.s[1 - part] : inst.s[0];
      const u8 *from =
          warp.registers + source +
          (twoSources ? l * fromBytes : (l * parts + part) * fromBytes);
      bits |= convert(from, c) << (8 * toBytes * part);
    }
    __builtin_memcpy(warp.registers + inst.d[0] + l * toBytes * parts, &bits,
                     toBytes * parts);
  }
}

//===----------------------------------------------------------------------===//
// Arithmetic with directed rounding
//===----------------------------------------------------------------------===//

constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};

enum DirectedOp : u8 { Add, Sub, Mul, Fma, Div, Rcp, Sqrt };

// The operands are volatile so that nothing is computed before the rounding
// mode is set.
template <typename T>
__attribute__((noinline)) T directed(u8 op, T a, T b, T c) {
  volatile T x = a, y = b, z = c, r = 0;
  switch (op) {
  case Add:
    r = x + y;
    break;
  case Sub:
    r = x - y;
    break;
  case Mul:
    r = x * y;
    break;
  case Fma:
    r = std::fma(T(x), T(y), T(z));
    break;
  case Div:
    r = x / y;
    break;
  case Rcp:
    r = T(1) / x;
    break;
  case Sqrt:
    r = std::sqrt(T(x));
    break;
  }
  return r;
}

/// inst.aux: operation; aux2: rounding in bits 0-1, .ftz in 2, .sat in 3.
template <typename T>
void runDirected(Warp &warp, const Inst &inst, u32 mask) {
  bool ftz = inst.aux2 & 4, sat = inst.aux2 & 8;
  auto read = [&](u32 i, u32 l) {
    T x = i < inst.ns ? lanesOf<T>(warp, inst.s[i])[l] : T(0);
    if constexpr (sizeof(T) == 4)
      return ftz ? flushToZero(x) : x;
    return x;
  };
  int before = std::fegetround();
  for (u32 l : Lanes(mask)) {
    T a = read(0, l), b = read(1, l), c = read(2, l);
    std::fesetround(kModes[inst.aux2 & 3]);
    T r = directed<T>(inst.aux, a, b, c);
    std::fesetround(before);
    if constexpr (sizeof(T) == 4)
      r = ftz ? flushToZero(r) : r;
    if (sat)
      r = r > 0 ? (r < 1 ? r : T(1)) : T(0);
    lanesOf<T>(warp, inst.d[0])[l] = r;
  }
}

} // namespace

void addGenericConversions(HandlerTable &table) {
  table["cvt"] = runConversion;
}

void addDirectedOps(HandlerTable &table) {
  table["directed.f32"] = runDirected<float>;
  table["directed.f64"] = runDirected<double>;
}

} // namespace moe::sim
