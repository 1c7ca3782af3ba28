//===- Memory.cpp - From addresses to host memory, with checks ------------===//

#include "Memory.h"
#include "checks/Shadow.h"

#include <algorithm>

namespace moe::sim {
namespace {

const char *verb(const MemoryRequest &request) {
  return request.read && request.write ? "updates"
         : request.write               ? "stores"
                                       : "loads";
}

void reportBounds(Warp &warp, u32 lane, u32 pc, const std::string &what) {
  LaunchState &launch = *warp.block->launch;
  if (launch.checks.bounds &&
      !launch.reporter->repeats(FindingKind::Bounds, warp, pc))
    launch.reporter->add(FindingKind::Bounds, warp, lane, pc, what);
}

std::string describeGlobal(const LaunchState &launch, u64 address, u64 bytes) {
  const Region *nearest = nullptr;
  u64 distance = ~0ull;
  bool before = false;
  for (const Region &region : launch.regions) {
    u64 begin = reinterpret_cast<u64>(region.data);
    u64 end = begin + region.bytes;
    bool isBefore = address < begin;
    u64 d = isBefore                ? begin - address
            : address + bytes > end ? address + bytes - end
                                    : 0;
    if (d < distance) {
      nearest = &region;
      distance = d;
      before = isBefore;
    }
  }
  if (!nearest || distance > 1ull << 32)
    return "address " + std::to_string(address) +
           ", which is in no buffer of the launch";
  return std::to_string(distance) + " bytes " +
         (before ? "before the start" : "past the end") + " of " +
         nearest->name + " (" + std::to_string(nearest->bytes) + " bytes)";
}

bool aligned(u64 address, u32 alignment) {
  return (address & (alignment - 1)) == 0;
}

} // namespace

void reportAlignment(Warp &warp, const Inst &inst, u32 lane, u64 address,
                     u32 alignment) {
  LaunchState &launch = *warp.block->launch;
  u32 pc = pcOf(warp, inst);
  if (!launch.checks.align ||
      launch.reporter->repeats(FindingKind::Align, warp, pc))
    return;
  launch.reporter->add(FindingKind::Align, warp, lane, pc,
                       "expected an address that is a multiple of " +
                           std::to_string(alignment) + ", found one that is " +
                           std::to_string(address & (alignment - 1)) +
                           " past such a multiple");
}

u32 stampFlags(const Inst &inst) {
  if (inst.order == Order::Weak)
    return 0;
  return kStrong | (inst.scope == Scope::Cta ? kCtaScope : 0);
}

void addressesOf(Warp &warp, const Inst &inst, u64 *addresses) {
  u64 offset = static_cast<u64>(inst.imm);
  if (inst.wideAddress) {
    const u64 *base = lanesOf<u64>(warp, inst.s[0]);
    for (u32 l = 0; l < kWarpSize; ++l)
      addresses[l] = base[l] + offset;
  } else {
    const u32 *base = lanesOf<u32>(warp, inst.s[0]);
    for (u32 l = 0; l < kWarpSize; ++l)
      addresses[l] = static_cast<u32>(base[l] + offset);
  }
}

//===----------------------------------------------------------------------===//
// Shared memory
//===----------------------------------------------------------------------===//

Block *sharedOwner(Block &block, u64 address, u64 bytes, u64 &offset) {
  const LaunchState &launch = *block.launch;
  Block *owner = &block;
  if (u64 rank = address >> kClusterRankShift) {
    if (rank > block.cluster->blocks.size())
      return nullptr;
    owner = block.cluster->blocks[rank - 1].get();
    address &= (1u << kClusterRankShift) - 1;
  }
  if (!launch.holdsShared(address, bytes))
    return nullptr;
  offset = address - launch.sharedBase;
  return owner;
}

Block *sharedOwnerOfGeneric(Block &block, u64 address, u64 &sharedAddress) {
  const LaunchState &launch = *block.launch;
  // Addresses a little outside count as shared, so that the finding says so.
  constexpr u64 kMargin = 64;
  auto owns = [&](Block &candidate, u64 rank) {
    u64 begin = reinterpret_cast<u64>(candidate.shared);
    if (address + kMargin < begin ||
        address >= begin + launch.sharedSize + kMargin)
      return false;
    sharedAddress =
        (address - begin + launch.sharedBase) | rank << kClusterRankShift;
    return true;
  };
  if (owns(block, 0))
    return &block;
  if (block.cluster->blocks.size() > 1)
    for (auto &other : block.cluster->blocks)
      if (owns(*other, other->rank + 1))
        return other.get();
  return nullptr;
}

static const char *missingDynamic(const LaunchState &launch) {
  bool isMissing =
      launch.kernel->usesDynamicShared && !launch.config->dynamicSmem;
  return isMissing ? ": the kernel uses dynamic shared memory, of which the "
                     "launch has none (dynamic_smem)"
                   : "";
}

void traceShared(const Warp &warp, const Access &access, u32 lane, u64 address,
                 u32 bytes) {
  const LaunchState &launch = *warp.block->launch;
  SharedEvent::Kind kind = !access.write ? SharedEvent::Read
                           : access.read ? SharedEvent::ReadWrite
                                         : SharedEvent::Write;
  launch.sharedTrace->push_back({kind, warp.block->linear, warp.index, lane,
                                 launch.kernel->code[access.pc].line,
                                 address - launch.sharedBase, bytes});
}

u8 *touchShared(Warp &warp, u64 address, u32 bytes, Access &access) {
  if (warp.block->launch->sharedTrace)
    traceShared(warp, access, SharedEvent::kWholeWarp, address, bytes);
  u64 offset;
  Block *owner = sharedOwner(*warp.block, address, bytes, offset);
  if (!owner) {
    LaunchState &launch = *warp.block->launch;
    i64 at = static_cast<i64>((address & ((1u << kClusterRankShift) - 1)) -
                              launch.sharedBase);
    reportBounds(warp, __builtin_ctz(access.lanes), access.pc,
                 std::string(access.write ? "stores " : "loads ") +
                     std::to_string(bytes) + " bytes at offset " +
                     std::to_string(at) + " of the block's " +
                     std::to_string(launch.sharedSize) +
                     " bytes of shared memory" + missingDynamic(launch));
    return nullptr;
  }
  if (owner != warp.block && owner->liveThreads == 0)
    reportBounds(warp, __builtin_ctz(access.lanes), access.pc,
                 std::string(access.write ? "stores to" : "loads from") +
                     " the shared memory of a block of the cluster that has "
                     "exited: expected a cluster barrier before its exit");
  u8 *pointer = owner->shared + offset;
  const Checks &checks = warp.block->launch->checks;
  if (checks.race || checks.uninit) {
    access.memory = pointer;
    owner->shadow->touch(access, offset, bytes, warp.block->launch->sharedBase);
  }
  return pointer;
}

//===----------------------------------------------------------------------===//
// Global memory
//===----------------------------------------------------------------------===//

Region *findRegion(LaunchState &launch, u64 address, u64 bytes) {
  auto it =
      std::upper_bound(launch.regions.begin(), launch.regions.end(), address,
                       [](u64 value, const Region &region) {
                         return value < reinterpret_cast<u64>(region.data);
                       });
  if (it == launch.regions.begin())
    return nullptr;
  --it;
  return it->holds(address, bytes) ? &*it : nullptr;
}

namespace {

u8 *touchRegion(Warp &warp, Region &region, u64 address, u64 bytes,
                Access &access) {
  LaunchState &launch = *warp.block->launch;
  u8 *pointer = reinterpret_cast<u8 *>(address);
  if (access.write && region.readOnly) {
    reportBounds(warp, __builtin_ctz(access.lanes), access.pc,
                 "stores to " + region.name + ", which is read-only");
    return nullptr;
  }
  if (launch.checks.race) {
    access.memory = pointer;
    region.shadow->touch(access, pointer - region.data, bytes,
                         launch.threads > 1, region.name.c_str());
  }
  return pointer;
}

} // namespace

u8 *touchGlobal(Warp &warp, u64 address, u64 bytes, Access &access) {
  LaunchState &launch = *warp.block->launch;
  Region *region = findRegion(launch, address, bytes);
  if (!region) {
    reportBounds(warp, __builtin_ctz(access.lanes), access.pc,
                 std::string(access.write ? "stores " : "loads ") +
                     std::to_string(bytes) + " bytes at " +
                     describeGlobal(launch, address, bytes));
    return nullptr;
  }
  return touchRegion(warp, *region, address, bytes, access);
}

//===----------------------------------------------------------------------===//
// resolve
//===----------------------------------------------------------------------===//

namespace {

class Resolver {
public:
  Resolver(Warp &warp, const Inst &inst, const u64 *addresses,
           const MemoryRequest &request, Places &places)
      : warp(warp), inst(inst), addresses(addresses), request(request),
        places(places), pointers(places.pointers),
        access(warp, 0, pcOf(warp, inst), request.flags) {
    access.read = request.read;
    access.write = request.write;
  }

  u32 run(u32 mask, Space space) {
    switch (space) {
    case Space::Shared:
    case Space::SharedCluster:
      return shared(mask, addresses);
    case Space::Global:
    case Space::Const:
      return global(mask);
    case Space::Local:
      return local(mask, addresses);
    case Space::Param:
      return param(mask);
    case Space::Generic:
      return generic(mask);
    }
    return 0;
  }

private:
  /// What all lanes of the mask have in common.
  struct Pattern {
    bool uniform;
    bool consecutive;
    bool aligned;
  };

  /// Lanes [first, first + count) access consecutive memory, lowest first.
  struct Run {
    u32 first;
    u32 count;
  };

  /// The longest run from `first` in `mask`.
  Run runFrom(u32 first, u32 mask, const u64 *at) const {
    u32 end = first + 1;
    for (u64 next = at[first] + request.bytes;
         end < kWarpSize && (mask >> end & 1) && at[end] == next;
         next += request.bytes)
      ++end;
    return {first, end - first};
  }

  /// The shadow can tell the lanes of a run apart.
  bool splittable(u32 mask, const Pattern &pattern) const {
    return (request.bytes & (request.bytes - 1)) == 0 &&
           request.bytes <= kWarpSize && pattern.aligned &&
           !(request.undefinedLanes & mask) &&
           (!request.alignment || request.alignment >= request.bytes);
  }

  static u32 lanesOfRun(Run run) {
    return static_cast<u32>((1ull << run.count) - 1) << run.first;
  }

  void prepare(Run run) {
    access.lanes = lanesOfRun(run);
    access.stride = run.count > 1 ? __builtin_ctz(request.bytes) : kWhole;
    if (!request.values)
      return;
    access.undefined = request.undefinedLanes >> run.first & 1;
    access.value = request.values + run.first * request.bytes;
    access.warpStore.values = request.values;
    access.warpStore.bytes = request.bytes;
  }

  Pattern classify(u32 mask, const u64 *at) const {
    u32 alignment = request.alignment ? request.alignment : request.bytes;
    u64 first = at[__builtin_ctz(mask)], low = 0, moved = 0, jumps = 0;
    if (mask == kAllLanes) {
      for (u32 l = 0; l < kWarpSize; ++l) {
        low |= at[l];
        moved |= at[l] ^ first;
        jumps |= at[l] ^ (first + l * request.bytes);
      }
    } else {
      for (u32 l : Lanes(mask)) {
        low |= at[l];
        moved |= at[l] ^ first;
      }
      jumps = 1;
    }
    return {moved == 0, jumps == 0, aligned(low, alignment)};
  }

  void reportMisaligned(u32 mask, const u64 *at) {
    u32 alignment = request.alignment ? request.alignment : request.bytes;
    for (u32 l : Lanes(mask))
      if (!aligned(at[l], alignment))
        reportAlignment(warp, inst, l, at[l], alignment);
  }

  /// Resolves the runs of `mask`: `inside(address, bytes)` says whether one
  /// is in bounds as a whole, `touch(address, bytes)` checks it.
  template <typename Inside, typename Touch>
  u32 runs(u32 mask, const u64 *at, const Pattern &pattern, Inside inside,
           Touch touch) {
    u32 good = 0;
    bool joins = splittable(mask, pattern);
    for (u32 rest = mask; rest;) {
      u32 first = __builtin_ctz(rest);
      Run run = joins ? runFrom(first, rest, at) : Run{first, 1};
      if (run.count > 1 && !inside(at[run.first], run.count * request.bytes))
        run.count = 1; // finding by finding
      rest &= ~lanesOfRun(run);
      prepare(run);
      u8 *pointer = touch(at[run.first], run.count * request.bytes);
      if (!pointer)
        continue;
      good |= access.lanes;
      for (u32 i = 0; i < run.count; ++i)
        pointers[run.first + i] = pointer + i * request.bytes;
      if (run.count == kWarpSize)
        places.fill(pointer, request.bytes);
    }
    return good;
  }

  /// All lanes read one place.
  template <typename Touch>
  u32 broadcast(u32 mask, const u64 *at, Touch touch) {
    access.lanes = mask;
    access.stride = kWhole;
    u8 *pointer = touch(at[__builtin_ctz(mask)], request.bytes);
    if (!pointer)
      return 0;
    for (u32 l : Lanes(mask))
      pointers[l] = pointer;
    if (mask == kAllLanes)
      places.fill(pointer, 0);
    return mask;
  }

  u32 shared(u32 mask, const u64 *at) {
    if (warp.block->launch->sharedTrace)
      for (u32 lane : Lanes(mask))
        traceShared(warp, access, lane, at[lane], request.bytes);
    access.warpStore.mask = mask;
    access.warpStore.addresses = at;
    Pattern pattern = classify(mask, at);
    if (request.counts)
      countShared(warp, mask, at, request.bytes, request.write);
    if (!pattern.aligned)
      reportMisaligned(mask, at);
    Block &block = *warp.block;
    LaunchState &launch = *block.launch;
    bool shadowed = launch.checks.race || launch.checks.uninit;
    auto touch = [&](u64 address, u32 bytes) {
      // The block's own window, nearly always.
      if (!launch.holdsShared(address, bytes))
        return touchShared(warp, address, bytes, access);
      u64 offset = address - launch.sharedBase;
      access.memory = block.shared + offset;
      if (shadowed)
        block.shadow->touch(access, offset, bytes, launch.sharedBase);
      return block.shared + offset;
    };
    if (request.read && !request.write && pattern.uniform)
      return broadcast(mask, at, touch);
    auto inside = [&](u64 address, u32 bytes) {
      u64 offset;
      return sharedOwner(*warp.block, address, bytes, offset) != nullptr;
    };
    return runs(mask, at, pattern, inside, touch);
  }

  u32 global(u32 mask) {
    access.warpStore.mask = mask;
    access.warpStore.addresses = addresses;
    Pattern pattern = classify(mask, addresses);
    if (request.counts && pattern.consecutive)
      countConsecutive(warp, addresses[0], kWarpSize * request.bytes,
                       request.write);
    else if (request.counts)
      countGlobal(warp, mask, addresses, request.bytes, request.write);
    if (!pattern.aligned)
      reportMisaligned(mask, addresses);
    LaunchState &launch = *warp.block->launch;
    Region *region = nullptr;
    // Neighbouring lanes nearly always use one buffer.
    auto inside = [&](u64 address, u32 bytes) {
      if (!region || !region->holds(address, bytes))
        region = findRegion(launch, address, bytes);
      return region != nullptr;
    };
    auto touch = [&](u64 address, u32 bytes) {
      return inside(address, bytes)
                 ? touchRegion(warp, *region, address, bytes, access)
                 : touchGlobal(warp, address, bytes, access);
    };
    if (request.read && !request.write && pattern.uniform)
      return broadcast(mask, addresses, touch);
    return runs(mask, addresses, pattern, inside, touch);
  }

  u32 local(u32 mask, const u64 *at) {
    if (!classify(mask, at).aligned)
      reportMisaligned(mask, at);
    u64 size = warp.block->launch->kernel->localBytes;
    u32 good = 0;
    for (u32 l : Lanes(mask)) {
      if (at[l] < size && request.bytes <= size - at[l]) {
        good |= place(l, warp.local + l * size + at[l]);
        continue;
      }
      reportBounds(warp, l, access.pc,
                   std::string(verb(request)) + " " +
                       std::to_string(request.bytes) + " bytes at offset " +
                       std::to_string(static_cast<i64>(at[l])) +
                       " of the thread's " + std::to_string(size) +
                       " bytes of local memory");
    }
    return good;
  }

  /// The kernel's parameters, or those of a device function, which lie in the
  /// local frame and have bit 32 set.
  u32 param(u32 mask) {
    u32 good = 0;
    u64 frame[kWarpSize] = {};
    u32 inFrame = 0;
    LaunchState &launch = *warp.block->launch;
    for (u32 l : Lanes(mask)) {
      u64 address = addresses[l];
      if (address >> 32 == 1) {
        frame[l] = static_cast<u32>(address);
        inFrame |= 1u << l;
      } else if (address < launch.params.size() &&
                 request.bytes <= launch.params.size() - address) {
        good |= place(l, launch.params.data() + address);
      } else {
        reportBounds(
            warp, l, access.pc,
            "loads at offset " + std::to_string(address) + " of the kernel's " +
                std::to_string(launch.params.size()) + " bytes of parameters");
      }
    }
    return inFrame ? good | local(inFrame, frame) : good;
  }

  u32 generic(u32 mask) {
    Block &block = *warp.block;
    u64 converted[kWarpSize];
    u32 inShared = 0, inLocal = 0, inParams = 0;
    u64 frame = block.launch->kernel->localBytes;
    u64 localBegin = reinterpret_cast<u64>(warp.local);
    u64 paramBegin = reinterpret_cast<u64>(block.launch->params.data());
    for (u32 l : Lanes(mask)) {
      u64 address = addresses[l];
      if (sharedOwnerOfGeneric(block, address, converted[l])) {
        inShared |= 1u << l;
      } else if (frame && address - localBegin < frame * kWarpSize) {
        converted[l] = address - localBegin - l * frame;
        inLocal |= 1u << l;
      } else if (u64 offset = address - paramBegin;
                 offset < block.launch->params.size() &&
                 request.bytes <= block.launch->params.size() - offset) {
        pointers[l] = reinterpret_cast<u8 *>(address);
        inParams |= 1u << l;
      }
    }
    u32 good = inParams;
    if (inShared)
      good |= shared(inShared, converted);
    if (inLocal)
      good |= local(inLocal, converted);
    if (u32 rest = mask & ~(inShared | inLocal | inParams))
      good |= global(rest);
    return good;
  }

  u32 place(u32 lane, u8 *pointer) {
    pointers[lane] = pointer;
    return pointer ? 1u << lane : 0;
  }

  Warp &warp;
  const Inst &inst;
  const u64 *addresses;
  const MemoryRequest &request;
  Places &places;
  u8 **pointers;
  Access access;
};

} // namespace

void resolve(Warp &warp, const Inst &inst, u32 mask, Space space,
             const u64 *addresses, const MemoryRequest &request,
             Places &places) {
  places.run = nullptr;
  places.good =
      Resolver(warp, inst, addresses, request, places).run(mask, space);
}

void resolveOperand(Warp &warp, const Inst &inst, u32 mask,
                    const MemoryRequest &request, Places &places) {
  u64 addresses[kWarpSize];
  addressesOf(warp, inst, addresses);
  resolve(warp, inst, mask, inst.space, addresses, request, places);
}

} // namespace moe::sim
