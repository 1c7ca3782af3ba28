//===- IntegerOps.cpp - Integer and bit instructions ----------------------===//

#include "Handlers.h"
#include "Lanewise.h"

#include <bit>
#include <limits>
#include <string>
#include <type_traits>

namespace moe::sim::MOE_SIM_ISA {
namespace {

template <typename T>
using Unsigned = std::make_unsigned_t<T>;

template <typename T>
struct Twice;
template <>
struct Twice<u16> {
  using type = u32;
};
template <>
struct Twice<i16> {
  using type = i32;
};
template <>
struct Twice<u32> {
  using type = u64;
};
template <>
struct Twice<i32> {
  using type = i64;
};
template <>
struct Twice<u64> {
  using type = unsigned __int128;
};
template <>
struct Twice<i64> {
  using type = __int128;
};
template <typename T>
using Wide = typename Twice<T>::type;

template <typename T>
std::string typeName() {
  return (std::is_signed_v<T> ? "s" : "u") + std::to_string(sizeof(T) * 8);
}

template <typename T>
T saturate(i64 value) {
  return static_cast<T>(
      std::min<i64>(std::max<i64>(value, std::numeric_limits<T>::min()),
                    std::numeric_limits<T>::max()));
}

//===----------------------------------------------------------------------===//
// Arithmetic of one type
//===----------------------------------------------------------------------===//

template <typename T>
void addArithmetic(HandlerTable &table) {
  using U = Unsigned<T>;
  using W = Wide<T>;
  std::string t = "." + typeName<T>();
  table["add" + t] = binary<T, T, T>([](T a, T b) { return T(U(a) + U(b)); });
  table["sub" + t] = binary<T, T, T>([](T a, T b) { return T(U(a) - U(b)); });
  // U(1) * would promote 16-bit operands to int and may overflow: go wide.
  table["mul.lo" + t] =
      binary<T, T, T>([](T a, T b) { return T(u64(U(a)) * u64(U(b))); });
  table["mul.hi" + t] = binary<T, T, T>(
      [](T a, T b) { return T(W(a) * W(b) >> (sizeof(T) * 8)); });
  table["mad.lo" + t] = ternary<T, T, T, T>(
      [](T a, T b, T c) { return T(u64(U(a)) * u64(U(b)) + u64(U(c))); });
  table["mad.hi" + t] = ternary<T, T, T, T>([](T a, T b, T c) {
    return T(u64(U(T(W(a) * W(b) >> (sizeof(T) * 8)))) + u64(U(c)));
  });
  table["sad" + t] = ternary<T, T, T, T>([](T a, T b, T c) {
    return T(U(c) + (a < b ? U(b) - U(a) : U(a) - U(b)));
  });
  // Division by zero gives all ones on hardware; PTX leaves it open.
  table["div" + t] = binary<T, T, T>([](T a, T b) {
    if (b == 0)
      return T(-1);
    if (std::is_signed_v<T> && b == T(-1))
      return T(U(0) - U(a));
    return T(a / b);
  });
  table["rem" + t] = binary<T, T, T>([](T a, T b) {
    if (b == 0)
      return a;
    if (std::is_signed_v<T> && b == T(-1))
      return T(0);
    return T(a % b);
  });
  table["min" + t] = binary<T, T, T>([](T a, T b) { return a < b ? a : b; });
  table["max" + t] = binary<T, T, T>([](T a, T b) { return a > b ? a : b; });
  table["neg" + t] = unary<T, T>([](T a) { return T(U(0) - U(a)); });
  table["abs" + t] =
      unary<T, T>([](T a) { return a < 0 ? T(U(0) - U(a)) : a; });
  table["shr" + t] = binary<T, T, u32>([](T a, u32 b) {
    constexpr u32 bits = sizeof(T) * 8;
    if (std::is_signed_v<T>)
      return T(a >> std::min(b, bits - 1));
    return b >= bits ? T(0) : T(a >> b);
  });
}

template <typename T>
void addWideMultiplication(HandlerTable &table) {
  using W = Wide<T>;
  std::string t = "." + typeName<T>();
  table["mul.wide" + t] =
      binary<W, T, T>([](T a, T b) { return W(W(a) * W(b)); });
  table["mad.wide" + t] = ternary<W, T, T, W>(
      [](T a, T b, W c) { return W(u64(W(a) * W(b)) + u64(c)); });
}

template <typename T>
void addBitOps(HandlerTable &table) {
  std::string t = ".b" + std::to_string(sizeof(T) * 8);
  table["and" + t] = binary<T, T, T>([](T a, T b) { return T(a & b); });
  table["or" + t] = binary<T, T, T>([](T a, T b) { return T(a | b); });
  table["xor" + t] = binary<T, T, T>([](T a, T b) { return T(a ^ b); });
  table["not" + t] = unary<T, T>([](T a) { return T(~a); });
  table["cnot" + t] = unary<T, T>([](T a) { return T(a == 0); });
  table["mov" + t] = unary<T, T>([](T a) { return a; });
  table["shl" + t] = binary<T, T, u32>(
      [](T a, u32 b) { return b >= sizeof(T) * 8 ? T(0) : T(a << b); });
  table["selp" + t] = [](Warp &warp, const Inst &inst, u32 mask) {
    T *d = lanesOf<T>(warp, inst.d[0]);
    const T *a = lanesOf<T>(warp, inst.s[0]);
    const T *b = lanesOf<T>(warp, inst.s[1]);
    u32 p = predicateOf(warp, inst.s[2]);
    if (mask == kAllLanes) {
#pragma GCC ivdep
      for (u32 l = 0; l < kWarpSize; ++l)
        d[l] = p >> l & 1 ? a[l] : b[l];
      return;
    }
    for (u32 l : Lanes(mask))
      d[l] = p >> l & 1 ? a[l] : b[l];
  };
  table["slct" + t + ".s32"] =
      ternary<T, T, T, i32>([](T a, T b, i32 c) { return c >= 0 ? a : b; });
  table["slct" + t + ".f32"] =
      ternary<T, T, T, float>([](T a, T b, float c) { return c >= 0 ? a : b; });
}

/// Narrows, or widens with the sign of the first type.
template <typename D, typename A>
void addResize(HandlerTable &table) {
  table["resize." + typeName<D>() + "." + typeName<A>()] =
      unary<D, A>([](A a) { return D(a); });
}

template <typename D>
void addResizesTo(HandlerTable &table) {
  addResize<D, u8>(table);
  addResize<D, i8>(table);
  addResize<D, u16>(table);
  addResize<D, i16>(table);
  addResize<D, u32>(table);
  addResize<D, i32>(table);
  addResize<D, u64>(table);
  addResize<D, i64>(table);
}

//===----------------------------------------------------------------------===//
// Comparisons
//===----------------------------------------------------------------------===//

template <typename T, typename F>
void addComparison(HandlerTable &table, const std::string &op, F f) {
  table["setp." + op + "." + typeName<T>()] = comparison<T>(f);
  table["set." + op + ".u32." + typeName<T>()] = comparisonValue<u32, T>(f);
  table["set." + op + ".f32." + typeName<T>()] = comparisonValue<float, T>(f);
}

template <typename T>
void addComparisons(HandlerTable &table) {
  addComparison<T>(table, "eq", [](T a, T b) { return a == b; });
  addComparison<T>(table, "ne", [](T a, T b) { return a != b; });
  addComparison<T>(table, "lt", [](T a, T b) { return a < b; });
  addComparison<T>(table, "le", [](T a, T b) { return a <= b; });
  addComparison<T>(table, "gt", [](T a, T b) { return a > b; });
  addComparison<T>(table, "ge", [](T a, T b) { return a >= b; });
}

//===----------------------------------------------------------------------===//
// Bit fields and counts
//===----------------------------------------------------------------------===//

template <typename T>
T extractField(T a, u32 position, u32 length) {
  constexpr u32 bits = sizeof(T) * 8;
  using U = Unsigned<T>;
  position &= 255;
  length &= 255;
  if (length == 0)
    return 0;
  U value = position >= bits ? U(0) : U(U(a) >> position);
  if (!std::is_signed_v<T>)
    return length >= bits ? value : T(value & ((U(1) << length) - 1));
  // The sign is the field's top bit, or the operand's if the field sticks out.
  u32 top = std::min(position + length - 1, bits - 1);
  bool negative = U(a) >> top & 1;
  u32 valid = position >= bits ? 0 : std::min(length, bits - position);
  U low = valid >= bits ? ~U(0) : (U(1) << valid) - 1;
  return T(negative ? value | ~low : value & low);
}

template <typename U>
U insertField(U a, U b, u32 position, u32 length) {
  constexpr u32 bits = sizeof(U) * 8;
  position &= 255;
  length &= 255;
  if (position >= bits || length == 0)
    return b;
  U field = (length >= bits ? ~U(0) : (U(1) << length) - 1) << position;
  return (b & ~field) | ((a << position) & field);
}

template <typename T>
u32 findLeading(T a, bool shiftAmount) {
  using U = Unsigned<T>;
  U value = std::is_signed_v<T> && a < 0 ? U(~a) : U(a);
  if (value == 0)
    return ~0u;
  u32 leading = std::countl_zero(value);
  return shiftAmount ? leading : sizeof(T) * 8 - 1 - leading;
}

template <typename T>
void addFields(HandlerTable &table) {
  std::string t = "." + typeName<T>();
  table["bfe" + t] = ternary<T, T, u32, u32>(
      [](T a, u32 b, u32 c) { return extractField(a, b, c); });
  table["bfind" + t] = unary<u32, T>([](T a) { return findLeading(a, false); });
  table["bfind.shiftamt" + t] =
      unary<u32, T>([](T a) { return findLeading(a, true); });
}

template <typename U>
void addInsertAndCounts(HandlerTable &table) {
  std::string t = ".b" + std::to_string(sizeof(U) * 8);
  table["bfi" + t] = [](Warp &warp, const Inst &inst, u32 mask) {
    U *d = lanesOf<U>(warp, inst.d[0]);
    const U *a = lanesOf<U>(warp, inst.s[0]);
    const U *b = lanesOf<U>(warp, inst.s[1]);
    const u32 *c = lanesOf<u32>(warp, inst.s[2]);
    const u32 *e = lanesOf<u32>(warp, inst.s[3]);
    for (u32 l : Lanes(mask))
      d[l] = insertField(a[l], b[l], c[l], e[l]);
  };
  table["popc" + t] = unary<u32, U>([](U a) { return u32(std::popcount(a)); });
  table["clz" + t] =
      unary<u32, U>([](U a) { return u32(std::countl_zero(a)); });
  table["brev" + t] = unary<U, U>([](U a) {
    U r = 0;
    for (u32 i = 0; i < sizeof(U) * 8; ++i)
      r |= (a >> i & 1) << (sizeof(U) * 8 - 1 - i);
    return r;
  });
}

//===----------------------------------------------------------------------===//
// Shuffling bits and bytes
//===----------------------------------------------------------------------===//

/// The eight modes of prmt; `mode` 0 is the generic one.
u32 permute(u32 a, u32 b, u32 selector, u32 mode) {
  u64 bytes = u64(b) << 32 | a;
  u32 r = 0;
  u32 c = selector & 3;
  for (u32 i = 0; i < 4; ++i) {
    u32 pick = 0;
    switch (mode) {
    case 0:
      pick = selector >> (4 * i) & 15;
      break;
    case 1: // f4e: forward 4 extract
      pick = c + i;
      break;
    case 2: // b4e: backward
      pick = (c - i) & 7;
      break;
    case 3: // rc8: replicate 8
      pick = c;
      break;
    case 4: // ecl: edge clamp left
      pick = std::max(i, c);
      break;
    case 5: // ecr: edge clamp right
      pick = std::min(i, c);
      break;
    case 6: // rc16: replicate 16
      pick = (c & 1) * 2 + (i & 1);
      break;
    }
    u32 byte = bytes >> (8 * (pick & 7)) & 255;
    if (mode == 0 && (pick & 8))
      byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}

u32 funnelLeft(u32 low, u32 high, u32 shift) {
  return static_cast<u32>((u64(high) << 32 | low) << shift >> 32);
}

u32 funnelRight(u32 low, u32 high, u32 shift) {
  return static_cast<u32>((u64(high) << 32 | low) >> shift);
}

u32 logic3(u32 a, u32 b, u32 c, u32 lut) {
  u32 r = 0;
  for (u32 i = 0; i < 8; ++i)
    if (lut >> i & 1)
      r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}

void runLop3(Warp &warp, const Inst &inst, u32 mask) {
  u32 *d = lanesOf<u32>(warp, inst.d[0]);
  const u32 *a = lanesOf<u32>(warp, inst.s[0]);
  const u32 *b = lanesOf<u32>(warp, inst.s[1]);
  const u32 *c = lanesOf<u32>(warp, inst.s[2]);
  u32 lut = static_cast<u32>(inst.imm);
  u32 result[kWarpSize];
  for (u32 l = 0; l < kWarpSize; ++l)
    result[l] = logic3(a[l], b[l], c[l], lut);
  for (u32 l : Lanes(mask))
    d[l] = result[l];
}

void addByteOps(HandlerTable &table) {
  table["lop3.b32"] = runLop3;
  table["prmt.b32"] = [](Warp &warp, const Inst &inst, u32 mask) {
    u32 *d = lanesOf<u32>(warp, inst.d[0]);
    const u32 *a = lanesOf<u32>(warp, inst.s[0]);
    const u32 *b = lanesOf<u32>(warp, inst.s[1]);
    const u32 *c = lanesOf<u32>(warp, inst.s[2]);
    for (u32 l : Lanes(mask))
      d[l] = permute(a[l], b[l], c[l], inst.aux);
  };
  table["shf.l.clamp.b32"] = ternary<u32, u32, u32, u32>(
      [](u32 a, u32 b, u32 c) { return funnelLeft(a, b, std::min(c, 32u)); });
  table["shf.l.wrap.b32"] = ternary<u32, u32, u32, u32>(
      [](u32 a, u32 b, u32 c) { return funnelLeft(a, b, c & 31); });
  table["shf.r.clamp.b32"] = ternary<u32, u32, u32, u32>(
      [](u32 a, u32 b, u32 c) { return funnelRight(a, b, std::min(c, 32u)); });
  table["shf.r.wrap.b32"] = ternary<u32, u32, u32, u32>(
      [](u32 a, u32 b, u32 c) { return funnelRight(a, b, c & 31); });
  table["bmsk.clamp.b32"] = binary<u32, u32, u32>([](u32 a, u32 b) {
    u32 ones = b >= 32 ? ~0u : (1u << b) - 1;
    return a >= 32 ? 0 : ones << a;
  });
  table["bmsk.wrap.b32"] = binary<u32, u32, u32>(
      [](u32 a, u32 b) { return ((1u << (b & 31)) - 1) << (a & 31); });
  table["szext.clamp.u32"] = binary<u32, u32, u32>(
      [](u32 a, u32 b) { return b >= 32 ? a : a & ((1u << b) - 1); });
  table["szext.clamp.s32"] = binary<i32, i32, u32>([](i32 a, u32 b) {
    return b == 0 ? 0 : b >= 32 ? a : i32(u32(a) << (32 - b)) >> (32 - b);
  });
}

template <typename A, typename B>
void addDotProduct(HandlerTable &table, const std::string &types) {
  using R =
      std::conditional_t<std::is_signed_v<A> || std::is_signed_v<B>, i32, u32>;
  table["dp4a" + types] = ternary<R, u32, u32, R>([](u32 a, u32 b, R c) {
    u32 sum = u32(c);
    for (u32 i = 0; i < 4; ++i)
      sum += u32(R(A(a >> (8 * i))) * R(B(b >> (8 * i))));
    return R(sum);
  });
}

void addPredicateOps(HandlerTable &table) {
  table["and.pred"] = [](Warp &w, const Inst &i, u32 m) {
    setPredicate(w, i.d[0], m, predicateOf(w, i.s[0]) & predicateOf(w, i.s[1]));
  };
  table["or.pred"] = [](Warp &w, const Inst &i, u32 m) {
    setPredicate(w, i.d[0], m, predicateOf(w, i.s[0]) | predicateOf(w, i.s[1]));
  };
  table["xor.pred"] = [](Warp &w, const Inst &i, u32 m) {
    setPredicate(w, i.d[0], m, predicateOf(w, i.s[0]) ^ predicateOf(w, i.s[1]));
  };
  table["not.pred"] = [](Warp &w, const Inst &i, u32 m) {
    setPredicate(w, i.d[0], m, ~predicateOf(w, i.s[0]));
  };
  table["mov.pred"] = [](Warp &w, const Inst &i, u32 m) {
    setPredicate(w, i.d[0], m, predicateOf(w, i.s[0]));
  };
  // selp.pred is not PTX, but LLVM has been seen to emit it.
  table["selp.pred"] = [](Warp &w, const Inst &i, u32 m) {
    u32 p = predicateOf(w, i.s[2]);
    setPredicate(w, i.d[0], m,
                 (predicateOf(w, i.s[0]) & p) | (predicateOf(w, i.s[1]) & ~p));
  };
}

/// mov.b64 {a, b}, c and back; inst.bytes is the size of a piece.
void addPacking(HandlerTable &table) {
  table["pack"] = [](Warp &warp, const Inst &inst, u32 mask) {
    u32 piece = inst.bytes;
    for (u32 l : Lanes(mask)) {
      u8 whole[16];
      for (u32 i = 0; i < inst.ns; ++i)
        __builtin_memcpy(whole + i * piece,
                         warp.registers + inst.s[i] + l * piece, piece);
      __builtin_memcpy(warp.registers + inst.d[0] + l * piece * inst.ns, whole,
                       piece * inst.ns);
    }
  };
  table["unpack"] = [](Warp &warp, const Inst &inst, u32 mask) {
    u32 piece = inst.bytes;
    for (u32 l : Lanes(mask)) {
      u8 whole[16];
      __builtin_memcpy(whole, warp.registers + inst.s[0] + l * piece * inst.nd,
                       piece * inst.nd);
      for (u32 i = 0; i < inst.nd; ++i)
        if (inst.d[i] != kNone)
          __builtin_memcpy(warp.registers + inst.d[i] + l * piece,
                           whole + i * piece, piece);
    }
  };
}

} // namespace

void addIntegerOps(HandlerTable &table) {
  addArithmetic<u16>(table);
  addArithmetic<i16>(table);
  addArithmetic<u32>(table);
  addArithmetic<i32>(table);
  addArithmetic<u64>(table);
  addArithmetic<i64>(table);
  addWideMultiplication<u16>(table);
  addWideMultiplication<i16>(table);
  addWideMultiplication<u32>(table);
  addWideMultiplication<i32>(table);
  table["add.sat.s32"] = binary<i32, i32, i32>(
      [](i32 a, i32 b) { return saturate<i32>(i64(a) + b); });
  table["sub.sat.s32"] = binary<i32, i32, i32>(
      [](i32 a, i32 b) { return saturate<i32>(i64(a) - b); });
  table["mad.hi.sat.s32"] =
      ternary<i32, i32, i32, i32>([](i32 a, i32 b, i32 c) {
        return saturate<i32>((i64(a) * b >> 32) + c);
      });
  addBitOps<u8>(table);
  addBitOps<u16>(table);
  addBitOps<u32>(table);
  addBitOps<u64>(table);
  table["mov.b128"] = unary<unsigned __int128, unsigned __int128>(
      [](unsigned __int128 a) { return a; });
  addResizesTo<u8>(table);
  addResizesTo<u16>(table);
  addResizesTo<u32>(table);
  addResizesTo<u64>(table);
  addResizesTo<i8>(table);
  addResizesTo<i16>(table);
  addResizesTo<i32>(table);
  addResizesTo<i64>(table);
  addComparisons<u8>(table);
  addComparisons<u16>(table);
  addComparisons<i16>(table);
  addComparisons<u32>(table);
  addComparisons<i32>(table);
  addComparisons<u64>(table);
  addComparisons<i64>(table);
  addFields<u32>(table);
  addFields<i32>(table);
  addFields<u64>(table);
  addFields<i64>(table);
  addInsertAndCounts<u32>(table);
  addInsertAndCounts<u64>(table);
  addByteOps(table);
  addDotProduct<u8, u8>(table, ".u32.u32");
  addDotProduct<i8, i8>(table, ".s32.s32");
  addDotProduct<u8, i8>(table, ".u32.s32");
  addDotProduct<i8, u8>(table, ".s32.u32");
  addPredicateOps(table);
  addPacking(table);
}

} // namespace moe::sim::MOE_SIM_ISA
