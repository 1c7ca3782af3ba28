//===- AtomicOps.cpp - atom and red ---------------------------------------===//
//
// Lanes are served in random order, so a kernel that depends on the order of
// its floating-point atomics gives other bits for other seeds.
//
//===----------------------------------------------------------------------===//

#include "Formats.h"
#include "Handlers.h"
#include "memory/Memory.h"

#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

namespace moe::sim {
namespace {

struct F16 {
  using Bits = u16;
  static float load(u16 x) { return f16ToFloat(x); }
  static u16 store(float x) { return floatToF16(x); }
};
struct BF16 {
  using Bits = u16;
  static float load(u16 x) { return bf16ToFloat(x); }
  static u16 store(float x) { return floatToBF16(x); }
};

/// A lock that is always free again when the next warp comes finds no fault:
/// where kernels wait for each other, warps and blocks lose their turn behind
/// an atomic now and then.
void maybeYield(Warp &warp) {
  Block &block = *warp.block;
  if (!block.launch->kernel->spins || !block.random.oneIn(4))
    return;
  warp.yields = true;
  block.executor->endsTurn |= block.random.oneIn(4);
}

/// inst.aux2: the number of source values is in inst.vec. The operation maps
/// (old, operand, third) to the new value.
template <typename T, typename F>
Handler atomic(F) {
  return [](Warp &warp, const Inst &inst, u32 mask) {
    MemoryRequest request;
    request.bytes = sizeof(T) * inst.vec;
    request.read = request.write = true;
    request.flags = stampFlags(inst);
    Places places;
    resolveOperand(warp, inst, mask, request, places);
    u32 good = places.good;
    u8 **pointers = places.pointers;
    u32 order[kWarpSize];
    for (u32 l = 0; l < kWarpSize; ++l)
      order[l] = l;
    warp.block->random.shuffle(order, kWarpSize);
    warp.block->executor->counters.totals.atomics += __builtin_popcount(good);
    u32 first = 1, third = 1 + inst.vec;
    for (u32 l : order) {
      if (!(good >> l & 1))
        continue;
      u64 key = reinterpret_cast<u64>(pointers[l]);
      observe(warp, l, key, inst.order, inst.scope);
      for (u32 i = 0; i < inst.vec; ++i) {
        T old, fresh;
        std::memcpy(&old, pointers[l] + i * sizeof(T), sizeof(T));
        fresh = F{}(old, lanesOf<T>(warp, inst.s[first + i])[l],
                    inst.ns > third ? lanesOf<T>(warp, inst.s[third])[l] : T());
        warp.block->executor->progressed |=
            std::memcmp(&old, &fresh, sizeof(T)) != 0;
        std::memcpy(pointers[l] + i * sizeof(T), &fresh, sizeof(T));
        if (i < inst.nd && inst.d[i] != kNone)
          lanesOf<T>(warp, inst.d[i])[l] = old;
      }
      announce(warp, l, key, inst.order, inst.scope, /*isAtomic=*/true);
    }
    maybeYield(warp);
  };
}

template <typename T>
void addIntegers(HandlerTable &table, const char *type) {
  std::string t = std::string(".") + type;
  using U = std::make_unsigned_t<T>;
  table["atom.add" + t] = atomic<T>([](T o, T v, T) { return T(U(o) + U(v)); });
  table["atom.min" + t] = atomic<T>([](T o, T v, T) { return v < o ? v : o; });
  table["atom.max" + t] = atomic<T>([](T o, T v, T) { return v > o ? v : o; });
  table["atom.and" + t] = atomic<T>([](T o, T v, T) { return T(o & v); });
  table["atom.or" + t] = atomic<T>([](T o, T v, T) { return T(o | v); });
  table["atom.xor" + t] = atomic<T>([](T o, T v, T) { return T(o ^ v); });
  table["atom.exch" + t] = atomic<T>([](T, T v, T) { return v; });
  table["atom.cas" + t] =
      atomic<T>([](T o, T v, T n) { return o == v ? n : o; });
  table["atom.inc" + t] =
      atomic<T>([](T o, T v, T) { return o >= v ? T(0) : T(o + 1); });
  table["atom.dec" + t] =
      atomic<T>([](T o, T v, T) { return o == 0 || o > v ? v : T(o - 1); });
}

template <typename T>
void addFloats(HandlerTable &table, const char *type) {
  std::string t = std::string(".") + type;
  table["atom.add" + t] = atomic<T>([](T o, T v, T) { return o + v; });
  // Vector reductions on sm_90 have these too.
  table["atom.min" + t] = atomic<T>([](T o, T v, T) { return v < o ? v : o; });
  table["atom.max" + t] = atomic<T>([](T o, T v, T) { return v > o ? v : o; });
}

template <typename H>
void addHalves(HandlerTable &table, std::string t) {
  t = "." + t;
  table["atom.add" + t] = atomic<u16>(
      [](u16 o, u16 v, u16) { return H::store(H::load(o) + H::load(v)); });
  table["atom.add" + t + "x2"] = atomic<u32>([](u32 o, u32 v, u32) {
    u32 low = H::store(H::load(u16(o)) + H::load(u16(v)));
    u32 high = H::store(H::load(u16(o >> 16)) + H::load(u16(v >> 16)));
    return high << 16 | low;
  });
  table["atom.min" + t + "x2"] = atomic<u32>([](u32 o, u32 v, u32) {
    auto pick = [](u16 a, u16 b) { return H::load(b) < H::load(a) ? b : a; };
    return u32(pick(u16(o >> 16), u16(v >> 16))) << 16 | pick(u16(o), u16(v));
  });
  table["atom.max" + t + "x2"] = atomic<u32>([](u32 o, u32 v, u32) {
    auto pick = [](u16 a, u16 b) { return H::load(b) > H::load(a) ? b : a; };
    return u32(pick(u16(o >> 16), u16(v >> 16))) << 16 | pick(u16(o), u16(v));
  });
}

} // namespace

void addAtomicOps(HandlerTable &table) {
  addIntegers<u16>(table, "u16");
  addIntegers<u32>(table, "u32");
  addIntegers<i32>(table, "s32");
  addIntegers<u64>(table, "u64");
  addIntegers<i64>(table, "s64");
  addFloats<float>(table, "f32");
  addFloats<double>(table, "f64");
  addHalves<F16>(table, "f16");
  addHalves<BF16>(table, "bf16");
  using U128 = unsigned __int128;
  table["atom.exch.u128"] = atomic<U128>([](U128, U128 v, U128) { return v; });
  table["atom.cas.u128"] =
      atomic<U128>([](U128 o, U128 v, U128 n) { return o == v ? n : o; });
}

} // namespace moe::sim
