//===- MemoryCounters.cpp - Bank conflicts and sectors --------------------===//

#include "Memory.h"

#include <algorithm>

namespace moe::sim {
namespace {

constexpr u32 kBanks = 32;

/// Rounds in which 32 banks of 4 bytes serve `lanes`: the most distinct words
/// that one bank is asked for.
u32 wavefronts(u32 lanes, const u64 *addresses, u32 words) {
  u64 want = (1ull << words) - 1, taken = 0, twice = 0;
  for (u32 l : Lanes(lanes)) {
    u64 banks = want << (addresses[l] / 4 % kBanks);
    twice |= taken & banks;
    taken |= banks;
  }
  // No bank is asked twice, and none beyond the last, where they wrap.
  if (!twice && !(taken >> kBanks))
    return 1;
  u32 seen[kBanks][8];
  u8 counts[kBanks] = {};
  u32 most = 1;
  for (u32 l : Lanes(lanes))
    for (u32 w = 0; w < words; ++w) {
      u32 word = static_cast<u32>(addresses[l] / 4) + w, bank = word % kBanks;
      u32 n = counts[bank];
      bool known = false;
      for (u32 i = 0; i < std::min(n, 8u) && !known; ++i)
        known = seen[bank][i] == word;
      if (known)
        continue;
      if (n < 8)
        seen[bank][n] = word;
      counts[bank] = static_cast<u8>(n + 1);
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
    u32 lanes =
        mask & (lanesAtOnce == 32 ? ~0u : ((1u << lanesAtOnce) - 1) << begin);
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
