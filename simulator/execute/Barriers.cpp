//===- Barriers.cpp - Barriers of the block and of the cluster ------------===//

#include "Barriers.h"
#include "Handlers.h"
#include "memory/Memory.h"

#include <algorithm>

namespace moe::sim {
namespace {

void report(Warp &warp, u32 lane, u32 pc, const std::string &what) {
  warp.block->launch->reporter->add(FindingKind::Deadlock, warp, lane, pc,
                                    what);
}

void deliver(Warp &warp, const Inst &inst, u32 lanes,
             const BarrierState &barrier) {
  u32 all = barrier.participants;
  switch (static_cast<BarrierKind>(inst.aux)) {
  case BarrierKind::Popc:
    if (inst.d[0] != kNone)
      for (u32 l : Lanes(lanes))
        lanesOf<u32>(warp, inst.d[0])[l] = barrier.popc;
    break;
  case BarrierKind::And:
    setPredicate(warp, inst.d[0], lanes, barrier.popc == all ? ~0u : 0);
    break;
  case BarrierKind::Or:
    setPredicate(warp, inst.d[0], lanes, barrier.popc ? ~0u : 0);
    break;
  case BarrierKind::Sync:
  case BarrierKind::Arrive:
    break;
  }
}

/// What strong loads before the barrier saw: a fence after it acquires that,
/// whichever thread executes it.
Clock observedBefore(Block &block, const BarrierState &barrier) {
  Clock seen(block.linear);
  for (const BarrierState::Arrival &arrival : barrier.arrivals)
    for (const FenceRecord &record : block.warps[arrival.warp].observed)
      if (record.lanes & arrival.lanes)
        seen.join(record.clock);
  return seen;
}

void complete(Block &block, BarrierState &barrier) {
  const Kernel &kernel = *block.launch->kernel;
  Clock seen = observedBefore(block, barrier);
  for (const BarrierState::Arrival &arrival : barrier.arrivals) {
    if (!arrival.waits)
      continue;
    Warp &warp = block.warps[arrival.warp];
    acquire(warp, arrival.lanes, barrier.clock);
    // The barrier's clock holds what every lane knew.
    if (arrival.lanes == warp.live)
      warp.privateLanes = 0;
    if (!seen.empty())
      warp.observed.assign(1, {arrival.lanes, 0, Scope::System, seen});
    deliver(warp, kernel.code[arrival.pc], arrival.lanes, barrier);
    for (Group &group : warp.groups)
      if (group.wait == Wait::Barrier && group.pc == arrival.pc &&
          (group.mask & arrival.lanes)) {
        group.wait = Wait::None;
        ++group.pc;
      }
  }
  barrier.arrivals.clear();
  barrier.arrived = barrier.expected = barrier.popc = barrier.participants = 0;
  barrier.clock.reset(block.linear, block.actors());
  ++block.executor->counters.totals.barriers;
  block.executor->progressed = true;
}

bool full(const Block &block, const BarrierState &barrier) {
  if (barrier.arrivals.empty())
    return false;
  if (barrier.expected)
    return barrier.arrived >= barrier.expected;
  return barrier.participants >= block.liveThreads;
}

} // namespace

bool checkBarriers(Block &block) {
  bool any = false;
  for (BarrierState &barrier : block.barriers)
    if (full(block, barrier)) {
      complete(block, barrier);
      any = true;
    }
  return any;
}

void arriveAtBarrier(Warp &warp, size_t groupIndex) {
  Block &block = *warp.block;
  Group &group = warp.groups[groupIndex];
  const Inst &inst = block.launch->kernel->code[group.pc];
  u32 lanes = group.mask, lane = __builtin_ctz(lanes), pc = group.pc;
  u32 number = lanesOf<u32>(warp, inst.s[0])[lane];
  u32 count = lanesOf<u32>(warp, inst.s[1])[lane];
  bool arrives = static_cast<BarrierKind>(inst.aux) == BarrierKind::Arrive;
  if (number >= block.barriers.size()) {
    report(warp, lane, pc,
           "expected a barrier below 16, found " + std::to_string(number));
    block.launch->stop = true;
    return;
  }
  BarrierState &barrier = block.barriers[number];
  if (!barrier.arrivals.empty() && barrier.expected != count)
    report(warp, lane, pc,
           "mismatched barrier " + std::to_string(number) + ": expected " +
               std::to_string(barrier.expected) +
               " threads as the first arrival says, found " +
               std::to_string(count));
  if (count % kWarpSize)
    report(warp, lane, pc,
           "expected a thread count that is a multiple of 32, found " +
               std::to_string(count));
  if (barrier.arrivals.empty()) {
    barrier.clock.reset(block.linear, block.actors());
    barrier.expected = count;
  }
  publish(warp, lanes, barrier.clock);
  tick(warp);
  u32 threads = __builtin_popcount(lanes);
  barrier.participants += threads;
  // An aligned arrival counts for the whole warp.
  barrier.arrived += inst.aligned ? kWarpSize : threads;
  if (inst.ns > 2)
    barrier.popc += __builtin_popcount(predicateOf(warp, inst.s[2]) & lanes);
  barrier.arrivals.push_back({warp.index, lanes, pc, !arrives});
  if (arrives)
    ++group.pc;
  else
    group.wait = Wait::Barrier;
  if (full(block, barrier))
    complete(block, barrier);
}

//===----------------------------------------------------------------------===//
// barrier.cluster
//===----------------------------------------------------------------------===//

namespace {

u32 liveThreads(const Cluster &cluster) {
  u32 threads = 0;
  for (const auto &block : cluster.blocks)
    threads += block->liveThreads;
  return threads;
}

} // namespace

void arriveAtCluster(Warp &warp, u32 lanes, u32 pc) {
  Cluster &cluster = *warp.block->cluster;
  if (u32 twice = lanes & warp.clusterArrived)
    report(warp, __builtin_ctz(twice), pc,
           "arrives at the cluster's barrier a second time: expected "
           "barrier.cluster.wait between");
  warp.clusterArrived |= lanes;
  publish(warp, lanes, cluster.arriving);
  tick(warp);
  warp.clusterPhase = cluster.barrierPhase + 1;
  cluster.barrierArrived += __builtin_popcount(lanes);
}

void checkClusterWait(Warp &warp, u32 lanes, u32 pc) {
  if (u32 absent = lanes & ~warp.clusterArrived)
    report(warp, __builtin_ctz(absent), pc,
           "waits for the cluster's barrier without having arrived: expected "
           "barrier.cluster.arrive before");
  warp.clusterArrived &= ~lanes;
}

bool checkClusterBarrier(Cluster &cluster) {
  bool any = false;
  if (cluster.barrierArrived &&
      cluster.barrierArrived >= liveThreads(cluster)) {
    cluster.barrierArrived = 0;
    ++cluster.barrierPhase;
    cluster.completed = cluster.arriving;
    any = true;
  }
  for (auto &block : cluster.blocks)
    for (Warp &warp : block->warps)
      for (Group &group : warp.groups)
        if (group.wait == Wait::Cluster &&
            cluster.barrierPhase >= warp.clusterPhase) {
          acquire(warp, group.mask, cluster.completed);
          group.wait = Wait::None;
          ++group.pc;
          any = true;
        }
  return any;
}

} // namespace moe::sim
