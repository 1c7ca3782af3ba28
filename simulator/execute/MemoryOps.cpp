//===- MemoryOps.cpp - Loads, stores and address arithmetic ---------------===//

#include "Handlers.h"
#include "checks/DefinedBits.h"
#include "memory/Memory.h"

#include <cstring>
#include <string>

namespace moe::sim {
namespace {

//===----------------------------------------------------------------------===//
// Loads and stores. T is the element in memory, R the register.
//===----------------------------------------------------------------------===//

/// What a load that went wrong returns: easy to recognise, and NaN as f16.
constexpr u8 kPoison = 0xCD;

template <typename T>
T valueAt(const u8 *from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

/// d[l] = the T at from + l * step.
template <typename T, typename R>
void gather(R *d, const u8 *from, u32 step) {
  if (step == sizeof(T)) {
    for (u32 l = 0; l < kWarpSize; ++l)
      d[l] = static_cast<R>(valueAt<T>(from + l * sizeof(T)));
    return;
  }
  for (u32 l = 0; l < kWarpSize; ++l)
    d[l] = static_cast<R>(valueAt<T>(from + l * step));
}

template <typename T, typename R>
void runLoad(Warp &warp, const Inst &inst, u32 mask) {
  MemoryRequest request;
  request.bytes = sizeof(T) * inst.vec;
  request.read = true;
  request.flags = stampFlags(inst);
  Places places;
  resolveOperand(warp, inst, mask, request, places);
  for (u32 i = 0; i < inst.vec; ++i) {
    if (inst.d[i] == kNone)
      continue;
    R *d = lanesOf<R>(warp, inst.d[i]);
    if (places.run) {
      gather<T>(d, places.run + i * sizeof(T), places.step);
      continue;
    }
    for (u32 l : Lanes(places.good))
      d[l] = static_cast<R>(valueAt<T>(places.pointers[l] + i * sizeof(T)));
    for (u32 l : Lanes(mask & ~places.good))
      std::memset(&d[l], kPoison, sizeof(R));
  }
  if (inst.order == Order::Weak)
    return;
  for (u32 l : Lanes(places.good))
    observe(warp, l, reinterpret_cast<u64>(places.pointers[l]), inst.order,
            inst.scope);
}

/// Lanes in which nothing that is stored has been computed.
u32 undefinedLanes(Warp &warp, const Inst &inst, u32 bytes, u32 mask) {
  if (!inst.tracked)
    return 0;
  u32 defined = 0;
  for (u32 i = 0; i < inst.vec; ++i)
    defined |= partlyDefinedLanes(warp, inst.s[1 + i], bytes, mask);
  return mask & ~defined;
}

void reportUndefined(Warp &warp, const Inst &inst, u32 lanes) {
  LaunchState &launch = *warp.block->launch;
  u32 pc = pcOf(warp, inst);
  if (launch.checks.uninit && lanes &&
      !launch.reporter->repeats(FindingKind::Uninit, warp, pc))
    launch.reporter->add(FindingKind::Uninit, warp, __builtin_ctz(lanes), pc,
                         "stores a register that nothing has written");
}

template <typename T, typename R>
void runStore(Warp &warp, const Inst &inst, u32 mask) {
  T values[kWarpSize][8];
  u32 vec = inst.vec;
  T *packed = &values[0][0];
  for (u32 i = 0; i < vec; ++i) {
    const R *s = lanesOf<R>(warp, inst.s[1 + i]);
    for (u32 l = 0; l < kWarpSize; ++l)
      packed[l * vec + i] = static_cast<T>(s[l]);
  }
  MemoryRequest request;
  request.bytes = sizeof(T) * vec;
  request.write = true;
  request.flags = stampFlags(inst);
  request.values = reinterpret_cast<const u8 *>(packed);
  request.undefinedLanes = undefinedLanes(warp, inst, sizeof(T), mask);
  if (request.undefinedLanes && inst.space != Space::Shared &&
      inst.space != Space::Local && inst.space != Space::Param)
    reportUndefined(warp, inst, request.undefinedLanes);
  Places places;
  resolveOperand(warp, inst, mask, request, places);
  bool changed = false;
  auto put = [&](u8 *to, const T *from, u32 count) {
    for (u32 i = 0; i < count; ++i) {
      changed |= valueAt<T>(to + i * sizeof(T)) != from[i];
      std::memcpy(to + i * sizeof(T), &from[i], sizeof(T));
    }
  };
  if (places.run)
    put(places.run, packed, kWarpSize * vec);
  else
    for (u32 l : Lanes(places.good))
      put(places.pointers[l], &packed[l * vec], vec);
  warp.block->executor->progressed |= changed;
  if (inst.order == Order::Weak)
    return;
  for (u32 l : Lanes(places.good))
    announce(warp, l, reinterpret_cast<u64>(places.pointers[l]), inst.order,
             inst.scope, /*isAtomic=*/false);
}

template <typename T, typename R>
void addAccess(HandlerTable &table, const std::string &type) {
  std::string key = type + "." + std::to_string(sizeof(R) * 8);
  table["ld." + key] = runLoad<T, R>;
  table["st." + key] = runStore<T, R>;
}

template <typename T>
void addAccesses(HandlerTable &table, const std::string &type) {
  addAccess<T, u8>(table, type);
  addAccess<T, u16>(table, type);
  addAccess<T, u32>(table, type);
  addAccess<T, u64>(table, type);
}

//===----------------------------------------------------------------------===//
// Addresses
//===----------------------------------------------------------------------===//

template <typename F>
Handler mapAddress(F) {
  return [](Warp &warp, const Inst &inst, u32 mask) {
    for (u32 l : Lanes(mask)) {
      u64 from = laneAddress(warp, inst.s[0], inst.wideAddress, l);
      u64 to = F{}(warp, l, from);
      if (inst.bytes == 4)
        lanesOf<u32>(warp, inst.d[0])[l] = static_cast<u32>(to);
      else
        lanesOf<u64>(warp, inst.d[0])[l] = to;
    }
  };
}

u64 sharedToGeneric(Warp &warp, u64 address) {
  u64 offset;
  if (Block *owner = sharedOwner(*warp.block, address, 0, offset))
    return reinterpret_cast<u64>(owner->shared + offset);
  return reinterpret_cast<u64>(warp.block->shared) + address -
         warp.block->launch->sharedBase;
}

u64 genericToShared(Warp &warp, u64 address) {
  u64 shared;
  if (sharedOwnerOfGeneric(*warp.block, address, shared))
    return shared;
  return address - reinterpret_cast<u64>(warp.block->shared) +
         warp.block->launch->sharedBase;
}

u64 frameOf(Warp &warp, u32 lane) {
  return reinterpret_cast<u64>(warp.local) +
         lane * warp.block->launch->kernel->localBytes;
}

void addAddressOps(HandlerTable &table) {
  table["cvta.shared"] = mapAddress(
      [](Warp &w, u32, u64 address) { return sharedToGeneric(w, address); });
  table["cvta.to.shared"] = mapAddress(
      [](Warp &w, u32, u64 address) { return genericToShared(w, address); });
  table["cvta.local"] = mapAddress(
      [](Warp &w, u32 l, u64 address) { return address + frameOf(w, l); });
  table["cvta.to.local"] = mapAddress(
      [](Warp &w, u32 l, u64 address) { return address - frameOf(w, l); });
  table["cvta.param"] = mapAddress([](Warp &w, u32 l, u64 address) {
    if (address >> 32 == 1)
      return static_cast<u32>(address) + frameOf(w, l);
    return reinterpret_cast<u64>(w.block->launch->params.data()) + address;
  });
  table["cvta.global"] =
      mapAddress([](Warp &, u32, u64 address) { return address; });
  // mapa d, address, rank: the same place in another block of the cluster.
  table["mapa"] = [](Warp &warp, const Inst &inst, u32 mask) {
    for (u32 l : Lanes(mask)) {
      u64 address = laneAddress(warp, inst.s[0], inst.wideAddress, l);
      u64 rank = lanesOf<u32>(warp, inst.s[1])[l];
      if (inst.aux) // generic address
        address = genericToShared(warp, address);
      address = (address & ((1u << kClusterRankShift) - 1)) |
                (rank + 1) << kClusterRankShift;
      if (inst.aux)
        address = sharedToGeneric(warp, address);
      if (inst.bytes == 4)
        lanesOf<u32>(warp, inst.d[0])[l] = static_cast<u32>(address);
      else
        lanesOf<u64>(warp, inst.d[0])[l] = address;
    }
  };
  table["getctarank"] = [](Warp &warp, const Inst &inst, u32 mask) {
    for (u32 l : Lanes(mask)) {
      u64 address = laneAddress(warp, inst.s[0], inst.wideAddress, l);
      if (inst.aux)
        address = genericToShared(warp, address);
      u64 rank = address >> kClusterRankShift;
      lanesOf<u32>(warp, inst.d[0])[l] =
          rank ? static_cast<u32>(rank - 1) : warp.block->rank;
    }
  };
  table["isspacep"] = [](Warp &warp, const Inst &inst, u32 mask) {
    u32 result = 0;
    u64 frame = warp.block->launch->kernel->localBytes * kWarpSize;
    for (u32 l : Lanes(mask)) {
      u64 address = lanesOf<u64>(warp, inst.s[0])[l], unused;
      bool shared = sharedOwnerOfGeneric(*warp.block, address, unused);
      bool local = address - reinterpret_cast<u64>(warp.local) < frame;
      Space space = shared  ? Space::Shared
                    : local ? Space::Local
                            : Space::Global;
      result |= static_cast<u32>(space == inst.space) << l;
    }
    setPredicate(warp, inst.d[0], mask, result);
  };
}

} // namespace

void addMemoryOps(HandlerTable &table) {
  addAccesses<u8>(table, "u8");
  addAccesses<i8>(table, "s8");
  addAccesses<u16>(table, "u16");
  addAccesses<i16>(table, "s16");
  addAccesses<u32>(table, "u32");
  addAccesses<i32>(table, "s32");
  addAccesses<u64>(table, "u64");
  addAccesses<i64>(table, "s64");
  using U128 = unsigned __int128;
  addAccess<U128, U128>(table, "u128");
  addAddressOps(table);
}

} // namespace moe::sim
