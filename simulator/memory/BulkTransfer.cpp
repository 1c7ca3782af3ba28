//===- BulkTransfer.cpp - What a bulk copy moves --------------------------===//

#include "BulkTransfer.h"
#include "checks/Shadow.h"
#include "execute/Formats.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace moe::sim {

void reportBulkBounds(Warp &warp, const Inst &inst, u32 lane,
                      const std::string &what) {
  Reporter &reporter = *warp.block->launch->reporter;
  u32 pc = pcOf(warp, inst);
  if (!reporter.repeats(FindingKind::Bounds, warp, pc))
    reporter.add(FindingKind::Bounds, warp, lane, pc, what);
}

//===----------------------------------------------------------------------===//
// Tiles
//===----------------------------------------------------------------------===//

/// Swizzled place of a byte: 16-byte chunks are permuted by bits of the row.
static u64 swizzle(u64 address, u32 mode) {
  u64 mask = mode == 3 ? 7 : mode == 2 ? 3 : mode == 1 ? 1 : 0;
  return address ^ ((address >> 7 & mask) << 4);
}

NumberType elementType(const TensorMap &map) {
  using N = NumberType;
  static constexpr N types[] = {N::U8,  N::U16, N::U32, N::S32, N::U64,
                                N::S64, N::F16, N::F32, N::F64, N::BF16,
                                N::F32, N::F32, N::F32};
  return types[map.dataType];
}

Transfer tileOf(const TensorMap &map, const i32 *coordinates,
                u64 sharedAddress) {
  Transfer transfer;
  transfer.nanFill = map.nanFill;
  u32 elementBytes = map.elementBytes();
  transfer.elementBytes = elementBytes;
  u32 box[5] = {1, 1, 1, 1, 1};
  for (u32 d = 0; d < map.rank(); ++d)
    box[d] = map.extent(d);
  u32 rowBytes = box[0] * elementBytes;
  u32 step = map.swizzle ? 16 : elementBytes;
  u64 place = 0;
  u32 i[5];
  for (i[4] = 0; i[4] < box[4]; ++i[4])
    for (i[3] = 0; i[3] < box[3]; ++i[3])
      for (i[2] = 0; i[2] < box[2]; ++i[2])
        for (i[1] = 0; i[1] < box[1]; ++i[1], place += rowBytes) {
          bool inside = true;
          u64 row = map.address;
          for (u32 d = 1; d < map.rank(); ++d) {
            i64 at = static_cast<i64>(coordinates[d]) +
                     static_cast<i64>(i[d]) * map.elementStrides[d];
            inside &= at >= 0 && at < map.dims[d];
            row += static_cast<u64>(at) * map.outerStrides[d - 1];
          }
          for (u32 byte = 0; byte < rowBytes; byte += step) {
            i64 first = static_cast<i64>(coordinates[0]) * elementBytes + byte;
            i64 end = static_cast<i64>(map.dims[0]) * elementBytes;
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
// Into shared memory
//===----------------------------------------------------------------------===//

static void landIncoming(Warp &warp, u32 lane, u32 pc, Block &owner, u64 offset,
                         const Incoming &incoming, Mbarrier &barrier) {
  incoming.land(owner.shared + offset);
  const Checks &checks = warp.block->launch->checks;
  if (checks.race || checks.uninit) {
    Completion by{owner.firstActor + owner.asyncActor(), barrier.asyncLane,
                  owner.asyncTime};
    owner.shadow->completeWrite(
        Access(warp, 1u << lane, pc, incoming.flags & ~kPending), offset,
        incoming.bytes, by);
  }
  barrier.arriving.learn(owner.linear, owner.asyncActor(),
                         1u << barrier.asyncLane, owner.asyncTime + 1);
  barrier.lastLanding = owner.asyncTime++;
  barrier.transactions -= static_cast<i64>(incoming.bytes);
  checkPhase(owner, barrier);
}

void startIncoming(Warp &warp, const Inst &inst, u32 lane, Incoming incoming) {
  u32 pc = pcOf(warp, inst);
  Access access(warp, 1u << lane, pc, incoming.flags);
  access.write = true;
  access.read = incoming.flags & kStrong;
  if (!touchShared(warp, incoming.to, incoming.bytes, access))
    return;
  u64 offset;
  Block *owner = sharedOwner(*warp.block, incoming.to, incoming.bytes, offset);
  MbarrierRef ref = findMbarrier(warp, inst, lane, incoming.mbarrier,
                                 incoming.flags & kAsync);
  if (!ref.barrier)
    return;
  if (ref.owner != owner) {
    reportBulkBounds(warp, inst, lane,
                     "expected the mbarrier in the block that the bytes go to, "
                     "found it in another block of the cluster");
    return;
  }
  Counters &c = warp.block->executor->counters.totals;
  c.sharedBytesWritten += incoming.bytes;
  Block &waits = incoming.outlivesBlock ? *owner : *warp.block;
  schedule(waits, warp, lane, pc,
           [&warp, lane, pc, owner, offset, place = ref.place,
            serial = ref.barrier->serial, incoming = std::move(incoming)] {
             if (Mbarrier *barrier =
                     findStarted(warp, lane, pc, *owner, place, serial))
               landIncoming(warp, lane, pc, *owner, offset, incoming, *barrier);
           });
}

//===----------------------------------------------------------------------===//
// Reductions
//===----------------------------------------------------------------------===//

namespace {

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
  if constexpr (std::is_same_v<T, u32>) {
    if (op == BulkReduction::Inc)
      return reduce<T>(to, from, [](T a, T b) { return a >= b ? 0 : a + 1; });
    if (op == BulkReduction::Dec)
      return reduce<T>(to, from,
                       [](T a, T b) { return a == 0 || a > b ? b : a - 1; });
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

} // namespace

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

} // namespace moe::sim
