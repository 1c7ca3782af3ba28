//===- BulkCopyOps.cpp - cp.async.bulk, plain and tensor ------------------===//
//
// Loads land at a random later time, by the block's asynchronous actor, and
// complete bytes on an mbarrier: whoever waits there is ordered after them.
// Stores read shared memory at once or at the wait, by chance, and belong to
// their thread's bulk group.
//
//===----------------------------------------------------------------------===//

#include "Handlers.h"
#include "checks/Shadow.h"
#include "memory/BulkTransfer.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace moe::sim {
namespace {

constexpr u32 kSharedAlignment = 128;

//===----------------------------------------------------------------------===//
// Loads
//===----------------------------------------------------------------------===//

void fill(u8 *to, u32 bytes, const Transfer &transfer) {
  if (!transfer.nanFill) {
    std::memset(to, 0, bytes);
    return;
  }
  // The quiet NaN that every floating-point format reads in these bytes.
  for (u32 i = 0; i < bytes; ++i)
    to[i] = (i + 1) % transfer.elementBytes ? 0xff : 0x7f;
}

void countGlobalBulk(Warp &warp, u64 bytes, bool store) {
  Counters &c = warp.block->executor->counters.totals;
  (store ? c.globalBytesWritten : c.globalBytesRead) += bytes;
  ++c.globalRequests;
  c.globalSectors += (bytes + 31) / 32;
}

/// Into one block of the cluster: `to` and `mbarrier` are shared addresses.
void startLoad(Warp &warp, const Inst &inst, u32 lane, u64 to, u64 mbarrier,
               const Transfer &transfer) {
  startIncoming(warp, inst, lane,
                {to, mbarrier, static_cast<u32>(transfer.sharedBytes),
                 kPending | kAsync, [transfer](u8 *at) {
                   for (const Piece &piece : transfer.pieces) {
                     if (piece.global)
                       std::memcpy(at + piece.shared, piece.global,
                                   piece.bytes);
                     else
                       fill(at + piece.shared, piece.bytes, transfer);
                   }
                 }});
}

bool touchSources(Warp &warp, const Inst &inst, u32 lane,
                  const Transfer &transfer, bool write) {
  Access access(warp, 1u << lane, pcOf(warp, inst),
                write ? kAsync | kPending : kAsync);
  access.read = !write;
  access.write = write;
  for (const Piece &piece : transfer.pieces)
    if (piece.global && !touchGlobal(warp, reinterpret_cast<u64>(piece.global),
                                     piece.bytes, access))
      return false;
  return true;
}

/// The same for what a reduction changes. Reductions are atomic: two of them do
/// not race.
bool touchReduced(Warp &warp, const Transfer &transfer, const Access &access) {
  for (const Piece &piece : transfer.pieces) {
    Access atomic = access;
    atomic.write = true;
    atomic.flags = kStrong;
    if (piece.global && !touchGlobal(warp, reinterpret_cast<u64>(piece.global),
                                     piece.bytes, atomic))
      return false;
  }
  return true;
}

void checkTileAlignment(Warp &warp, const Inst &inst, u32 lane, u64 address,
                        u32 alignment) {
  if (address % alignment)
    reportAlignment(warp, inst, lane, address, alignment);
}

/// Alignment of a tile in shared memory.
u32 tileAlignment(const TensorMap &map, bool store) {
  static constexpr u32 loads[] = {kSharedAlignment, 256, 512, 1024};
  return store ? kSharedAlignment : loads[map.swizzle];
}

/// What one lane's instruction moves between the global side s[0] and the
/// shared address `at`; nothing if the tensor map is wrong. A map sets the
/// shape's element type.
std::optional<Transfer> transferOf(Warp &warp, const Inst &inst, u32 lane,
                                   BulkShape &shape, u64 at, bool store) {
  if (!shape.rank) {
    Transfer transfer;
    u64 global = lanesOf<u64>(warp, inst.s[0])[lane] + inst.imm;
    u32 bytes = lanesOf<u32>(warp, inst.s[4])[lane];
    checkTileAlignment(warp, inst, lane, global | at | bytes, 16);
    transfer.sharedBytes = bytes;
    transfer.pieces.push_back({0, reinterpret_cast<u8 *>(global), bytes});
    return transfer;
  }
  auto map = loadMap(warp, inst, lane);
  if (!map)
    return std::nullopt;
  if (map->rank() != shape.rank) {
    reportBulkBounds(warp, inst, lane,
                     "expected a tensor map of rank " +
                         std::to_string(shape.rank) + ", found rank " +
                         std::to_string(map->rank()));
    return std::nullopt;
  }
  i32 coordinates[5] = {};
  for (u32 d = 0; d < shape.rank; ++d)
    coordinates[d] = lanesOf<i32>(warp, inst.s[4 + d])[lane];
  checkTileAlignment(warp, inst, lane, at, tileAlignment(*map, store));
  shape.type = elementType(*map);
  shape.elementBytes = static_cast<u8>(map->elementBytes());
  return tileOf(*map, coordinates, at);
}

u64 rankBits(u32 rank) {
  return static_cast<u64>(rank + 1) << kClusterRankShift;
}

/// s: see BulkCopy.h.
void runLoad(Warp &warp, const Inst &inst, u32 mask) {
  BulkShape shape = BulkShape::unpack(inst.imm2);
  for (u32 l : Lanes(mask)) {
    u64 to =
        sharedAddress(warp, inst.s[1], shape.wideShared, 0, shape.generic, l);
    u64 mbarrier =
        sharedAddress(warp, inst.s[2], shape.wideMbarrier, 0, shape.generic, l);
    auto transfer = transferOf(warp, inst, l, shape, to, /*store=*/false);
    if (!transfer)
      continue;
    if (!touchSources(warp, inst, l, *transfer, false))
      continue;
    countGlobalBulk(warp, transfer->sharedBytes, false);
    if (!shape.multicast) {
      startLoad(warp, inst, l, to, mbarrier, *transfer);
      continue;
    }
    u64 window = (1ull << kClusterRankShift) - 1;
    u32 ranks = lanesOf<u32>(warp, inst.s[3])[l] & 0xffff;
    for (u32 rank : Lanes(ranks))
      startLoad(warp, inst, l, (to & window) | rankBits(rank),
                (mbarrier & window) | rankBits(rank), *transfer);
  }
}

/// shared::cta to shared::cluster. s: source, target, mbarrier, -, size.
void runClusterCopy(Warp &warp, const Inst &inst, u32 mask) {
  BulkShape shape = BulkShape::unpack(inst.imm2);
  for (u32 l : Lanes(mask)) {
    u64 from = laneAddress(warp, inst.s[0], inst.wideAddress, l) + inst.imm;
    u64 to = laneAddress(warp, inst.s[1], shape.wideShared, l);
    u64 mbarrier = laneAddress(warp, inst.s[2], shape.wideMbarrier, l);
    u32 bytes = lanesOf<u32>(warp, inst.s[4])[l];
    checkTileAlignment(warp, inst, l, from | to | bytes, 16);
    Access access(warp, 1u << l, pcOf(warp, inst), kAsync);
    access.read = true;
    u8 *source = touchShared(warp, from, bytes, access);
    if (!source)
      continue;
    warp.block->executor->counters.totals.sharedBytesRead += bytes;
    Incoming incoming{to, mbarrier, bytes, kPending | kAsync, {}};
    if (shape.reduces) {
      // Reductions are atomic: two of them do not race.
      incoming.flags |= kStrong;
      incoming.land = [=](u8 *at) { reduceBytes(at, source, bytes, shape); };
    } else {
      incoming.land = [=](u8 *at) { std::memcpy(at, source, bytes); };
    }
    startIncoming(warp, inst, l, std::move(incoming));
  }
}

/// st.async and red.async. s: target, mbarrier, values.
void runStoreAsync(Warp &warp, const Inst &inst, u32 mask) {
  BulkShape shape = BulkShape::unpack(inst.imm2);
  u32 size = shape.elementBytes, bytes = size * inst.vec;
  for (u32 l : Lanes(mask)) {
    u64 to = laneAddress(warp, inst.s[0], inst.wideAddress, l) + inst.imm;
    if (to % bytes)
      reportAlignment(warp, inst, l, to, bytes);
    std::array<u8, 16> values;
    for (u32 i = 0; i < inst.vec; ++i)
      std::memcpy(&values[i * size], warp.registers + inst.s[2 + i] + l * size,
                  size);
    // No asynchronous proxy: these are generic accesses that come later.
    Incoming incoming{to,
                      laneAddress(warp, inst.s[1], shape.wideMbarrier, l),
                      bytes,
                      kPending,
                      {}};
    if (shape.reduces) {
      incoming.flags |= kStrong;
      incoming.land = [=](u8 *at) {
        reduceBytes(at, values.data(), bytes, shape);
      };
    } else {
      incoming.land = [=](u8 *at) { std::memcpy(at, values.data(), bytes); };
    }
    incoming.outlivesBlock = true;
    startIncoming(warp, inst, l, std::move(incoming));
  }
}

//===----------------------------------------------------------------------===//
// Stores and reductions
//===----------------------------------------------------------------------===//

/// s: tensor map or target, source in shared memory, -, -, size or
/// coordinates.
void runStore(Warp &warp, const Inst &inst, u32 mask) {
  BulkShape shape = BulkShape::unpack(inst.imm2);
  for (u32 l : Lanes(mask)) {
    u64 from =
        sharedAddress(warp, inst.s[1], shape.wideShared, 0, shape.generic, l);
    auto planned = transferOf(warp, inst, l, shape, from, /*store=*/true);
    if (!planned)
      continue;
    const Transfer &transfer = *planned;
    u32 bytes = static_cast<u32>(transfer.sharedBytes);
    Access access(warp, 1u << l, pcOf(warp, inst), kAsync | kPending);
    access.read = true;
    u8 *source = touchShared(warp, from, bytes, access);
    if (!source)
      continue;
    if (shape.reduces ? !touchReduced(warp, transfer, access)
                      : !touchSources(warp, inst, l, transfer, true))
      continue;
    countGlobalBulk(warp, bytes, true);
    warp.block->executor->counters.totals.sharedBytesRead += bytes;
    BulkStore store;
    store.group = warp.bulkGroup[l];
    store.pc = access.pc;
    store.lane = static_cast<u8>(l);
    store.sourceRead = store.landed = false;
    store.reads.push_back(
        {static_cast<u64>(source - warp.block->shared), bytes});
    for (const Piece &piece : transfer.pieces)
      if (piece.global && !shape.reduces)
        store.writes.push_back(
            {reinterpret_cast<u64>(piece.global), piece.bytes});
    LaunchState *launch = warp.block->launch;
    store.land = [source, transfer, shape, launch] {
      // Blocks on other host threads may add to the same bytes.
      std::unique_lock<std::mutex> guard(launch->syncMutex, std::defer_lock);
      if (shape.reduces && launch->threads > 1)
        guard.lock();
      for (const Piece &piece : transfer.pieces) {
        if (!piece.global)
          continue;
        if (shape.reduces)
          reduceBytes(piece.global, source + piece.shared, piece.bytes, shape);
        else
          std::memcpy(piece.global, source + piece.shared, piece.bytes);
      }
    };
    if (warp.block->random.oneIn(2)) {
      store.land();
      store.landed = true;
    }
    warp.bulkStores.push_back(std::move(store));
  }
}

void runCommit(Warp &warp, const Inst &, u32 mask) {
  for (u32 l : Lanes(mask))
    ++warp.bulkGroup[l];
}

void completeStore(Warp &warp, BulkStore &store, bool readOnly) {
  LaunchState &launch = *warp.block->launch;
  if (!store.landed) {
    store.land();
    store.landed = true;
    warp.block->executor->progressed = true;
  }
  Access access(warp, 1u << store.lane, store.pc);
  if (!launch.checks.race)
    return;
  if (!store.sourceRead)
    for (const SharedRange &range : store.reads)
      warp.block->shadow->completeRead(access, range.offset, range.bytes);
  if (readOnly)
    return;
  for (auto [address, bytes] : store.writes)
    if (Region *region = findRegion(launch, address, bytes))
      region->shadow->completeWrite(
          access, address - reinterpret_cast<u64>(region->data), bytes);
}

/// imm: groups that may stay in flight; aux: .read.
void runWait(Warp &warp, const Inst &inst, u32 mask) {
  for (BulkStore &store : warp.bulkStores) {
    if (!(mask >> store.lane & 1) ||
        store.group + inst.imm >= warp.bulkGroup[store.lane])
      continue;
    completeStore(warp, store, inst.aux);
    store.sourceRead = true;
  }
  if (inst.aux)
    return;
  std::erase_if(warp.bulkStores, [&](const BulkStore &store) {
    return (mask >> store.lane & 1) &&
           store.group + inst.imm < warp.bulkGroup[store.lane];
  });
}

} // namespace

void addBulkCopyOps(HandlerTable &table) {
  table["bulk.load"] = runLoad;
  table["bulk.cluster"] = runClusterCopy;
  table["bulk.store"] = runStore;
  table["store.async"] = runStoreAsync;
  table["bulk.commit_group"] = runCommit;
  table["bulk.wait_group"] = runWait;
}

} // namespace moe::sim
