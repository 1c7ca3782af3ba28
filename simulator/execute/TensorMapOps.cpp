//===- TensorMapOps.cpp - Tensor maps that kernels change -----------------===//
//
// A kernel may build a tensor map in shared or global memory, by stores and
// tensormap.replace. Copies read maps through a proxy of their own, so between
// a write to a map in global memory and a copy that uses it must lie, in this
// order:
//
//   write; release, by fence.proxy.tensormap::generic.release or as a part of
//   tensormap.cp_fenceproxy; whatever synchronises the two threads;
//   fence.proxy.tensormap::generic.acquire of this map, by a thread of the
//   block that uses it; the copy
//
//===----------------------------------------------------------------------===//

#include "Handlers.h"
#include "checks/Shadow.h"
#include "decode/TensorMapField.h"
#include "memory/BulkTransfer.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace moe::sim {
namespace {

constexpr u32 kMapBytes = sizeof(TensorMap);
/// What the driver asks of a map's address. The PTX ISA asks nothing of the
/// operands of tensormap.replace and tensormap.cp_fenceproxy.
constexpr u32 kMapAlignment = 64;

//===----------------------------------------------------------------------===//
// tensormap.replace
//===----------------------------------------------------------------------===//

/// CUtensorMapDataType of what tensormap.replace calls it; others fit no type.
u8 dataTypeOf(u64 value) {
  // u8, u16, u32, s32, u64, s64, f16, f32, f32.ftz, f64, bf16, tf32, tf32.ftz
  static constexpr u8 types[] = {0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12};
  return value < sizeof types ? types[value] : 255;
}

u8 fitting(u64 value) { return static_cast<u8>(std::min<u64>(value, 255)); }

void replace(TensorMap &map, TensorMapField field, u32 dimension, u64 value) {
  using F = TensorMapField;
  switch (field) {
  case F::GlobalAddress:
    map.address = value;
    break;
  case F::Rank:
    map.lastDimension = fitting(value);
    break;
  case F::BoxDim:
    map.box[dimension] = static_cast<u16>(value > 256 ? 0 : value);
    break;
  case F::GlobalDim:
    map.dims[dimension] = static_cast<u32>(value);
    break;
  case F::GlobalStride:
    map.outerStrides[dimension] = value;
    break;
  case F::ElementStride:
    map.elementStrides[dimension] = static_cast<u32>(value);
    break;
  case F::ElementType:
    map.dataType = dataTypeOf(value);
    break;
  case F::Interleave:
    map.interleave = fitting(value);
    break;
  case F::Swizzle:
    map.swizzle = fitting(value);
    break;
  case F::SwizzleAtomicity:
    map.swizzleAtomicity = fitting(value);
    break;
  case F::Fill:
    map.nanFill = value != 0;
    break;
  }
}

bool isZero(const TensorMap &map) {
  static constexpr TensorMap zero = {};
  return std::memcmp(&map, &zero, sizeof map) == 0;
}

/// s: address, value.
void runReplace(Warp &warp, const Inst &inst, u32 mask) {
  MemoryRequest request;
  request.bytes = kMapBytes;
  request.read = request.write = true;
  request.alignment = kMapAlignment;
  request.counts = false;
  Places places;
  resolveOperand(warp, inst, mask, request, places);
  for (u32 l : Lanes(places.good)) {
    TensorMap map;
    std::memcpy(&map, places.pointers[l], sizeof map);
    if (map.magic != TensorMap::kMagic && !isZero(map)) {
      reportBulkBounds(warp, inst, l,
                       "expected a tensor map or 128 bytes of zeros at the "
                       "address, found other memory");
      continue;
    }
    map.magic = TensorMap::kMagic;
    u64 value = inst.bytes == 8 ? lanesOf<u64>(warp, inst.s[1])[l]
                                : lanesOf<u32>(warp, inst.s[1])[l];
    replace(map, static_cast<TensorMapField>(inst.aux), inst.aux2,
            value * static_cast<u64>(inst.imm2));
    std::memcpy(places.pointers[l], &map, sizeof map);
  }
  warp.block->executor->progressed = true;
}

//===----------------------------------------------------------------------===//
// Proxy fences
//===----------------------------------------------------------------------===//

/// Of one kind. A kernel may change its maps for every tile: old fences go.
constexpr size_t kKeptFences = 4096;

void record(Warp &warp, u32 lanes, u64 address,
            std::vector<TensorMapFence> &fences) {
  LaunchState &launch = *warp.block->launch;
  std::unique_lock<std::mutex> guard(launch.syncMutex, std::defer_lock);
  if (launch.threads > 1)
    guard.lock();
  if (fences.size() >= kKeptFences)
    fences.erase(fences.begin(), fences.begin() + kKeptFences / 2);
  fences.push_back({warp.block->linear, warp.index, lanes, warp.time,
                    warp.clockOf(__builtin_ctz(lanes)), address});
}

/// aux: acquires; else releases.
void runFence(Warp &warp, const Inst &inst, u32 mask) {
  LaunchState &launch = *warp.block->launch;
  // Lanes that know different things fence for themselves.
  u32 together = mask & ~warp.privateLanes;
  u64 addresses[kWarpSize];
  if (inst.aux)
    addressesOf(warp, inst, addresses);
  for (u32 lane : Lanes(mask)) {
    u32 lanes = 1u << lane;
    if (!inst.aux && (together & lanes))
      continue;
    record(warp, lanes, inst.aux ? addresses[lane] : 0,
           inst.aux ? launch.tensorMapAcquires : launch.tensorMapReleases);
  }
  if (!inst.aux && together)
    record(warp, together, 0, launch.tensorMapReleases);
  tick(warp);
}

/// s: target in global memory, source in shared memory. The whole warp copies,
/// releases, and goes on together.
void runCopy(Warp &warp, const Inst &inst, u32 mask) {
  u32 lane = __builtin_ctz(mask), pc = pcOf(warp, inst);
  u64 to = laneAddress(warp, inst.s[0], inst.wideAddress, lane) +
           static_cast<u64>(inst.imm);
  u64 from = sharedAddress(warp, inst.s[1], inst.aux, 0, inst.aux, lane);
  for (u64 address : {to, from})
    if (address % kMapAlignment)
      reportAlignment(warp, inst, lane, address, kMapAlignment);
  Access load(warp, mask, pc), store(warp, 1u << lane, pc);
  load.read = true;
  store.write = true;
  const u8 *source = touchShared(warp, from, kMapBytes, load);
  u8 *target = source ? touchGlobal(warp, to, kMapBytes, store) : nullptr;
  if (target)
    std::memcpy(target, source, kMapBytes);
  record(warp, mask, 0, warp.block->launch->tensorMapReleases);
  tick(warp);
  meet(warp, mask);
  warp.block->executor->progressed = true;
}

//===----------------------------------------------------------------------===//
// Use
//===----------------------------------------------------------------------===//

class MapUse {
public:
  MapUse(Warp &warp, u32 lane, u64 address)
      : warp(warp), lane(lane), address(address), launch(*warp.block->launch) {}

  /// What lies between the write and this use falls short of the rules in
  /// this; null if it is all there.
  const char *missingAfter(const Stamp &writer) const {
    u32 actors = warp.block->actors();
    u32 block = (writer.actor - 1) / actors,
        actor = (writer.actor - 1) % actors;
    const char *missing = "fence.proxy.tensormap::generic.acquire of the map "
                          "between the two";
    for (const TensorMapFence &acquire : launch.tensorMapAcquires) {
      if (acquire.address != address || !knows(acquire) ||
          !acquire.covers(block, actor, writer.lanes, writer.time))
        continue;
      for (const TensorMapFence &release : launch.tensorMapReleases)
        if (liesBetween(release, acquire, block, actor, writer))
          return nullptr;
      missing = "fence.proxy.tensormap::generic.release after the write";
    }
    return missing;
  }

private:
  bool knows(const TensorMapFence &fence) const {
    if (fence.block != warp.block->linear)
      return false;
    return (fence.actor == warp.index && fence.lanes >> lane & 1) ||
           warp.clockOf(lane).knows(fence.block, fence.actor, fence.lanes,
                                    fence.time);
  }

  /// Some lane released the write, and the acquire comes after that.
  static bool liesBetween(const TensorMapFence &release,
                          const TensorMapFence &acquire, u32 block, u32 actor,
                          const Stamp &writer) {
    for (u32 l : Lanes(release.lanes)) {
      TensorMapFence one{release.block, release.actor, 1u << l,
                         release.time,  release.clock, 0};
      if (one.covers(block, actor, writer.lanes, writer.time) &&
          acquire.covers(one.block, one.actor, one.lanes, one.time))
        return true;
    }
    return false;
  }

  Warp &warp;
  u32 lane;
  u64 address;
  LaunchState &launch;
};

void checkUse(Warp &warp, const Inst &inst, u32 lane, Region &region,
              u64 address) {
  LaunchState &launch = *warp.block->launch;
  if (!launch.checks.race)
    return;
  std::vector<Stamp> writers;
  region.shadow->forWriters(
      address - reinterpret_cast<u64>(region.data), kMapBytes,
      [&](const Stamp &writer) { writers.push_back(writer); });
  std::unique_lock<std::mutex> guard(launch.syncMutex, std::defer_lock);
  if (launch.threads > 1)
    guard.lock();
  Reporter &reporter = *launch.reporter;
  u32 pc = pcOf(warp, inst);
  for (const Stamp &writer : writers) {
    u32 otherPc = writer.info & kPcMask;
    const char *missing = MapUse(warp, lane, address).missingAfter(writer);
    if (!missing || reporter.repeats(FindingKind::Race, warp, pc, otherPc))
      continue;
    std::string where = reporter.describe(otherPc);
    reporter.add(FindingKind::Race, warp, lane, pc,
                 "uses a tensor map that was written at " + where +
                     ": expected " + missing,
                 otherPc, where);
  }
}

} // namespace

std::optional<TensorMap> loadMap(Warp &warp, const Inst &inst, u32 lane) {
  u64 address = lanesOf<u64>(warp, inst.s[0])[lane] + inst.imm;
  LaunchState &launch = *warp.block->launch;
  const u8 *from = nullptr;
  u64 params = reinterpret_cast<u64>(launch.params.data());
  auto inParams = [&](u64 offset) {
    return launch.params.size() >= kMapBytes &&
           offset <= launch.params.size() - kMapBytes;
  };
  if (inParams(address)) {
    from = launch.params.data() + address;
  } else if (inParams(address - params)) {
    from = reinterpret_cast<const u8 *>(address);
  } else if (Region *region = findRegion(launch, address, kMapBytes)) {
    Access access(warp, 1u << lane, pcOf(warp, inst));
    access.read = true;
    if (address % kMapAlignment)
      reportAlignment(warp, inst, lane, address, kMapAlignment);
    from = touchGlobal(warp, address, kMapBytes, access);
    checkUse(warp, inst, lane, *region, address);
  }
  TensorMap map;
  if (from)
    std::memcpy(&map, from, sizeof map);
  if (!from || map.magic != TensorMap::kMagic) {
    reportBulkBounds(
        warp, inst, lane,
        "expected the address of a tensor map, found other memory");
    return std::nullopt;
  }
  if (const char *problem = map.problem()) {
    reportBulkBounds(warp, inst, lane,
                     std::string("uses a tensor map that is wrong: ") +
                         problem);
    return std::nullopt;
  }
  return map;
}

void addTensorMapOps(HandlerTable &table) {
  table["tensormap.replace"] = runReplace;
  table["tensormap.cp_fenceproxy"] = runCopy;
  table["fence.proxy.tensormap"] = runFence;
}

} // namespace moe::sim
