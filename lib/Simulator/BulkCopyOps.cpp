//===- BulkCopyOps.cpp - cp.async.bulk, plain and tensor ------------------===//
//
// Loads land at a random later time, by the block's asynchronous actor, and
// complete bytes on an mbarrier: whoever waits there is ordered after them.
// Stores read shared memory at once or at the wait, by chance, and belong to
// their thread's bulk group.
//
//===----------------------------------------------------------------------===//

#include "Async.h"
#include "BulkCopy.h"
#include "Formats.h"
#include "Handlers.h"

#include "MoE/Simulator/TensorMap.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace moe::sim {
namespace {

constexpr u32 kSharedAlignment = 128;

/// Contiguous bytes of a transfer; no global side where a tile sticks out of
/// its tensor.
struct Piece {
  u64 shared; // from the tile's start
  u8 *global;
  u32 bytes;
};

struct Transfer {
  u64 sharedBytes = 0;
  std::vector<Piece> pieces;
  bool nanFill = false;
  u32 elementBytes = 1;
};

void reportBounds(Warp &warp, const Inst &inst, u32 lane,
                  const std::string &what) {
  Reporter &reporter = *warp.block->launch->reporter;
  u32 pc = pcOf(warp, inst);
  if (!reporter.repeats(FindingKind::Bounds, pc))
    reporter.add(FindingKind::Bounds, warp, lane, pc, what);
}

//===----------------------------------------------------------------------===//
// Tiles
//===----------------------------------------------------------------------===//

/// Swizzled place of a byte: 16-byte chunks are permuted by bits of the row.
u64 swizzle(u64 address, u32 mode) {
  u64 mask = mode == 3 ? 7 : mode == 2 ? 3 : mode == 1 ? 1 : 0;
  return address ^ ((address >> 7 & mask) << 4);
}

std::optional<TensorMap> loadMap(Warp &warp, const Inst &inst, u32 lane) {
  u64 address = lanesOf<u64>(warp, inst.s[0])[lane] + inst.imm;
  LaunchState &launch = *warp.block->launch;
  const u8 *from = nullptr;
  u64 params = reinterpret_cast<u64>(launch.params.data());
  if (address + sizeof(TensorMap) <= launch.params.size())
    from = launch.params.data() + address;
  else if (address - params + sizeof(TensorMap) <= launch.params.size() ||
           findRegion(launch, address, sizeof(TensorMap)))
    from = reinterpret_cast<const u8 *>(address);
  TensorMap map;
  if (from)
    std::memcpy(&map, from, sizeof map);
  if (from && map.magic == TensorMap::kMagic)
    return map;
  reportBounds(warp, inst, lane,
               "expected the address of a tensor map, found other memory");
  return std::nullopt;
}

/// The rows of the box at `coordinates`, cut at the tensor's edges.
Transfer tileOf(const TensorMap &map, const i32 *coordinates,
                u64 sharedAddress) {
  Transfer transfer;
  transfer.nanFill = map.nanFill;
  transfer.elementBytes = map.elementBytes;
  u32 box[5] = {1, 1, 1, 1, 1};
  std::copy_n(map.box, map.rank, box);
  u32 rowBytes = box[0] * map.elementBytes;
  u32 step = map.swizzle ? 16 : map.elementBytes;
  u64 place = 0;
  u32 i[5];
  for (i[4] = 0; i[4] < box[4]; ++i[4])
    for (i[3] = 0; i[3] < box[3]; ++i[3])
      for (i[2] = 0; i[2] < box[2]; ++i[2])
        for (i[1] = 0; i[1] < box[1]; ++i[1], place += rowBytes) {
          bool inside = true;
          u64 row = map.address;
          for (u32 d = 1; d < map.rank; ++d) {
            i64 at = static_cast<i64>(coordinates[d]) + i[d];
            inside &= at >= 0 && at < map.dims[d];
            row += static_cast<u64>(at) * map.strides[d];
          }
          for (u32 byte = 0; byte < rowBytes; byte += step) {
            i64 first =
                static_cast<i64>(coordinates[0]) * map.elementBytes + byte;
            i64 end = static_cast<i64>(map.dims[0]) * map.elementBytes;
            // A chunk at the right edge may be partly inside.
            u32 valid =
                !inside || first < 0 || first >= end
                    ? 0
                    : static_cast<u32>(std::min<i64>(step, end - first));
            u64 at = swizzle(sharedAddress + place + byte, map.swizzle) -
                     sharedAddress;
            u8 *global = reinterpret_cast<u8 *>(row + first);
            if (valid)
              transfer.pieces.push_back({at, global, valid});
            if (valid < step)
              transfer.pieces.push_back({at + valid, nullptr, step - valid});
          }
        }
  transfer.sharedBytes = place;
  // Neighbours that continue each other are one copy.
  std::vector<Piece> merged;
  for (const Piece &piece : transfer.pieces) {
    Piece *last = merged.empty() ? nullptr : &merged.back();
    bool continues =
        last && last->shared + last->bytes == piece.shared &&
        (!last->global) == (!piece.global) &&
        (!piece.global || last->global + last->bytes == piece.global);
    if (continues)
      last->bytes += piece.bytes;
    else
      merged.push_back(piece);
  }
  transfer.pieces = std::move(merged);
  return transfer;
}

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

void landLoad(Warp &warp, u32 lane, u32 pc, Block &owner, u64 offset,
              const Transfer &transfer, Mbarrier &barrier) {
  for (const Piece &piece : transfer.pieces) {
    u8 *to = owner.shared + offset + piece.shared;
    if (piece.global)
      std::memcpy(to, piece.global, piece.bytes);
    else
      fill(to, piece.bytes, transfer);
  }
  const Checks &checks = warp.block->launch->checks;
  if (checks.race || checks.uninit) {
    Completion by{owner.firstActor + owner.asyncActor(), barrier.asyncLane,
                  owner.asyncTime};
    owner.shadow.completeWrite(Access(warp, 1u << lane, pc, kAsync), offset,
                               static_cast<u32>(transfer.sharedBytes), by);
  }
  barrier.arriving.learn(owner.linear, owner.asyncActor(),
                         1u << barrier.asyncLane, owner.asyncTime + 1);
  ++owner.asyncTime;
  barrier.transactions -= static_cast<i64>(transfer.sharedBytes);
  checkPhase(owner, barrier);
}

void countBulk(Warp &warp, u64 bytes, bool store) {
  Counters &c = warp.block->executor->counters.totals;
  (store ? c.globalBytesWritten : c.globalBytesRead) += bytes;
  (store ? c.sharedBytesRead : c.sharedBytesWritten) += bytes;
  ++c.globalRequests;
  c.globalSectors += (bytes + 31) / 32;
}

/// Into one block of the cluster: `to` and `mbarrier` are shared addresses.
void startLoad(Warp &warp, const Inst &inst, u32 lane, u64 to, u64 mbarrier,
               const Transfer &transfer) {
  u32 pc = pcOf(warp, inst);
  Access access(warp, 1u << lane, pc, kPending | kAsync);
  access.write = true;
  u32 bytes = static_cast<u32>(transfer.sharedBytes);
  if (!touchShared(warp, to, bytes, access))
    return;
  u64 offset;
  Block *owner = sharedOwner(*warp.block, to, bytes, offset);
  MbarrierRef ref = findMbarrier(warp, inst, lane, mbarrier, true);
  if (!ref.barrier)
    return;
  countBulk(warp, bytes, false);
  schedule(warp, lane, pc, [&warp, lane, pc, owner, offset, transfer, ref] {
    landLoad(warp, lane, pc, *owner, offset, transfer, *ref.barrier);
  });
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

void checkTileAlignment(Warp &warp, const Inst &inst, u32 lane, u64 address,
                        u32 alignment) {
  if (address % alignment)
    reportAlignment(warp, inst, lane, address, alignment);
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
    Transfer transfer;
    if (shape.rank) {
      auto map = loadMap(warp, inst, l);
      if (!map)
        continue;
      i32 coordinates[5] = {};
      for (u32 d = 0; d < shape.rank; ++d)
        coordinates[d] = lanesOf<i32>(warp, inst.s[4 + d])[l];
      if (map->rank != shape.rank) {
        reportBounds(warp, inst, l,
                     "expected a tensor map of rank " +
                         std::to_string(shape.rank) + ", found rank " +
                         std::to_string(map->rank));
        continue;
      }
      checkTileAlignment(warp, inst, l, to,
                         map->swizzle == 3   ? 1024
                         : map->swizzle == 2 ? 512
                         : map->swizzle == 1 ? 256
                                             : kSharedAlignment);
      transfer = tileOf(*map, coordinates, to);
    } else {
      u64 from = lanesOf<u64>(warp, inst.s[0])[l] + inst.imm;
      u32 bytes = lanesOf<u32>(warp, inst.s[4])[l];
      checkTileAlignment(warp, inst, l, from | to | bytes, 16);
      transfer.sharedBytes = bytes;
      transfer.pieces.push_back({0, reinterpret_cast<u8 *>(from), bytes});
    }
    if (!touchSources(warp, inst, l, transfer, false))
      continue;
    if (!shape.multicast) {
      startLoad(warp, inst, l, to, mbarrier, transfer);
      continue;
    }
    u64 window = (1ull << kClusterRankShift) - 1;
    u32 ranks = lanesOf<u32>(warp, inst.s[3])[l] & 0xffff;
    for (u32 rank : Lanes(ranks))
      startLoad(warp, inst, l, (to & window) | rankBits(rank),
                (mbarrier & window) | rankBits(rank), transfer);
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
    Transfer transfer;
    transfer.sharedBytes = bytes;
    transfer.pieces.push_back({0, source, bytes});
    startLoad(warp, inst, l, to, mbarrier, transfer);
  }
}

//===----------------------------------------------------------------------===//
// Stores and reductions
//===----------------------------------------------------------------------===//

template <typename T, typename F>
void reduce(u8 *to, const u8 *from, F f) {
  T a, b;
  std::memcpy(&a, to, sizeof a);
  std::memcpy(&b, from, sizeof b);
  a = f(a, b);
  std::memcpy(to, &a, sizeof a);
}

template <typename T>
void reduceElement(u8 *to, const u8 *from, BulkReduction op) {
  switch (op) {
  case BulkReduction::Add:
    return reduce<T>(to, from, [](T a, T b) { return T(a + b); });
  case BulkReduction::Min:
    return reduce<T>(to, from, [](T a, T b) { return std::min(a, b); });
  case BulkReduction::Max:
    return reduce<T>(to, from, [](T a, T b) { return std::max(a, b); });
  default:
    break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == BulkReduction::And)
      reduce<T>(to, from, [](T a, T b) { return T(a & b); });
    else if (op == BulkReduction::Or)
      reduce<T>(to, from, [](T a, T b) { return T(a | b); });
    else
      reduce<T>(to, from, [](T a, T b) { return T(a ^ b); });
  }
}

template <float (*Load)(u16), u16 (*Store)(float)>
void reduceHalf(u8 *to, const u8 *from, BulkReduction op) {
  reduce<u16>(to, from, [op](u16 a, u16 b) {
    float x = Load(a), y = Load(b);
    return op == BulkReduction::Add                ? Store(x + y)
           : (x < y) == (op == BulkReduction::Min) ? a
                                                   : b;
  });
}

void reduceBytes(u8 *to, const u8 *from, u32 bytes, const BulkShape &shape) {
  using N = NumberType;
  u32 size = shape.elementBytes;
  for (u32 i = 0; i + size <= bytes; i += size) {
    u8 *t = to + i;
    const u8 *f = from + i;
    switch (shape.type) {
    case N::F16:
      reduceHalf<f16ToFloat, floatToF16>(t, f, shape.reduction);
      break;
    case N::BF16:
      reduceHalf<bf16ToFloat, floatToBF16>(t, f, shape.reduction);
      break;
    case N::F32:
      reduceElement<float>(t, f, shape.reduction);
      break;
    case N::F64:
      reduceElement<double>(t, f, shape.reduction);
      break;
    case N::S32:
      reduceElement<i32>(t, f, shape.reduction);
      break;
    case N::S64:
      reduceElement<i64>(t, f, shape.reduction);
      break;
    case N::U64:
      reduceElement<u64>(t, f, shape.reduction);
      break;
    default:
      reduceElement<u32>(t, f, shape.reduction);
      break;
    }
  }
}

/// s: tensor map or target, source in shared memory, -, -, size or
/// coordinates.
void runStore(Warp &warp, const Inst &inst, u32 mask) {
  BulkShape shape = BulkShape::unpack(inst.imm2);
  for (u32 l : Lanes(mask)) {
    u64 from =
        sharedAddress(warp, inst.s[1], shape.wideShared, 0, shape.generic, l);
    Transfer transfer;
    if (shape.rank) {
      auto map = loadMap(warp, inst, l);
      if (!map)
        continue;
      i32 coordinates[5] = {};
      for (u32 d = 0; d < shape.rank; ++d)
        coordinates[d] = lanesOf<i32>(warp, inst.s[4 + d])[l];
      checkTileAlignment(warp, inst, l, from, kSharedAlignment);
      transfer = tileOf(*map, coordinates, from);
    } else {
      u64 to = lanesOf<u64>(warp, inst.s[0])[l] + inst.imm;
      u32 bytes = lanesOf<u32>(warp, inst.s[4])[l];
      checkTileAlignment(warp, inst, l, from | to | bytes, 16);
      transfer.sharedBytes = bytes;
      transfer.pieces.push_back({0, reinterpret_cast<u8 *>(to), bytes});
    }
    u32 bytes = static_cast<u32>(transfer.sharedBytes);
    Access access(warp, 1u << l, pcOf(warp, inst), kAsync | kPending);
    access.read = true;
    u8 *source = touchShared(warp, from, bytes, access);
    if (!source)
      continue;
    // Reductions are atomic: two of them do not race.
    if (shape.reduces) {
      for (const Piece &piece : transfer.pieces) {
        Access atomic = access;
        atomic.write = true;
        atomic.flags = kStrong;
        if (piece.global)
          touchGlobal(warp, reinterpret_cast<u64>(piece.global), piece.bytes,
                      atomic);
      }
    } else if (!touchSources(warp, inst, l, transfer, true)) {
      continue;
    }
    countBulk(warp, bytes, true);
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
    store.land = [source, transfer, shape] {
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
      warp.block->shadow.completeRead(access, range.offset, range.bytes);
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
  table["bulk.commit_group"] = runCommit;
  table["bulk.wait_group"] = runWait;
}

} // namespace moe::sim
