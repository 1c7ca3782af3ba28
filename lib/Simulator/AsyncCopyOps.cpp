//===- AsyncCopyOps.cpp - cp.async ----------------------------------------===//
//
// A copy reads its source and writes shared memory at some time between the
// instruction and the wait: here at once or at the wait, by chance. Until the
// wait its bytes are pending, and any access to them is a race.
//
//===----------------------------------------------------------------------===//

#include "Async.h"
#include "Handlers.h"

#include <algorithm>
#include <cstring>

namespace moe::sim {
namespace {

void land(Warp &warp, AsyncCopy &copy) {
  if (copy.landed)
    return;
  copy.landed = true;
  u8 *to = warp.block->shared + copy.offset;
  std::memcpy(to, copy.source, copy.sourceBytes);
  std::memset(to + copy.sourceBytes, 0, copy.bytes - copy.sourceBytes);
  warp.block->executor->progressed = true;
}

void complete(Warp &warp, AsyncCopy &copy) {
  land(warp, copy);
  const Checks &checks = warp.block->launch->checks;
  if (!checks.race && !checks.uninit)
    return;
  Access access(warp, 1u << copy.lane, copy.pc);
  warp.block->shadow.completeWrite(access, copy.offset, copy.bytes);
}

/// Checks what the lanes read, and sets how much that is.
Places touchSources(Warp &warp, const Inst &inst, u32 mask, const u64 *from,
                    u32 *sizes) {
  u32 bytes = inst.bytes, full = 0;
  for (u32 l : Lanes(mask)) {
    sizes[l] = bytes;
    if (inst.ns > 2)
      sizes[l] = inst.aux ? (predicateOf(warp, inst.s[2]) >> l & 1 ? 0 : bytes)
                          : std::min(lanesOf<u32>(warp, inst.s[2])[l], bytes);
    full |= static_cast<u32>(sizes[l] == bytes) << l;
  }
  MemoryRequest request;
  request.bytes = bytes;
  request.read = true;
  request.counts = false;
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
  u32 bytes = inst.bytes;
  bool atOnce = warp.block->random.oneIn(2);
  for (u32 l = 0; l < kWarpSize; ++l)
    from[l] = laneAddress(warp, inst.s[1], true, l) + inst.imm2;
  countShared(warp, mask, to, bytes, true);
  countGlobal(warp, mask, from, bytes, false);
  u32 sizes[kWarpSize];
  Places sources = touchSources(warp, inst, mask, from, sizes);
  Access access(warp, 0, pcOf(warp, inst), kPending);
  access.write = true;
  for (u32 l : Lanes(sources.good)) {
    if (to[l] & (bytes - 1))
      reportAlignment(warp, inst, l, to[l], bytes);
    access.lanes = 1u << l;
    u8 *target = touchShared(warp, to[l], bytes, access);
    if (!target)
      continue;
    AsyncCopy copy{static_cast<u64>(target - warp.block->shared),
                   sources.pointers[l],
                   bytes,
                   sizes[l],
                   warp.copyGroup[l],
                   access.pc,
                   static_cast<u8>(l),
                   false};
    if (atOnce)
      land(warp, copy);
    warp.copies.push_back(copy);
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
  size_t kept = 0;
  for (AsyncCopy &copy : warp.copies) {
    bool covered = (mask >> copy.lane & 1) &&
                   copy.group + allowed < warp.copyGroup[copy.lane];
    if (covered)
      complete(warp, copy);
    else
      warp.copies[kept++] = copy;
  }
  warp.copies.resize(kept);
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
    schedule(warp, l, pc, [&warp, l, pc, ref, before] {
      finishCopies(warp, l, before);
      arriveOn(warp, l, pc, ref, 1);
    });
  }
}

} // namespace

void finishCopies(Warp &warp, u32 lane, u32 beforeGroup) {
  size_t kept = 0;
  for (AsyncCopy &copy : warp.copies) {
    if (copy.lane == lane && copy.group < beforeGroup)
      complete(warp, copy);
    else
      warp.copies[kept++] = copy;
  }
  warp.copies.resize(kept);
}

void schedule(Warp &warp, u32 lane, u32 pc, std::function<void()> run) {
  Block &block = *warp.block;
  block.events.push_back({block.now + block.random.below(kAsyncDelay),
                          std::move(run), warp.index, lane, pc});
}

//===----------------------------------------------------------------------===//
// Work that nobody has waited for
//===----------------------------------------------------------------------===//

namespace {

void reportUnwaited(Warp &warp, u32 lane, u32 pc, const char *what) {
  LaunchState &launch = *warp.block->launch;
  if (launch.checks.race && !launch.reporter->repeats(FindingKind::Race, pc))
    launch.reporter->add(FindingKind::Race, warp, lane, pc, what);
}

} // namespace

void checkUnwaited(Warp &warp, u32 lanes) {
  for (const AsyncCopy &copy : warp.copies)
    if (lanes >> copy.lane & 1)
      reportUnwaited(warp, copy.lane, copy.pc,
                     "the thread ends before it has waited for this copy: "
                     "expected cp.async.wait_group or wait_all");
  std::erase_if(warp.copies,
                [&](const AsyncCopy &copy) { return lanes >> copy.lane & 1; });
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
    reportUnwaited(block.warps[event.warp], event.lane, event.pc,
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
