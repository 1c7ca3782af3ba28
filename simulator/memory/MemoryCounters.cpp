//===- MemoryCounters.cpp - Bank conflicts and sectors --------------------===//

#include "Memory.h"

#include <algorithm>

namespace moe::sim {
namespace {

constexpr u32 kBanks = 32;

/// Rounds in which 32 banks of 4 bytes serve the lanes, each of which asks for
/// `words` words: the most that one group of banks is asked for.
u32 wavefronts(u32 lanes, const u64 *addresses, u32 words) {
  u32 groups = kBanks / words, shift = 2 + __builtin_ctz(words);
  u32 seen = 0;
  u64 first = addresses[__builtin_ctz(lanes)], moved = 0;
  for (u32 l : Lanes(lanes)) {
    seen |= 1u << (addresses[l] >> shift & (groups - 1));
    moved |= addresses[l] ^ first;
  }
  // Every lane has a group of its own, or all read one row of the banks.
  if (__builtin_popcount(seen) == __builtin_popcount(lanes) ||
      moved < 4 * kBanks)
    return 1;
  u32 asked[kBanks][8];
  u8 counts[kBanks] = {};
  u32 most = 1;
  for (u32 l : Lanes(lanes)) {
    u32 unit = static_cast<u32>(addresses[l] >> shift);
    u32 group = unit & (groups - 1), n = counts[group];
    bool known = false;
    for (u32 i = 0; i < std::min(n, 8u) && !known; ++i)
      known = asked[group][i] == unit;
    if (known)
      continue;
    if (n < 8)
      asked[group][n] = unit;
    counts[group] = static_cast<u8>(n + 1);
    most = std::max(most, n + 1);
  }
  return most;
}

} // namespace

void countShared(Warp &warp, u32 mask, const u64 *addresses, u32 bytes,
                 bool write) {
  Counters &c = warp.block->executor->counters.totals;
  u64 moved = static_cast<u64>(__builtin_popcount(mask)) * bytes;
  (write ? c.sharedBytesWritten : c.sharedBytesRead) += moved;
  // Wide accesses go by half and quarter warps.
  u32 lanesAtOnce = bytes <= 4 ? 32 : bytes <= 8 ? 16 : 8;
  u32 words = std::max(1u, std::min(bytes, 16u) / 4);
  for (u32 begin = 0; begin < kWarpSize; begin += lanesAtOnce) {
    u32 phase = lanesAtOnce == 32 ? ~0u : ((1u << lanesAtOnce) - 1) << begin;
    u32 lanes = mask & phase;
    if (!lanes)
      continue;
    ++c.sharedRequests;
    c.sharedWavefronts += wavefronts(lanes, addresses, words);
  }
}

void countConsecutive(Warp &warp, u64 address, u32 bytes, bool write) {
  Counters &c = warp.block->executor->counters.totals;
  (write ? c.globalBytesWritten : c.globalBytesRead) += bytes;
  ++c.globalRequests;
  c.globalSectors += (address + bytes - 1) / 32 - address / 32 + 1;
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
