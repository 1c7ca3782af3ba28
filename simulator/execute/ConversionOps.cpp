//===- ConversionOps.cpp - The conversions that kernels run most ----------===//
//
// Everything else goes through the generic conversion in RoundingOps.cpp.
//
//===----------------------------------------------------------------------===//

#include "Formats.h"
#include "Handlers.h"
#include "Lanewise.h"

#include <cmath>
#include <limits>

namespace moe::sim::MOE_SIM_ISA {
namespace {

/// Truncates and saturates; NaN gives 0 (f32 source, 32-bit destination).
template <typename D>
D truncate(float a) {
  constexpr double low = std::numeric_limits<D>::min();
  constexpr double high = std::numeric_limits<D>::max();
  double x = a;
  if (!(x > low))
    return x != x ? D(0) : std::numeric_limits<D>::min();
  return x >= high ? std::numeric_limits<D>::max() : D(x);
}

template <bool Relu>
inline float rectified(float x) {
  return Relu && x < 0 ? 0.0f : x;
}

} // namespace

void addConversionOps(HandlerTable &table) {
  table["cvt.rn.f32.s32"] = unary<float, i32>([](i32 a) { return float(a); });
  table["cvt.rn.f32.u32"] = unary<float, u32>([](u32 a) { return float(a); });
  table["cvt.rn.f32.s64"] = unary<float, i64>([](i64 a) { return float(a); });
  table["cvt.rn.f32.u64"] = unary<float, u64>([](u64 a) { return float(a); });
  table["cvt.rn.f64.s32"] = unary<double, i32>([](i32 a) { return double(a); });
  table["cvt.rn.f64.u32"] = unary<double, u32>([](u32 a) { return double(a); });
  table["cvt.rzi.s32.f32"] =
      unary<i32, float>([](float a) { return truncate<i32>(a); });
  table["cvt.rzi.u32.f32"] =
      unary<u32, float>([](float a) { return truncate<u32>(a); });
  table["cvt.f64.f32"] =
      unary<double, float>([](float a) { return double(a); });
  table["cvt.rn.f32.f64"] =
      unary<float, double>([](double a) { return float(a); });
  table["cvt.f32.f16"] = unary<float, u16>([](u16 a) { return f16ToFloat(a); });
  table["cvt.f32.bf16"] =
      unary<float, u16>([](u16 a) { return bf16ToFloat(a); });
  table["cvt.rn.f16.f32"] =
      unary<u16, float>([](float a) { return floatToF16(a); });
  table["cvt.rn.bf16.f32"] =
      unary<u16, float>([](float a) { return floatToBF16(a); });
  // Packs: the first source is the upper half.
  table["cvt.rn.f16x2.f32"] = binary<u32, float, float>([](float a, float b) {
    return u32(floatToF16(a)) << 16 | floatToF16(b);
  });
  table["cvt.rn.bf16x2.f32"] = binary<u32, float, float>([](float a, float b) {
    return u32(floatToBF16(a)) << 16 | floatToBF16(b);
  });
  table["cvt.rn.relu.f16x2.f32"] =
      binary<u32, float, float>([](float a, float b) {
        return u32(floatToF16(rectified<true>(a))) << 16 |
               floatToF16(rectified<true>(b));
      });
  table["cvt.rn.relu.bf16x2.f32"] =
      binary<u32, float, float>([](float a, float b) {
        return u32(floatToBF16(rectified<true>(a))) << 16 |
               floatToBF16(rectified<true>(b));
      });
}

} // namespace moe::sim::MOE_SIM_ISA
