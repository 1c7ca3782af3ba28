//===- WarpOps.cpp - Shuffles, votes, matches and reductions --------------===//
//
// These run when all live lanes of the membermask have come together
// (Scheduler.cpp); `mask` is those lanes.
//
//===----------------------------------------------------------------------===//

#include "Handlers.h"
#include "checks/DefinedBits.h"
#include "memory/Memory.h"

#include <algorithm>
#include <limits>
#include <string>

namespace moe::sim {
namespace {

enum ShuffleMode : u8 { Up, Down, Butterfly, Index };

/// The lane that `lane` reads from, and whether it lies in its segment.
u32 shuffleSource(u8 mode, u32 lane, u32 b, u32 c, bool &inRange) {
  u32 segment = c >> 8 & 31, clamp = c & 31;
  u32 maxLane = (lane & segment) | (clamp & ~segment);
  u32 minLane = lane & segment;
  i32 source = 0;
  b &= 31;
  switch (mode) {
  case Up:
    source = static_cast<i32>(lane) - static_cast<i32>(b);
    inRange = source >= static_cast<i32>(maxLane);
    break;
  case Down:
    source = static_cast<i32>(lane + b);
    inRange = source <= static_cast<i32>(maxLane);
    break;
  case Butterfly:
    source = static_cast<i32>(lane ^ b);
    inRange = source <= static_cast<i32>(maxLane);
    break;
  default:
    source = static_cast<i32>(minLane | (b & ~segment));
    inRange = source <= static_cast<i32>(maxLane);
    break;
  }
  return inRange ? static_cast<u32>(source) : lane;
}

void runShuffle(Warp &warp, const Inst &inst, u32 mask) {
  u32 value[kWarpSize], result[kWarpSize], source[kWarpSize];
  std::copy_n(lanesOf<u32>(warp, inst.s[0]), kWarpSize, value);
  const u32 *b = lanesOf<u32>(warp, inst.s[1]);
  const u32 *c = lanesOf<u32>(warp, inst.s[2]);
  u32 inRange = 0;
  for (u32 l : Lanes(mask)) {
    bool ok;
    u32 from = source[l] = shuffleSource(inst.aux, l, b[l], c[l], ok);
    inRange |= static_cast<u32>(ok) << l;
    // A lane that takes no part has no value to give: anything may come.
    bool present = mask >> from & 1;
    result[l] = present ? value[from] : 0xCDCDCDCD;
  }
  if (inst.d[0] != kNone) {
    u32 *d = lanesOf<u32>(warp, inst.d[0]);
    for (u32 l : Lanes(mask))
      d[l] = result[l];
  }
  if (inst.nd > 1)
    setPredicate(warp, inst.d[1], mask, inRange);
  if (inst.tracked)
    shuffleDefinedness(warp, inst, mask, source);
}

enum VoteMode : u8 { All, Any, Uniform, Ballot };

void runVote(Warp &warp, const Inst &inst, u32 mask) {
  u32 ballot = predicateOf(warp, inst.s[0]) & mask;
  if (inst.aux == Ballot) {
    u32 *d = lanesOf<u32>(warp, inst.d[0]);
    for (u32 l : Lanes(mask))
      d[l] = ballot;
    return;
  }
  bool result = inst.aux == All   ? ballot == mask
                : inst.aux == Any ? ballot != 0
                                  : ballot == 0 || ballot == mask;
  setPredicate(warp, inst.d[0], mask, result ? ~0u : 0);
}

template <typename T>
void runMatchAny(Warp &warp, const Inst &inst, u32 mask) {
  const T *a = lanesOf<T>(warp, inst.s[0]);
  u32 result[kWarpSize];
  for (u32 l : Lanes(mask)) {
    result[l] = 0;
    for (u32 other : Lanes(mask))
      result[l] |= static_cast<u32>(a[other] == a[l]) << other;
  }
  u32 *d = lanesOf<u32>(warp, inst.d[0]);
  for (u32 l : Lanes(mask))
    d[l] = result[l];
}

template <typename T>
void runMatchAll(Warp &warp, const Inst &inst, u32 mask) {
  const T *a = lanesOf<T>(warp, inst.s[0]);
  T first = a[__builtin_ctz(mask)];
  bool all = true;
  for (u32 l : Lanes(mask))
    all &= a[l] == first;
  if (inst.d[0] != kNone) {
    u32 *d = lanesOf<u32>(warp, inst.d[0]);
    for (u32 l : Lanes(mask))
      d[l] = all ? mask : 0;
  }
  if (inst.nd > 1)
    setPredicate(warp, inst.d[1], mask, all ? ~0u : 0);
}

template <typename T, typename F>
Handler reduction(F) {
  return [](Warp &warp, const Inst &inst, u32 mask) {
    const T *a = lanesOf<T>(warp, inst.s[0]);
    T result = a[__builtin_ctz(mask)];
    for (u32 l : Lanes(mask & (mask - 1)))
      result = F{}(result, a[l]);
    T *d = lanesOf<T>(warp, inst.d[0]);
    for (u32 l : Lanes(mask))
      d[l] = result;
  };
}

/// redux.f32 min and max: NaN is left out, or with .NaN wins.
template <bool Max, bool Abs, bool Propagate>
float pickFloat(float a, float b) {
  if (a != a || b != b) {
    if (Propagate || (a != a && b != b))
      return std::numeric_limits<float>::quiet_NaN();
    return a != a ? b : a;
  }
  if (Abs) {
    a = a < 0 ? -a : a;
    b = b < 0 ? -b : b;
  }
  return (a < b) != Max ? a : b;
}

void addReductions(HandlerTable &table) {
  table["redux.add.u32"] = reduction<u32>([](u32 a, u32 b) { return a + b; });
  table["redux.add.s32"] = table["redux.add.u32"];
  table["redux.and.b32"] = reduction<u32>([](u32 a, u32 b) { return a & b; });
  table["redux.or.b32"] = reduction<u32>([](u32 a, u32 b) { return a | b; });
  table["redux.xor.b32"] = reduction<u32>([](u32 a, u32 b) { return a ^ b; });
  table["redux.min.u32"] =
      reduction<u32>([](u32 a, u32 b) { return std::min(a, b); });
  table["redux.max.u32"] =
      reduction<u32>([](u32 a, u32 b) { return std::max(a, b); });
  table["redux.min.s32"] =
      reduction<i32>([](i32 a, i32 b) { return std::min(a, b); });
  table["redux.max.s32"] =
      reduction<i32>([](i32 a, i32 b) { return std::max(a, b); });
  table["redux.min.f32"] = reduction<float>(
      [](float a, float b) { return pickFloat<false, false, false>(a, b); });
  table["redux.max.f32"] = reduction<float>(
      [](float a, float b) { return pickFloat<true, false, false>(a, b); });
  table["redux.min.NaN.f32"] = reduction<float>(
      [](float a, float b) { return pickFloat<false, false, true>(a, b); });
  table["redux.max.NaN.f32"] = reduction<float>(
      [](float a, float b) { return pickFloat<true, false, true>(a, b); });
  table["redux.min.abs.f32"] = reduction<float>(
      [](float a, float b) { return pickFloat<false, true, false>(a, b); });
  table["redux.min.abs.NaN.f32"] = reduction<float>(
      [](float a, float b) { return pickFloat<false, true, true>(a, b); });
  table["redux.max.abs.NaN.f32"] = reduction<float>(
      [](float a, float b) { return pickFloat<true, true, true>(a, b); });
  table["redux.max.abs.f32"] = reduction<float>(
      [](float a, float b) { return pickFloat<true, true, false>(a, b); });
}

/// With seed 0 the lowest lane, as on the chips that are known.
u32 chooseLeader(u64 seed, u32 mask) {
  if (seed == 0)
    return __builtin_ctz(mask);
  u32 rank = Random(seed ^ mask).below(__builtin_popcount(mask));
  while (rank-- > 0)
    mask &= mask - 1;
  return __builtin_ctz(mask);
}

} // namespace

void addWarpOps(HandlerTable &table) {
  table["shfl"] = runShuffle;
  table["vote"] = runVote;
  table["match.any.b32"] = runMatchAny<u32>;
  table["match.any.b64"] = runMatchAny<u64>;
  table["match.all.b32"] = runMatchAll<u32>;
  table["match.all.b64"] = runMatchAll<u64>;
  addReductions(table);
  table["activemask"] = [](Warp &warp, const Inst &inst, u32 mask) {
    u32 *d = lanesOf<u32>(warp, inst.d[0]);
    for (u32 l : Lanes(mask))
      d[l] = mask;
  };
  // elect.sync d|p: one lane is the leader, the same for equal masks.
  table["elect"] = [](Warp &warp, const Inst &inst, u32 mask) {
    u32 leader = chooseLeader(warp.block->launch->config->seed, mask);
    if (inst.d[0] != kNone)
      for (u32 l : Lanes(mask))
        lanesOf<u32>(warp, inst.d[0])[l] = leader;
    setPredicate(warp, inst.d[1], mask, 1u << leader);
  };
}

} // namespace moe::sim
