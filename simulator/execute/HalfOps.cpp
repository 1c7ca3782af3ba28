//===- HalfOps.cpp - f16, bf16, f16x2 and bf16x2 instructions -------------===//
//
// Sums, products and quotients of two 16-bit numbers round correctly through
// f32, which has more than twice their precision; fma rounds to odd first.
//
//===----------------------------------------------------------------------===//

#include "Formats.h"
#include "Handlers.h"
#include "Lanewise.h"

#include <cmath>
#include <limits>
#include <string>

namespace moe::sim::MOE_SIM_ISA {
namespace {

struct F16 {
  static float load(u16 x) { return f16ToFloat(x); }
  static u16 store(float x) { return floatToF16(x); }
  /// f16 has subnormals below 2^-14.
  static u16 flush(u16 x) { return (x & 0x7c00) == 0 ? x & 0x8000 : x; }
  static constexpr const char *name = "f16";
};

struct BF16 {
  static float load(u16 x) { return bf16ToFloat(x); }
  static u16 store(float x) { return floatToBF16(x); }
  static u16 flush(u16 x) { return (x & 0x7f80) == 0 ? x & 0x8000 : x; }
  static constexpr const char *name = "bf16";
};

enum class Clamp { None, Sat, Relu };

template <typename T, bool Ftz, Clamp C>
u16 finish(float x) {
  if (C == Clamp::Sat)
    x = x > 0 ? (x < 1 ? x : 1.0f) : 0.0f;
  if (C == Clamp::Relu)
    x = x != x ? x : (x > 0 ? x : 0.0f);
  u16 bits = T::store(x);
  return Ftz ? T::flush(bits) : bits;
}

template <typename T, bool Ftz>
float load(u16 x) {
  return T::load(Ftz ? T::flush(x) : x);
}

template <typename F>
void addPair(HandlerTable &table, const std::string &op,
             const std::string &type, F) {
  table[op + "." + type] =
      binary<u16, u16, u16>([](u16 a, u16 b) { return F{}(a, b); });
  table[op + "." + type + "x2"] = binary<u32, u32, u32>([](u32 a, u32 b) {
    return u32(F{}(u16(a), u16(b))) | u32(F{}(u16(a >> 16), u16(b >> 16)))
                                          << 16;
  });
}

template <typename F>
void addSingle(HandlerTable &table, const std::string &op,
               const std::string &type, F) {
  table[op + "." + type] = unary<u16, u16>([](u16 a) { return F{}(a); });
  table[op + "." + type + "x2"] = unary<u32, u32>(
      [](u32 a) { return u32(F{}(u16(a))) | u32(F{}(u16(a >> 16))) << 16; });
}

template <typename T, bool Ftz, Clamp C>
void addArithmetic(HandlerTable &table) {
  std::string mods =
      std::string(Ftz ? ".ftz" : "") + (C == Clamp::Sat    ? ".sat"
                                        : C == Clamp::Relu ? ".relu"
                                                           : "");
  auto op = [&](const char *name) { return name + mods; };
  addPair(table, op("add"), T::name, [](u16 a, u16 b) {
    return finish<T, Ftz, C>(load<T, Ftz>(a) + load<T, Ftz>(b));
  });
  addPair(table, op("sub"), T::name, [](u16 a, u16 b) {
    return finish<T, Ftz, C>(load<T, Ftz>(a) - load<T, Ftz>(b));
  });
  addPair(table, op("mul"), T::name, [](u16 a, u16 b) {
    return finish<T, Ftz, C>(load<T, Ftz>(a) * load<T, Ftz>(b));
  });
  auto fma = [](u16 a, u16 b, u16 c) {
    return finish<T, Ftz, C>(
        fmaOdd(load<T, Ftz>(a), load<T, Ftz>(b), load<T, Ftz>(c)));
  };
  using Fma = decltype(fma);
  table[op("fma") + "." + T::name] = ternary<u16, u16, u16, u16>(
      [](u16 a, u16 b, u16 c) { return Fma{}(a, b, c); });
  table[op("fma") + "." + T::name + "x2"] =
      ternary<u32, u32, u32, u32>([](u32 a, u32 b, u32 c) {
        return u32(Fma{}(u16(a), u16(b), u16(c))) |
               u32(Fma{}(u16(a >> 16), u16(b >> 16), u16(c >> 16))) << 16;
      });
}

template <typename T, bool Propagate, bool Max>
u16 pick(u16 a, u16 b) {
  float x = T::load(a), y = T::load(b);
  if (x != x || y != y) {
    if (Propagate || (x != x && y != y))
      return 0x7fff;
    return x != x ? b : a;
  }
  if (x == y)
    return std::signbit(x) != Max ? a : b;
  return (x < y) != Max ? a : b;
}

template <typename T, bool Ftz>
void addMinMax(HandlerTable &table) {
  std::string f = Ftz ? ".ftz" : "";
  auto flush = [](u16 x) { return Ftz ? T::flush(x) : x; };
  using Flush = decltype(flush);
  addPair(table, "min" + f, T::name, [](u16 a, u16 b) {
    return pick<T, false, false>(Flush{}(a), Flush{}(b));
  });
  addPair(table, "max" + f, T::name, [](u16 a, u16 b) {
    return pick<T, false, true>(Flush{}(a), Flush{}(b));
  });
  addPair(table, "min" + f + ".NaN", T::name, [](u16 a, u16 b) {
    return pick<T, true, false>(Flush{}(a), Flush{}(b));
  });
  addPair(table, "max" + f + ".NaN", T::name, [](u16 a, u16 b) {
    return pick<T, true, true>(Flush{}(a), Flush{}(b));
  });
  addSingle(table, "neg" + f, T::name,
            [](u16 a) { return u16(Flush{}(a) ^ 0x8000); });
  addSingle(table, "abs" + f, T::name,
            [](u16 a) { return u16(Flush{}(a) & 0x7fff); });
  std::string approx = ".approx" + f;
  addSingle(table, "ex2" + approx, T::name, [](u16 a) {
    return finish<T, Ftz, Clamp::None>(std::exp2(load<T, Ftz>(a)));
  });
  addSingle(table, "tanh" + approx, T::name, [](u16 a) {
    return finish<T, Ftz, Clamp::None>(std::tanh(load<T, Ftz>(a)));
  });
}

template <typename T, typename F>
void addComparison(HandlerTable &table, const std::string &op, F) {
  table["setp." + op + "." + T::name] =
      comparison<u16>([](u16 a, u16 b) { return F{}(T::load(a), T::load(b)); });
  // Two comparisons into p|q.
  table["setp." + op + "." + T::name + "x2"] = [](Warp &warp, const Inst &inst,
                                                  u32 mask) {
    const u32 *a = lanesOf<u32>(warp, inst.s[0]);
    const u32 *b = lanesOf<u32>(warp, inst.s[1]);
    u32 low = 0, high = 0;
    for (u32 l = 0; l < kWarpSize; ++l) {
      low |= u32(F{}(T::load(u16(a[l])), T::load(u16(b[l])))) << l;
      high |= u32(F{}(T::load(u16(a[l] >> 16)), T::load(u16(b[l] >> 16)))) << l;
    }
    setPredicate(warp, inst.d[0], mask, low);
    if (inst.nd > 1)
      setPredicate(warp, inst.d[1], mask, high);
  };
  auto value = [](u16 a, u16 b) { return F{}(T::load(a), T::load(b)); };
  table["set." + op + "." + T::name + "." + T::name] =
      binary<u16, u16, u16>([](u16 a, u16 b) {
        return T::store(decltype(value){}(a, b) ? 1.0f : 0.0f);
      });
  table["set." + op + "." + T::name + "x2." + T::name + "x2"] =
      binary<u32, u32, u32>([](u32 a, u32 b) {
        auto one = [](u16 x, u16 y) {
          return u32(T::store(decltype(value){}(x, y) ? 1.0f : 0.0f));
        };
        return one(u16(a), u16(b)) | one(u16(a >> 16), u16(b >> 16)) << 16;
      });
}

template <typename T>
void addComparisons(HandlerTable &table) {
  auto add = [&](const char *op, auto f) { addComparison<T>(table, op, f); };
  add("eq", [](float a, float b) { return a == b; });
  add("ne", [](float a, float b) { return a < b || a > b; });
  add("lt", [](float a, float b) { return a < b; });
  add("le", [](float a, float b) { return a <= b; });
  add("gt", [](float a, float b) { return a > b; });
  add("ge", [](float a, float b) { return a >= b; });
  add("equ", [](float a, float b) { return !(a < b || a > b); });
  add("neu", [](float a, float b) { return a != b; });
  add("ltu", [](float a, float b) { return !(a >= b); });
  add("leu", [](float a, float b) { return !(a > b); });
  add("gtu", [](float a, float b) { return !(a <= b); });
  add("geu", [](float a, float b) { return !(a < b); });
  add("num", [](float a, float b) { return a == a && b == b; });
  add("nan", [](float a, float b) { return a != a || b != b; });
}

template <typename T>
void addType(HandlerTable &table) {
  addArithmetic<T, false, Clamp::None>(table);
  addArithmetic<T, true, Clamp::None>(table);
  addArithmetic<T, false, Clamp::Sat>(table);
  addArithmetic<T, true, Clamp::Sat>(table);
  addArithmetic<T, false, Clamp::Relu>(table);
  addArithmetic<T, true, Clamp::Relu>(table);
  addMinMax<T, false>(table);
  addMinMax<T, true>(table);
  addComparisons<T>(table);
}

} // namespace

void addHalfOps(HandlerTable &table) {
  addType<F16>(table);
  addType<BF16>(table);
}

} // namespace moe::sim::MOE_SIM_ISA
