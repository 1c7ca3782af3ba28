//===- PackedOps.cpp - Two numbers in a register --------------------------===//

#include "PackedOps.h"
#include "Formats.h"
#include "Lanewise.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace moe::sim {
namespace {

/// The halves of a register as numbers of type T.
template <typename T, typename Bits>
struct Pair {
  T low;
  T high;

  static Pair of(Bits bits) { return std::bit_cast<Pair>(bits); }
  Bits bits() const { return std::bit_cast<Bits>(*this); }
};

template <typename T, typename F>
Handler integerPair(F) {
  return binary<u32, u32, u32>([](u32 a, u32 b) {
    using P = Pair<T, u32>;
    P x = P::of(a), y = P::of(b);
    return P{static_cast<T>(F{}(x.low, y.low)),
             static_cast<T>(F{}(x.high, y.high))}
        .bits();
  });
}

template <typename T>
void addIntegerPairs(HandlerTable &table, const std::string &type) {
  table["add." + type] = integerPair<T>([](T a, T b) { return a + b; });
  table["min." + type] =
      integerPair<T>([](T a, T b) { return std::min(a, b); });
  table["max." + type] =
      integerPair<T>([](T a, T b) { return std::max(a, b); });
}

template <bool Flush>
float flushed(float x) {
  return Flush ? flushToZero(x) : x;
}

template <bool Flush, typename F>
Handler floatPair(F) {
  return binary<u64, u64, u64>([](u64 a, u64 b) {
    using P = Pair<float, u64>;
    P x = P::of(a), y = P::of(b);
    auto half = [](float u, float v) {
      return flushed<Flush>(F{}(flushed<Flush>(u), flushed<Flush>(v)));
    };
    return P{half(x.low, y.low), half(x.high, y.high)}.bits();
  });
}

template <bool Flush>
void addFloatPairs(HandlerTable &table, const std::string &suffix) {
  table["add" + suffix] =
      floatPair<Flush>([](float a, float b) { return a + b; });
  table["sub" + suffix] =
      floatPair<Flush>([](float a, float b) { return a - b; });
  table["mul" + suffix] =
      floatPair<Flush>([](float a, float b) { return a * b; });
  table["fma" + suffix] = ternary<u64, u64, u64, u64>([](u64 a, u64 b, u64 c) {
    using P = Pair<float, u64>;
    P x = P::of(a), y = P::of(b), z = P::of(c);
    auto half = [](float u, float v, float w) {
      return flushed<Flush>(
          std::fma(flushed<Flush>(u), flushed<Flush>(v), flushed<Flush>(w)));
    };
    return P{half(x.low, y.low, z.low), half(x.high, y.high, z.high)}.bits();
  });
}

} // namespace

void addPackedOps(HandlerTable &table) {
  addIntegerPairs<u16>(table, "u16x2");
  addIntegerPairs<i16>(table, "s16x2");
  table["min.relu.s16x2"] = integerPair<i16>(
      [](i16 a, i16 b) { return std::max<i16>(0, std::min(a, b)); });
  table["max.relu.s16x2"] = integerPair<i16>(
      [](i16 a, i16 b) { return std::max<i16>(0, std::max(a, b)); });
  table["min.relu.s32"] = binary<i32, i32, i32>(
      [](i32 a, i32 b) { return std::max(0, std::min(a, b)); });
  table["max.relu.s32"] = binary<i32, i32, i32>(
      [](i32 a, i32 b) { return std::max(0, std::max(a, b)); });
  addFloatPairs<false>(table, ".f32x2");
  addFloatPairs<true>(table, ".ftz.f32x2");
}

} // namespace moe::sim
