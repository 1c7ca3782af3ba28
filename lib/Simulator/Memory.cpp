//===- Memory.cpp - From addresses to host memory, with checks ------------===//

#include "Memory.h"

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
      !launch.reporter->repeats(FindingKind::Bounds, pc))
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
  if (!launch.checks.align || launch.reporter->repeats(FindingKind::Align, pc))
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
  if (address < launch.sharedBase || address + bytes > launch.sharedEnd)
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

u8 *touchShared(Warp &warp, u64 address, u32 bytes, Access &access) {
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
                     " bytes of shared memory");
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
    owner->shadow.touch(access, offset, bytes, warp.block->launch->sharedBase);
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
  u64 offset = address - reinterpret_cast<u64>(it->data);
  return offset + bytes <= it->bytes ? &*it : nullptr;
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
           const MemoryRequest &request, u8 **pointers)
      : warp(warp), inst(inst), addresses(addresses), request(request),
        pointers(pointers) {
    access.warp = &warp;
    access.pc = pcOf(warp, inst);
    access.flags = request.flags;
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
  void prepare(u32 lane) {
    access.lanes = 1u << lane;
    access.undefined = request.undefinedLanes >> lane & 1;
    access.value =
        request.values ? request.values + lane * request.bytes : nullptr;
  }

  void checkAlignment(u32 mask, const u64 *at) {
    u32 alignment = request.alignment ? request.alignment : request.bytes;
    u64 low = 0;
    for (u32 l : Lanes(mask))
      low |= at[l];
    if (aligned(low, alignment))
      return;
    for (u32 l : Lanes(mask))
      if (!aligned(at[l], alignment))
        reportAlignment(warp, inst, l, at[l], alignment);
  }

  u32 shared(u32 mask, const u64 *at) {
    countShared(warp, mask, at, request.bytes, request.write);
    checkAlignment(mask, at);
    const Checks &checks = warp.block->launch->checks;
    u32 good = 0;
    if (!checks.race && !checks.uninit) {
      // Bounds only.
      for (u32 l : Lanes(mask)) {
        prepare(l);
        good |= place(l, touchShared(warp, at[l], request.bytes, access));
      }
      return good;
    }
    if (request.read && !request.write && sameAddress(mask, at)) {
      access.lanes = mask;
      u8 *pointer =
          touchShared(warp, at[__builtin_ctz(mask)], request.bytes, access);
      for (u32 l : Lanes(mask))
        good |= place(l, pointer);
      return good;
    }
    for (u32 l : Lanes(mask)) {
      prepare(l);
      good |= place(l, touchShared(warp, at[l], request.bytes, access));
    }
    return good;
  }

  static bool sameAddress(u32 mask, const u64 *at) {
    if (!(mask & (mask - 1)))
      return false;
    u64 first = at[__builtin_ctz(mask)];
    for (u32 l : Lanes(mask))
      if (at[l] != first)
        return false;
    return true;
  }

  u32 global(u32 mask) {
    countGlobal(warp, mask, addresses, request.bytes, request.write);
    checkAlignment(mask, addresses);
    LaunchState &launch = *warp.block->launch;
    u32 good = 0;
    if (request.read && !request.write && sameAddress(mask, addresses)) {
      access.lanes = mask;
      u8 *pointer = touchGlobal(warp, addresses[__builtin_ctz(mask)],
                                request.bytes, access);
      for (u32 l : Lanes(mask))
        good |= place(l, pointer);
      return good;
    }
    Region *region = nullptr;
    for (u32 l : Lanes(mask)) {
      prepare(l);
      u64 address = addresses[l];
      // Neighbouring lanes nearly always use one buffer.
      if (!region ||
          address - reinterpret_cast<u64>(region->data) + request.bytes >
              region->bytes)
        region = findRegion(launch, address, request.bytes);
      good |= place(
          l, region ? touchRegion(warp, *region, address, request.bytes, access)
                    : touchGlobal(warp, address, request.bytes, access));
    }
    return good;
  }

  u32 local(u32 mask, const u64 *at) {
    checkAlignment(mask, at);
    u64 size = warp.block->launch->kernel->localBytes;
    u32 good = 0;
    for (u32 l : Lanes(mask)) {
      if (at[l] + request.bytes <= size) {
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
      } else if (address + request.bytes <= launch.params.size()) {
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
      } else if (address - paramBegin < block.launch->params.size()) {
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
  u8 **pointers;
  Access access;
};

} // namespace

u32 resolve(Warp &warp, const Inst &inst, u32 mask, Space space,
            const u64 *addresses, const MemoryRequest &request, u8 **pointers) {
  return Resolver(warp, inst, addresses, request, pointers).run(mask, space);
}

//===----------------------------------------------------------------------===//
// Counters
//===----------------------------------------------------------------------===//

void countShared(Warp &warp, u32 mask, const u64 *addresses, u32 bytes,
                 bool write) {
  Counters &c = warp.block->executor->counters.totals;
  u64 moved = static_cast<u64>(__builtin_popcount(mask)) * bytes;
  (write ? c.sharedBytesWritten : c.sharedBytesRead) += moved;
  // 32 banks of 4 bytes; wide accesses go by half and quarter warps.
  u32 lanesAtOnce = bytes <= 4 ? 32 : bytes <= 8 ? 16 : 8;
  u32 words = std::max(1u, std::min(bytes, 16u) / 4);
  for (u32 begin = 0; begin < kWarpSize; begin += lanesAtOnce) {
    u32 lanes =
        mask & (lanesAtOnce == 32 ? ~0u : ((1u << lanesAtOnce) - 1) << begin);
    if (!lanes)
      continue;
    ++c.sharedRequests;
    // Per bank: the distinct words asked for.
    u32 seen[32][8];
    u8 counts[32] = {};
    u32 wavefronts = 1;
    for (u32 l : Lanes(lanes))
      for (u32 w = 0; w < words; ++w) {
        u32 word = static_cast<u32>(addresses[l] / 4) + w, bank = word % 32;
        u32 n = counts[bank];
        bool known = false;
        for (u32 i = 0; i < std::min(n, 8u) && !known; ++i)
          known = seen[bank][i] == word;
        if (known)
          continue;
        if (n < 8)
          seen[bank][n] = word;
        counts[bank] = static_cast<u8>(n + 1);
        wavefronts = std::max(wavefronts, n + 1);
      }
    c.sharedWavefronts += wavefronts;
  }
}

void countGlobal(Warp &warp, u32 mask, const u64 *addresses, u32 bytes,
                 bool write) {
  Counters &c = warp.block->executor->counters.totals;
  u64 moved = static_cast<u64>(__builtin_popcount(mask)) * bytes;
  (write ? c.globalBytesWritten : c.globalBytesRead) += moved;
  ++c.globalRequests;
  u64 sectors[kWarpSize * 2];
  u32 n = 0;
  bool ascending = true;
  for (u32 l : Lanes(mask)) {
    u64 first = addresses[l] / 32, last = (addresses[l] + bytes - 1) / 32;
    for (u64 sector = first; sector <= last && n < kWarpSize * 2; ++sector) {
      if (n && sectors[n - 1] == sector)
        continue;
      ascending &= n == 0 || sector > sectors[n - 1];
      sectors[n++] = sector;
    }
  }
  if (!ascending) {
    std::sort(sectors, sectors + n);
    n = static_cast<u32>(std::unique(sectors, sectors + n) - sectors);
  }
  c.globalSectors += n;
}

} // namespace moe::sim
