//===- FloatOps.cpp - f32 and f64 instructions ----------------------------===//
//
// Rounding to nearest even; the other roundings are in DirectedOps.cpp.
//
//===----------------------------------------------------------------------===//

#include "Formats.h"
#include "Handlers.h"
#include "Lanewise.h"

#include <cmath>
#include <limits>
#include <string>
#include <type_traits>

namespace moe::sim::MOE_SIM_ISA {
namespace {

template <bool Ftz>
inline float in(float x) {
  return Ftz ? flushToZero(x) : x;
}

/// The NaN that every f32 instruction returns.
const float kNaN = std::bit_cast<float>(0x7fffffffu);

/// .sat clamps to [0, 1] and turns NaN into 0.
template <bool Ftz, bool Sat>
inline float out(float x) {
  if (Ftz)
    x = flushToZero(x);
  if (Sat)
    return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f;
  return x == x ? x : kNaN;
}

//===----------------------------------------------------------------------===//
// Arithmetic
//===----------------------------------------------------------------------===//

template <bool Ftz, bool Sat>
void addArithmetic(HandlerTable &table) {
  std::string t = std::string(Ftz ? ".ftz" : "") + (Sat ? ".sat" : "") + ".f32";
  table["add" + t] = binary<float, float, float>(
      [](float a, float b) { return out<Ftz, Sat>(in<Ftz>(a) + in<Ftz>(b)); });
  table["sub" + t] = binary<float, float, float>(
      [](float a, float b) { return out<Ftz, Sat>(in<Ftz>(a) - in<Ftz>(b)); });
  table["mul" + t] = binary<float, float, float>(
      [](float a, float b) { return out<Ftz, Sat>(in<Ftz>(a) * in<Ftz>(b)); });
  table["fma" + t] =
      ternary<float, float, float, float>([](float a, float b, float c) {
        return out<Ftz, Sat>(std::fma(in<Ftz>(a), in<Ftz>(b), in<Ftz>(c)));
      });
}

/// -0 is less than +0; a NaN loses against a number, unless `.NaN`.
template <typename T, bool Propagate, bool Max>
inline T pick(T a, T b) {
  if (a != a || b != b) {
    if (Propagate || (a != a && b != b))
      return sizeof(T) == 4 ? T(kNaN) : std::numeric_limits<T>::quiet_NaN();
    return a != a ? b : a;
  }
  if (a == b)
    return std::signbit(a) != Max ? a : b;
  return (a < b) != Max ? a : b;
}

template <bool Ftz>
void addUnaryAndMinMax(HandlerTable &table) {
  std::string t = std::string(Ftz ? ".ftz" : "") + ".f32";
  using F = float;
  table["neg" + t] = unary<F, F>([](F a) { return -in<Ftz>(a); });
  table["abs" + t] = unary<F, F>([](F a) { return std::fabs(in<Ftz>(a)); });
  table["min" + t] = binary<F, F, F>(
      [](F a, F b) { return pick<F, false, false>(in<Ftz>(a), in<Ftz>(b)); });
  table["max" + t] = binary<F, F, F>(
      [](F a, F b) { return pick<F, false, true>(in<Ftz>(a), in<Ftz>(b)); });
  std::string nan = std::string(Ftz ? ".ftz" : "") + ".NaN.f32";
  table["min" + nan] = binary<F, F, F>(
      [](F a, F b) { return pick<F, true, false>(in<Ftz>(a), in<Ftz>(b)); });
  table["max" + nan] = binary<F, F, F>(
      [](F a, F b) { return pick<F, true, true>(in<Ftz>(a), in<Ftz>(b)); });
  table["div" + t] = binary<F, F, F>(
      [](F a, F b) { return out<Ftz, false>(in<Ftz>(a) / in<Ftz>(b)); });
  table["rcp" + t] =
      unary<F, F>([](F a) { return out<Ftz, false>(1.0f / in<Ftz>(a)); });
  table["sqrt" + t] =
      unary<F, F>([](F a) { return out<Ftz, false>(std::sqrt(in<Ftz>(a))); });
}

void addDouble(HandlerTable &table) {
  using D = double;
  table["add.f64"] = binary<D, D, D>([](D a, D b) { return a + b; });
  table["sub.f64"] = binary<D, D, D>([](D a, D b) { return a - b; });
  table["mul.f64"] = binary<D, D, D>([](D a, D b) { return a * b; });
  table["div.f64"] = binary<D, D, D>([](D a, D b) { return a / b; });
  table["fma.f64"] =
      ternary<D, D, D, D>([](D a, D b, D c) { return std::fma(a, b, c); });
  table["neg.f64"] = unary<D, D>([](D a) { return -a; });
  table["abs.f64"] = unary<D, D>([](D a) { return std::fabs(a); });
  table["rcp.f64"] = unary<D, D>([](D a) { return 1.0 / a; });
  table["sqrt.f64"] = unary<D, D>([](D a) { return std::sqrt(a); });
  table["rsqrt.approx.f64"] = unary<D, D>([](D a) { return 1 / std::sqrt(a); });
  table["min.f64"] =
      binary<D, D, D>([](D a, D b) { return pick<D, false, false>(a, b); });
  table["max.f64"] =
      binary<D, D, D>([](D a, D b) { return pick<D, false, true>(a, b); });
  table["copysign.f64"] =
      binary<D, D, D>([](D a, D b) { return std::copysign(b, a); });
  table["copysign.f32"] = binary<float, float, float>(
      [](float a, float b) { return std::copysign(b, a); });
}

//===----------------------------------------------------------------------===//
// Approximations
//===----------------------------------------------------------------------===//

/// Moves a result by up to two units in the last place.
float perturb(float x, Random &random) {
  if (x == 0 || !std::isfinite(x))
    return x;
  u32 bits = std::bit_cast<u32>(x);
  float moved = std::bit_cast<float>(bits + random.below(5) - 2);
  return std::isfinite(moved) && (moved > 0) == (x > 0) ? moved : x;
}

template <bool Ftz, typename F>
Handler approximation(F) {
  return [](Warp &warp, const Inst &inst, u32 mask) {
    float *d = lanesOf<float>(warp, inst.d[0]);
    const float *a = lanesOf<float>(warp, inst.s[0]);
    for (u32 l : Lanes(mask))
      d[l] = out<Ftz, false>(F{}(in<Ftz>(a[l])));
    if (warp.block->launch->numerics == Numerics::Perturbed)
      for (u32 l : Lanes(mask))
        d[l] = perturb(d[l], warp.block->random);
  };
}

template <bool Ftz>
void addApproximations(HandlerTable &table) {
  std::string t = std::string(".approx") + (Ftz ? ".ftz" : "") + ".f32";
  auto add = [&](const char *op, auto f) {
    table[op + t] = approximation<Ftz>(f);
  };
  add("ex2", [](float a) { return std::exp2(a); });
  add("lg2", [](float a) { return std::log2(a); });
  add("rcp", [](float a) { return 1.0f / a; });
  add("sqrt", [](float a) { return std::sqrt(a); });
  // In double: 1 / sqrt in float would be off by more than the hardware is.
  add("rsqrt", [](float a) {
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a)));
  });
  add("sin", [](float a) { return std::sin(a); });
  add("cos", [](float a) { return std::cos(a); });
  add("tanh", [](float a) { return std::tanh(a); });
  table["div" + t] = binary<float, float, float>([](float a, float b) {
    a = in<Ftz>(a);
    b = in<Ftz>(b);
    // Divisors beyond 2^126 give 0 (PTX ISA, div.approx).
    if (std::fabs(b) > 0x1p126f && std::isfinite(b))
      return std::isinf(a) ? kNaN
                           : std::copysign(0.0f, a) * std::copysign(1.0f, b);
    return out<Ftz, false>(a / b);
  });
}

//===----------------------------------------------------------------------===//
// Comparisons
//===----------------------------------------------------------------------===//

template <typename T, bool Ftz>
inline T operand(T x) {
  if constexpr (Ftz)
    return flushToZero(x);
  else
    return x;
}

template <typename T, bool Ftz, typename F>
void addComparison(HandlerTable &table, const char *op, F) {
  std::string type = std::is_same_v<T, float> ? "f32" : "f64";
  std::string prefix = std::string(op) + (Ftz ? ".ftz" : "");
  auto f = [](T a, T b) { return F{}(operand<T, Ftz>(a), operand<T, Ftz>(b)); };
  table["setp." + prefix + "." + type] = comparison<T>(f);
  table["set." + prefix + ".u32." + type] = comparisonValue<u32, T>(f);
  table["set." + prefix + ".f32." + type] = comparisonValue<float, T>(f);
}

template <typename T, bool Ftz>
void addComparisons(HandlerTable &table) {
  auto add = [&](const char *op, auto f) {
    addComparison<T, Ftz>(table, op, f);
  };
  add("eq", [](T a, T b) { return a == b; });
  add("ne", [](T a, T b) { return a < b || a > b; });
  add("lt", [](T a, T b) { return a < b; });
  add("le", [](T a, T b) { return a <= b; });
  add("gt", [](T a, T b) { return a > b; });
  add("ge", [](T a, T b) { return a >= b; });
  add("equ", [](T a, T b) { return !(a < b || a > b); });
  add("neu", [](T a, T b) { return a != b; });
  add("ltu", [](T a, T b) { return !(a >= b); });
  add("leu", [](T a, T b) { return !(a > b); });
  add("gtu", [](T a, T b) { return !(a <= b); });
  add("geu", [](T a, T b) { return !(a < b); });
  add("num", [](T a, T b) { return a == a && b == b; });
  add("nan", [](T a, T b) { return a != a || b != b; });
}

template <typename T>
void addProperties(HandlerTable &table) {
  std::string type = std::is_same_v<T, float> ? ".f32" : ".f64";
  auto add = [&](const char *property, auto f) {
    using F = decltype(f);
    table[std::string("testp.") + property + type] =
        [](Warp &warp, const Inst &inst, u32 mask) {
          const T *a = lanesOf<T>(warp, inst.s[0]);
          u32 result = 0;
          for (u32 l = 0; l < kWarpSize; ++l)
            result |= static_cast<u32>(F{}(a[l])) << l;
          setPredicate(warp, inst.d[0], mask, result);
        };
  };
  add("finite", [](T a) { return std::isfinite(a); });
  add("infinite", [](T a) { return std::isinf(a); });
  add("number", [](T a) { return a == a; });
  add("notanumber", [](T a) { return a != a; });
  add("normal", [](T a) { return std::isnormal(a); });
  add("subnormal", [](T a) { return std::fpclassify(a) == FP_SUBNORMAL; });
}

} // namespace

void addFloatOps(HandlerTable &table) {
  addArithmetic<false, false>(table);
  addArithmetic<true, false>(table);
  addArithmetic<false, true>(table);
  addArithmetic<true, true>(table);
  addUnaryAndMinMax<false>(table);
  addUnaryAndMinMax<true>(table);
  addDouble(table);
  addApproximations<false>(table);
  addApproximations<true>(table);
  addComparisons<float, false>(table);
  addComparisons<float, true>(table);
  addComparisons<double, false>(table);
  addProperties<float>(table);
  addProperties<double>(table);
}

} // namespace moe::sim::MOE_SIM_ISA
