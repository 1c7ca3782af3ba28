//===- MbarrierOps.cpp - mbarrier -----------------------------------------===//
//
// The state lies in a side table; the eight bytes in shared memory are only
// shadowed. A phase completes when all arrivals have come and all announced
// bytes too.
//
//===----------------------------------------------------------------------===//

#include "Async.h"
#include "Handlers.h"
#include "checks/Shadow.h"

#include <algorithm>

namespace moe::sim {
namespace {

constexpr u32 kMbarrierBytes = 8;
/// Of arrivals, and of bytes either way.
constexpr u32 kMaxCount = (1u << 20) - 1;

void report(Warp &warp, u32 lane, u32 pc, FindingKind kind,
            const std::string &what) {
  Reporter &reporter = *warp.block->launch->reporter;
  if (!reporter.repeats(kind, warp, pc))
    reporter.add(kind, warp, lane, pc, what);
}

void expect(Warp &warp, u32 lane, u32 pc, Mbarrier &barrier, i64 bytes) {
  barrier.transactions += bytes;
  i64 most = kMaxCount;
  if (barrier.transactions > most || barrier.transactions < -most)
    report(warp, lane, pc, FindingKind::Bounds,
           "expected the bytes that an mbarrier waits for in [-" +
               std::to_string(most) + ", " + std::to_string(most) +
               "], found " + std::to_string(barrier.transactions));
}

/// The initialisation must be ordered before every use; for the asynchronous
/// proxy a proxy fence has to lie between.
void checkInit(Warp &warp, const Inst &inst, u32 lane, const Mbarrier &barrier,
               bool byAsyncProxy) {
  if (!warp.block->launch->checks.race)
    return;
  const Clock &clock = warp.clockOf(lane);
  bool own = barrier.initBlock == blockOf(warp);
  bool same =
      own && barrier.initActor == warp.index && barrier.initLane == lane;
  u32 lanes = 1u << barrier.initLane;
  bool ordered = same || clock.knows(barrier.initBlock, barrier.initActor,
                                     lanes, barrier.initTime);
  Reporter &reporter = *warp.block->launch->reporter;
  u32 pc = pcOf(warp, inst);
  if (!ordered)
    report(warp, lane, pc, FindingKind::Race,
           "uses an mbarrier that was initialised at " +
               reporter.describe(barrier.initPc) + "; nothing orders the two");
  else if (byAsyncProxy && own &&
           !warp.block->launch->config->allows.unfencedInit &&
           !clock.proxy.knows(barrier.initActor, lanes, barrier.initTime))
    report(warp, lane, pc, FindingKind::Race,
           "an asynchronous copy uses an mbarrier that was initialised at " +
               reporter.describe(barrier.initPc) +
               ": expected fence.proxy.async or fence.mbarrier_init after the "
               "initialisation");
}

void runInit(Warp &warp, const Inst &inst, u32 mask) {
  u32 pc = pcOf(warp, inst);
  for (u32 l : Lanes(mask)) {
    u64 address = sharedAddress(warp, inst.s[0], inst.wideAddress, inst.imm,
                                inst.aux2, l);
    if (address % kMbarrierBytes)
      reportAlignment(warp, inst, l, address, kMbarrierBytes);
    Access access(warp, 1u << l, pc);
    access.write = true;
    u8 *pointer = touchShared(warp, address, kMbarrierBytes, access);
    if (!pointer)
      continue;
    Block &block = *warp.block;
    u64 offset = static_cast<u64>(pointer - block.shared);
    u32 count = lanesOf<u32>(warp, inst.s[1])[l];
    if (count < 1 || count > kMaxCount)
      report(warp, l, pc, FindingKind::Bounds,
             "expected an mbarrier's count in [1, " +
                 std::to_string(kMaxCount) + "], found " +
                 std::to_string(count));
    Mbarrier &barrier = block.mbarriers[offset];
    u32 asyncLane = static_cast<u32>(block.mbarriers.size() - 1) % kWarpSize;
    barrier = Mbarrier();
    barrier.count = count;
    barrier.pending = count;
    barrier.arriving.reset(block.linear, block.actors());
    barrier.completed.reset(block.linear, block.actors());
    barrier.initBlock = block.linear;
    barrier.initActor = warp.index;
    barrier.initLane = l;
    barrier.initTime = warp.time;
    barrier.initPc = pc;
    barrier.asyncLane = asyncLane;
    barrier.serial = ++block.numMbarriers;
    block.executor->progressed = true;
  }
}

/// Whoever invalidates an mbarrier must have waited for the copies that
/// complete on it: those on their way would have none.
void checkCopies(Warp &warp, u32 lane, u32 pc, const MbarrierRef &ref) {
  const Mbarrier &barrier = *ref.barrier;
  u32 asyncLane = 1u << barrier.asyncLane;
  bool landed =
      !barrier.lastLanding ||
      warp.clockOf(lane).knows(ref.owner->linear, ref.owner->asyncActor(),
                               asyncLane, barrier.lastLanding);
  if (barrier.transactions > 0 || !landed)
    report(warp, lane, pc, FindingKind::Race,
           "invalidates an mbarrier on which copies complete that nothing has "
           "waited for");
}

void runInvalidate(Warp &warp, const Inst &inst, u32 mask) {
  u32 pc = pcOf(warp, inst);
  for (u32 l : Lanes(mask)) {
    u64 address = sharedAddress(warp, inst.s[0], inst.wideAddress, inst.imm,
                                inst.aux2, l);
    MbarrierRef ref = findMbarrier(warp, inst, l, address, false);
    if (!ref.barrier)
      continue;
    if (warp.block->launch->checks.race)
      checkCopies(warp, l, pc, ref);
    Access access(warp, 1u << l, pc);
    access.write = access.undefined = true;
    touchShared(warp, address, kMbarrierBytes, access);
    ref.owner->mbarriers.erase(ref.place);
  }
}

/// The opaque state that arrive returns: the phase and the pending count.
constexpr u32 kPendingBits = 20;

u64 stateOf(const Mbarrier &barrier) {
  return barrier.phase << kPendingBits |
         (static_cast<u64>(barrier.pending) & ((1u << kPendingBits) - 1));
}

void runPendingCount(Warp &warp, const Inst &inst, u32 mask) {
  for (u32 l : Lanes(mask))
    lanesOf<u32>(warp, inst.d[0])[l] =
        static_cast<u32>(lanesOf<u64>(warp, inst.s[0])[l]) &
        ((1u << kPendingBits) - 1);
}

void drop(Mbarrier &barrier, u32 count) {
  barrier.count -= std::min(barrier.count, count);
}

/// aux bits: 1 expect_tx, 2 drop, 4 relaxed, 8 noComplete. s: address, count
/// or bytes (expect_tx).
void runArrive(Warp &warp, const Inst &inst, u32 mask) {
  u32 pc = pcOf(warp, inst);
  for (u32 l : Lanes(mask)) {
    u64 address = sharedAddress(warp, inst.s[0], inst.wideAddress, inst.imm,
                                inst.aux2, l);
    MbarrierRef ref = findMbarrier(warp, inst, l, address, false);
    if (!ref.barrier)
      continue;
    u32 operand = inst.ns > 1 ? lanesOf<u32>(warp, inst.s[1])[l] : 1;
    u32 count = inst.aux & 1 ? 1 : operand;
    if (inst.nd && inst.d[0] != kNone)
      lanesOf<u64>(warp, inst.d[0])[l] = stateOf(*ref.barrier);
    if (inst.aux & 1)
      expect(warp, l, pc, *ref.barrier, operand);
    if (inst.aux & 2)
      drop(*ref.barrier, count);
    if (inst.aux & 4) {
      ref.barrier->pending -= count;
      checkPhase(*ref.owner, *ref.barrier);
    } else {
      arriveOn(warp, l, pc, ref, count);
    }
  }
  tick(warp);
}

/// aux: 1 for complete_tx.
void runExpectTx(Warp &warp, const Inst &inst, u32 mask) {
  for (u32 l : Lanes(mask)) {
    u64 address = sharedAddress(warp, inst.s[0], inst.wideAddress, inst.imm,
                                inst.aux2, l);
    MbarrierRef ref = findMbarrier(warp, inst, l, address, false);
    if (!ref.barrier)
      continue;
    i64 bytes = lanesOf<u32>(warp, inst.s[1])[l];
    expect(warp, l, pcOf(warp, inst), *ref.barrier, inst.aux ? -bytes : bytes);
    checkPhase(*ref.owner, *ref.barrier);
  }
}

/// aux bits: 1 parity, 4 relaxed. Failing gives the turn to others, which is
/// what try_wait does and what test_wait loops hope for.
void runTest(Warp &warp, const Inst &inst, u32 mask) {
  u32 result = 0;
  for (u32 l : Lanes(mask)) {
    u64 address = sharedAddress(warp, inst.s[0], inst.wideAddress, inst.imm,
                                inst.aux2, l);
    MbarrierRef ref = findMbarrier(warp, inst, l, address, false);
    if (!ref.barrier) {
      // Waiting on nothing would only hide the finding in a livelock.
      result |= 1u << l;
      continue;
    }
    u64 phase = ref.barrier->phase;
    bool done = inst.aux & 1
                    ? (phase & 1) != (lanesOf<u32>(warp, inst.s[1])[l] & 1)
                    : phase > lanesOf<u64>(warp, inst.s[1])[l] >> kPendingBits;
    result |= static_cast<u32>(done) << l;
  }
  setPredicate(warp, inst.d[0], mask, result);
  if (result != mask)
    warp.yields = true;
  if (inst.aux & 4)
    return;
  for (u32 l : Lanes(result & mask)) {
    u64 address = sharedAddress(warp, inst.s[0], inst.wideAddress, inst.imm,
                                inst.aux2, l);
    u64 offset;
    Block *owner = sharedOwner(*warp.block, address, kMbarrierBytes, offset);
    auto it = owner ? owner->mbarriers.find(offset)
                    : decltype(owner->mbarriers.end())();
    if (!owner || it == owner->mbarriers.end())
      continue;
    // Lanes that wait for one mbarrier together learn together.
    u32 together = 0;
    for (u32 other : Lanes(result & mask))
      if (sharedAddress(warp, inst.s[0], inst.wideAddress, inst.imm, inst.aux2,
                        other) == address)
        together |= 1u << other;
    if (l == static_cast<u32>(__builtin_ctz(together)))
      acquire(warp, together, it->second.completed);
  }
}

} // namespace

u64 sharedAddress(Warp &warp, u32 place, bool wide, i64 offset, bool generic,
                  u32 lane) {
  u64 address = laneAddress(warp, place, wide, lane) + static_cast<u64>(offset);
  if (!wide)
    address = static_cast<u32>(address);
  u64 shared;
  if (generic && sharedOwnerOfGeneric(*warp.block, address, shared))
    return shared;
  return address;
}

MbarrierRef findMbarrier(Warp &warp, const Inst &inst, u32 lane, u64 address,
                         bool byAsyncProxy) {
  u64 offset;
  u32 pc = pcOf(warp, inst);
  Block *owner = sharedOwner(*warp.block, address, kMbarrierBytes, offset);
  if (!owner) {
    report(warp, lane, pc, FindingKind::Bounds,
           "uses an mbarrier outside the block's shared memory");
    return {};
  }
  auto it = owner->mbarriers.find(offset);
  if (it == owner->mbarriers.end()) {
    report(warp, lane, pc, FindingKind::Uninit,
           "uses an mbarrier that nothing has initialised");
    return {};
  }
  checkInit(warp, inst, lane, it->second, byAsyncProxy);
  return {&it->second, owner, offset};
}

Mbarrier *findStarted(Warp &warp, u32 lane, u32 pc, Block &owner, u64 place,
                      u32 serial) {
  auto it = owner.mbarriers.find(place);
  if (it != owner.mbarriers.end() && it->second.serial == serial)
    return &it->second;
  report(warp, lane, pc, FindingKind::Race,
         "the copy completes on an mbarrier that has been invalidated or "
         "initialised anew before the bytes came");
  return nullptr;
}

void checkPhase(Block &owner, Mbarrier &barrier) {
  if (barrier.pending != 0 || barrier.transactions != 0)
    return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  barrier.completed.join(barrier.arriving);
  owner.executor->progressed = true;
}

void arriveOn(Warp &warp, u32 lane, u32 pc, const MbarrierRef &ref, u32 count) {
  publish(warp, 1u << lane, ref.barrier->arriving);
  ref.barrier->pending -= count;
  if (ref.barrier->pending < 0)
    report(warp, lane, pc, FindingKind::Deadlock,
           "arrives more often than the mbarrier's count of " +
               std::to_string(ref.barrier->count));
  checkPhase(*ref.owner, *ref.barrier);
}

void addMbarrierOps(HandlerTable &table) {
  table["mbarrier.init"] = runInit;
  table["mbarrier.inval"] = runInvalidate;
  table["mbarrier.arrive"] = runArrive;
  table["mbarrier.expect_tx"] = runExpectTx;
  table["mbarrier.test_wait"] = runTest;
  table["mbarrier.pending_count"] = runPendingCount;
  table["barrier.cluster.arrive"] = [](Warp &warp, const Inst &inst, u32 mask) {
    arriveAtCluster(warp, mask, pcOf(warp, inst));
  };
}

} // namespace moe::sim
