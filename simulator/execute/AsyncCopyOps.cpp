//===- AsyncCopyOps.cpp - cp.async ----------------------------------------===//
//
// A copy reads its source and writes shared memory at some time between the
// instruction and the wait: here at once or at the wait, by chance. Until the
// wait its bytes are pending, and any access to them is a race.
//
//===----------------------------------------------------------------------===//

#include "Async.h"
#include "Handlers.h"
#include "checks/Shadow.h"

#include <algorithm>
#include <cstring>

namespace moe::sim {
namespace {

/// Of a size that is known when this is compiled: no calls.
template <u32 Bytes>
void landLanes(const AsyncCopy &copy, u32 lanes, u8 *shared) {
  for (u32 l : Lanes(lanes)) {
    u8 *to = shared + copy.offsets[l];
    u32 valid = copy.sourceBytes[l];
    if (valid == Bytes) {
      std::memcpy(to, copy.sources[l], Bytes);
      continue;
    }
    if (valid) // else there is no source
      std::memcpy(to, copy.sources[l], valid);
    std::memset(to + valid, 0, Bytes - valid);
  }
}

void land(Warp &warp, const AsyncCopy &copy, u32 lanes) {
  u8 *shared = warp.block->shared;
  if (copy.bytes == 16)
    landLanes<16>(copy, lanes, shared);
  else if (copy.bytes == 8)
    landLanes<8>(copy, lanes, shared);
  else
    landLanes<4>(copy, lanes, shared);
  warp.block->executor->progressed = true;
}

/// `lanes` have waited for the copy.
void complete(Warp &warp, AsyncCopy &copy, u32 lanes) {
  if (!copy.landed)
    land(warp, copy, lanes);
  copy.lanes &= ~lanes;
  const Checks &checks = warp.block->launch->checks;
  if (!checks.race && !checks.uninit)
    return;
  for (u32 rest = lanes; rest;) {
    // Neighbouring lanes that have written neighbouring bytes.
    u32 first = __builtin_ctz(rest), count = 1;
    while (first + count < kWarpSize && (rest >> (first + count) & 1) &&
           copy.offsets[first + count] ==
               copy.offsets[first] + count * copy.bytes)
      ++count;
    u32 run = static_cast<u32>((1ull << count) - 1) << first;
    rest &= ~run;
    Access access(warp, run, copy.pc);
    access.stride = __builtin_ctz(copy.bytes);
    warp.block->shadow->completeWrite(access, copy.offsets[first],
                                      count * copy.bytes);
  }
}

/// The lanes that `covered(copy, lane)` names have waited.
template <typename Fn>
void completeCovered(Warp &warp, Fn covered) {
  for (AsyncCopy &copy : warp.copies)
    if (u32 lanes = copy.lanes & covered(copy))
      complete(warp, copy, lanes);
  std::erase_if(warp.copies,
                [](const AsyncCopy &copy) { return copy.lanes == 0; });
}

/// Checks what the lanes read, and sets how much that is.
Places touchSources(Warp &warp, const Inst &inst, u32 mask, const u64 *from,
                    u32 *sizes) {
  u32 bytes = inst.bytes, full = 0, reading = 0;
  for (u32 l : Lanes(mask)) {
    sizes[l] = bytes;
    if (inst.ns > 2)
      sizes[l] = inst.aux ? (predicateOf(warp, inst.s[2]) >> l & 1 ? 0 : bytes)
                          : std::min(lanesOf<u32>(warp, inst.s[2])[l], bytes);
    full |= static_cast<u32>(sizes[l] == bytes) << l;
    reading |= static_cast<u32>(sizes[l] > 0) << l;
  }
  MemoryRequest request;
  request.bytes = bytes;
  request.read = true;
  request.counts = false;
  if (reading)
    countGlobal(warp, reading, from, bytes, false);
  Places places;
  if (full)
    resolve(warp, inst, full, Space::Global, from, request, places);
  Access access(warp, 0, pcOf(warp, inst));
  access.read = true;
  for (u32 l : Lanes(mask & ~full)) {
    if (from[l] & (bytes - 1))
      reportAlignment(warp, inst, l, from[l], bytes);
    access.lanes = 1u << l;
    places.pointers[l] =
        sizes[l] ? touchGlobal(warp, from[l], sizes[l], access) : nullptr;
    if (!sizes[l] || places.pointers[l])
      places.good |= 1u << l;
  }
  return places;
}

/// s: shared address, global address, and the source's size or a predicate
/// that ignores the source (inst.aux).
void runCopy(Warp &warp, const Inst &inst, u32 mask) {
  u64 to[kWarpSize], from[kWarpSize];
  addressesOf(warp, inst, to);
  const u64 *source = lanesOf<u64>(warp, inst.s[1]);
  for (u32 l = 0; l < kWarpSize; ++l)
    from[l] = source[l] + inst.imm2;
  u32 sizes[kWarpSize];
  bool atOnce = warp.block->random.oneIn(2);
  Places sources = touchSources(warp, inst, mask, from, sizes);
  MemoryRequest request;
  request.bytes = inst.bytes;
  request.write = true;
  request.flags = kPending;
  Places targets;
  if (sources.good)
    resolve(warp, inst, sources.good, Space::Shared, to, request, targets);
  for (u32 rest = targets.good; rest;) {
    u32 group = warp.copyGroup[__builtin_ctz(rest)];
    AsyncCopy &copy = warp.copies.emplace_back();
    copy.lanes = 0;
    copy.group = group;
    copy.pc = pcOf(warp, inst);
    copy.bytes = inst.bytes;
    copy.landed = atOnce;
    for (u32 l : Lanes(rest)) {
      if (warp.copyGroup[l] != group)
        continue;
      copy.lanes |= 1u << l;
      copy.offsets[l] =
          static_cast<u64>(targets.pointers[l] - warp.block->shared);
      copy.sources[l] = sources.pointers[l];
      copy.sourceBytes[l] = static_cast<u8>(sizes[l]);
    }
    rest &= ~copy.lanes;
    if (atOnce)
      land(warp, copy, copy.lanes);
  }
}

void runCommit(Warp &warp, const Inst &, u32 mask) {
  for (u32 l : Lanes(mask))
    ++warp.copyGroup[l];
}

/// imm: groups that may stay in flight; -1: wait for everything.
void runWait(Warp &warp, const Inst &inst, u32 mask) {
  if (inst.imm < 0)
    runCommit(warp, inst, mask);
  u32 allowed = inst.imm < 0 ? 0 : static_cast<u32>(inst.imm);
  completeCovered(warp, [&](const AsyncCopy &copy) {
    u32 lanes = 0;
    for (u32 l : Lanes(mask & copy.lanes))
      lanes |= static_cast<u32>(copy.group + allowed < warp.copyGroup[l]) << l;
    return lanes;
  });
}

/// The mbarrier sees an arrival once the lane's copies so far are done.
void runMbarrierArrive(Warp &warp, const Inst &inst, u32 mask) {
  u32 pc = pcOf(warp, inst);
  for (u32 l : Lanes(mask)) {
    u64 address = sharedAddress(warp, inst.s[0], inst.wideAddress, inst.imm,
                                inst.aux2, l);
    MbarrierRef ref = findMbarrier(warp, inst, l, address, false);
    if (!ref.barrier)
      continue;
    // Without .noinc the arrival was not counted at init: it adds itself.
    if (!inst.aux)
      ++ref.barrier->pending;
    u32 before = ++warp.copyGroup[l];
    auto arrive = [&warp, l, pc, before, owner = ref.owner, place = ref.place,
                   serial = ref.barrier->serial] {
      finishCopies(warp, l, before);
      if (Mbarrier *barrier = findStarted(warp, l, pc, *owner, place, serial))
        arriveOn(warp, l, pc, {barrier, owner, place}, 1);
    };
    schedule(*warp.block, warp, l, pc, arrive);
  }
}

} // namespace

void finishCopies(Warp &warp, u32 lane, u32 beforeGroup) {
  completeCovered(warp, [&](const AsyncCopy &copy) {
    return copy.group < beforeGroup ? 1u << lane : 0;
  });
}

void schedule(Block &block, Warp &warp, u32 lane, u32 pc,
              std::function<void()> run) {
  block.events.push_back({block.now + block.random.below(kAsyncDelay),
                          std::move(run), &warp, lane, pc});
}

//===----------------------------------------------------------------------===//
// Work that nobody has waited for
//===----------------------------------------------------------------------===//

namespace {

void reportUnwaited(Warp &warp, u32 lane, u32 pc, const char *what) {
  LaunchState &launch = *warp.block->launch;
  if (launch.checks.race &&
      !launch.reporter->repeats(FindingKind::Race, warp, pc))
    launch.reporter->add(FindingKind::Race, warp, lane, pc, what);
}

} // namespace

void checkUnwaited(Warp &warp, u32 lanes) {
  for (const AsyncCopy &copy : warp.copies)
    if (lanes & copy.lanes)
      reportUnwaited(warp, __builtin_ctz(lanes & copy.lanes), copy.pc,
                     "the thread ends before it has waited for this copy: "
                     "expected cp.async.wait_group or wait_all");
  for (AsyncCopy &copy : warp.copies)
    copy.lanes &= ~lanes;
  std::erase_if(warp.copies,
                [](const AsyncCopy &copy) { return copy.lanes == 0; });
  for (const BulkStore &store : warp.bulkStores)
    if (!store.sourceRead && (lanes >> store.lane & 1))
      reportUnwaited(warp, store.lane, store.pc,
                     "the thread ends while this copy still reads shared "
                     "memory: expected cp.async.bulk.wait_group");
  if (lanes == warp.live && !warp.wgmmas.empty())
    reportUnwaited(warp, __builtin_ctz(lanes), warp.wgmmas[0].pc,
                   "the warp ends before it has waited for this wgmma: "
                   "expected wgmma.wait_group");
}

void checkUnwaited(Block &block) {
  for (const Event &event : block.events)
    reportUnwaited(*event.warp, event.lane, event.pc,
                   "the block ends before this copy has completed: expected "
                   "a wait on its mbarrier");
  for (auto &warp : block.warps)
    for (BulkStore &store : warp.bulkStores)
      if (!store.landed)
        store.land();
}

void addAsyncCopyOps(HandlerTable &table) {
  table["cp.async"] = runCopy;
  table["cp.async.commit_group"] = runCommit;
  table["cp.async.wait_group"] = runWait;
  table["cp.async.mbarrier.arrive"] = runMbarrierArrive;
}

} // namespace moe::sim
