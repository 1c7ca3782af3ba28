//===- Lanewise.h - Loops over the lanes of a warp --------------*- C++ -*-===//
//
// Included by the files that are compiled once per instruction set; everything
// here has internal linkage so that no copy for AVX2 can replace the portable
// one.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_SIMULATOR_LANEWISE_H
#define MOE_LIB_SIMULATOR_LANEWISE_H

#include "Machine.h"

#include <cstring>

namespace moe::sim {
namespace {

// A destination is either a source itself (same width, same lane) or apart
// from it, so lanes never depend on each other: that is what ivdep says.

template <typename D, typename A, typename F>
Handler unary(F) {
  return [](Warp &warp, const Inst &inst, u32 mask) {
    D *d = lanesOf<D>(warp, inst.d[0]);
    const A *a = lanesOf<A>(warp, inst.s[0]);
    if (mask == kAllLanes) {
#pragma GCC ivdep
      for (u32 l = 0; l < kWarpSize; ++l)
        d[l] = F{}(a[l]);
      return;
    }
    for (u32 l : Lanes(mask))
      d[l] = F{}(a[l]);
  };
}

template <typename D, typename A, typename B, typename F>
Handler binary(F) {
  return [](Warp &warp, const Inst &inst, u32 mask) {
    D *d = lanesOf<D>(warp, inst.d[0]);
    const A *a = lanesOf<A>(warp, inst.s[0]);
    const B *b = lanesOf<B>(warp, inst.s[1]);
    if (mask == kAllLanes) {
#pragma GCC ivdep
      for (u32 l = 0; l < kWarpSize; ++l)
        d[l] = F{}(a[l], b[l]);
      return;
    }
    for (u32 l : Lanes(mask))
      d[l] = F{}(a[l], b[l]);
  };
}

template <typename D, typename A, typename B, typename C, typename F>
Handler ternary(F) {
  return [](Warp &warp, const Inst &inst, u32 mask) {
    D *d = lanesOf<D>(warp, inst.d[0]);
    const A *a = lanesOf<A>(warp, inst.s[0]);
    const B *b = lanesOf<B>(warp, inst.s[1]);
    const C *c = lanesOf<C>(warp, inst.s[2]);
    if (mask == kAllLanes) {
#pragma GCC ivdep
      for (u32 l = 0; l < kWarpSize; ++l)
        d[l] = F{}(a[l], b[l], c[l]);
      return;
    }
    for (u32 l : Lanes(mask))
      d[l] = F{}(a[l], b[l], c[l]);
  };
}

/// Bit l of the result is holds[l], which is 0 or 1.
inline u32 packBits(const u8 *holds) {
  u32 bits = 0;
  for (u32 i = 0; i < 4; ++i) {
    u64 eight;
    std::memcpy(&eight, holds + 8 * i, sizeof eight);
    // The product's top byte collects bit 0 of all bytes, the lowest first.
    bits |= static_cast<u32>(eight * 0x0102040810204080 >> 56) << 8 * i;
  }
  return bits;
}

/// setp d|q, a, b {, c}: the comparison combined with c (inst.aux: 0 none,
/// 1 and, 2 or, 3 xor), and its complement combined in the same way.
inline void storeComparison(Warp &warp, const Inst &inst, u32 mask,
                            u32 result) {
  u32 inverse = ~result;
  if (inst.aux) {
    u32 c = predicateOf(warp, inst.s[2]);
    auto combine = [&](u32 value) {
      return inst.aux == 1 ? value & c : inst.aux == 2 ? value | c : value ^ c;
    };
    result = combine(result);
    inverse = combine(inverse);
  }
  setPredicate(warp, inst.d[0], mask, result);
  if (inst.nd > 1)
    setPredicate(warp, inst.d[1], mask, inverse);
}

template <typename A, typename F>
Handler comparison(F) {
  return [](Warp &warp, const Inst &inst, u32 mask) {
    const A *a = lanesOf<A>(warp, inst.s[0]);
    const A *b = lanesOf<A>(warp, inst.s[1]);
    alignas(32) u8 holds[kWarpSize];
    for (u32 l = 0; l < kWarpSize; ++l)
      holds[l] = F{}(a[l], b[l]) ? 1 : 0;
    storeComparison(warp, inst, mask, packBits(holds));
  };
}

/// set.cmp.dtype.stype: all ones or 1.0 where the comparison holds.
template <typename D, typename A, typename F>
Handler comparisonValue(F) {
  return [](Warp &warp, const Inst &inst, u32 mask) {
    D *d = lanesOf<D>(warp, inst.d[0]);
    const A *a = lanesOf<A>(warp, inst.s[0]);
    const A *b = lanesOf<A>(warp, inst.s[1]);
    for (u32 l : Lanes(mask)) {
      bool holds = F{}(a[l], b[l]);
      if (inst.aux) {
        bool c = predicateOf(warp, inst.s[2]) >> l & 1;
        holds = inst.aux == 1   ? holds && c
                : inst.aux == 2 ? holds || c
                                : holds != c;
      }
      if constexpr (std::is_floating_point_v<D>)
        d[l] = holds ? D(1) : D(0);
      else
        d[l] = holds ? D(-1) : D(0);
    }
  };
}

} // namespace
} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_LANEWISE_H
