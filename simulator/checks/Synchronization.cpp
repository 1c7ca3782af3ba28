//===- Synchronization.cpp - What orders accesses -------------------------===//
//
// The rules of the PTX memory model that the race detector follows:
//
//   release: publish() adds what a lane has done and knows to a barrier's or a
//            memory location's clock, then the warp's time ticks
//   acquire: the clock becomes known to the lane
//   fence; strong store    releases what came before the fence
//   strong load; fence     acquires what the load saw, at the fence
//   atomics                continue a release sequence; a plain store ends it
//
//===----------------------------------------------------------------------===//

#include "execute/Handlers.h"
#include "execute/Machine.h"
#include "memory/Memory.h"

namespace moe::sim {
namespace {

template <typename Fn>
void forClocks(Warp &warp, u32 lanes, Fn fn) {
  if (lanes & ~warp.privateLanes)
    fn(warp.clock);
  for (u32 lane : Lanes(lanes & warp.privateLanes))
    fn(*warp.laneClocks[lane]);
}

void makePrivate(Warp &warp, u32 lanes) {
  for (u32 lane : Lanes(lanes & ~warp.privateLanes)) {
    if (warp.laneClocks[lane])
      *warp.laneClocks[lane] = warp.clock;
    else
      warp.laneClocks[lane] = std::make_unique<Clock>(warp.clock);
  }
  warp.privateLanes |= lanes;
}

} // namespace

void publish(Warp &warp, u32 lanes, Clock &clock) {
  forClocks(warp, lanes, [&](const Clock &known) { clock.join(known); });
  bool whole = lanes == warp.initial;
  clock.learn(blockOf(warp), warp.index, whole ? kAllLanes : lanes,
              warp.time + 1);
}

void acquire(Warp &warp, u32 lanes, const Clock &clock) {
  if (clock.empty())
    return;
  if ((lanes & warp.live) != warp.live)
    makePrivate(warp, lanes);
  else
    warp.clock.join(clock);
  for (u32 lane : Lanes(lanes & warp.privateLanes))
    warp.laneClocks[lane]->join(clock);
}

void meet(Warp &warp, u32 lanes) {
  bool whole = lanes == warp.initial;
  if (warp.privateLanes == 0 && (whole || lanes == warp.live)) {
    warp.clock.own.learn(warp.index, whole ? kAllLanes : lanes, warp.time + 1);
    tick(warp);
    return;
  }
  Clock joint(blockOf(warp));
  publish(warp, lanes, joint);
  tick(warp);
  if (lanes == warp.live) {
    warp.clock.join(joint);
    warp.privateLanes = 0;
    return;
  }
  makePrivate(warp, lanes);
  for (u32 lane : Lanes(lanes))
    *warp.laneClocks[lane] = joint;
}

//===----------------------------------------------------------------------===//
// Fences and strong accesses
//===----------------------------------------------------------------------===//

namespace {

void forgetLanes(std::vector<FenceRecord> &records, u32 lanes) {
  for (FenceRecord &record : records)
    record.lanes &= ~lanes;
  std::erase_if(records, [](const FenceRecord &r) { return r.lanes == 0; });
}

} // namespace

void fence(Warp &warp, u32 lanes, Scope scope, bool acquires, bool releases) {
  if (acquires && !warp.observed.empty()) {
    for (FenceRecord &record : warp.observed) {
      u32 mine = record.lanes & lanes;
      if (!mine)
        continue;
      // A fence of block scope does not reach what other blocks released.
      if (scope == Scope::Cta) {
        Clock near(blockOf(warp));
        near.join(record.clock);
        Clock own(blockOf(warp));
        own.own = near.own;
        acquire(warp, mine, own);
      } else {
        acquire(warp, mine, record.clock);
      }
    }
    forgetLanes(warp.observed, lanes);
  }
  if (!releases)
    return;
  forgetLanes(warp.fences, lanes);
  if (u32 common = lanes & ~warp.privateLanes)
    warp.fences.push_back({common, warp.time + 1, scope, warp.clock});
  for (u32 lane : Lanes(lanes & warp.privateLanes))
    warp.fences.push_back(
        {1u << lane, warp.time + 1, scope, *warp.laneClocks[lane]});
  tick(warp);
}

void proxyFence(Warp &warp, u32 lanes) {
  forClocks(warp, lanes, [&](Clock &clock) {
    clock.proxy.join(clock.own);
    clock.proxy.learn(warp.index, lanes == warp.initial ? kAllLanes : lanes,
                      warp.time + 1);
  });
  tick(warp);
}

void observe(Warp &warp, u32 lane, u64 address, Order order, Scope scope) {
  LaunchState &launch = *warp.block->launch;
  std::unique_lock<std::mutex> guard(launch.syncMutex, std::defer_lock);
  if (launch.threads > 1)
    guard.lock();
  if (launch.syncLocations.empty())
    return;
  auto it = launch.syncLocations.find(address);
  if (it == launch.syncLocations.end())
    return;
  const SyncLocation &location = it->second;
  Clock seen(blockOf(warp));
  if (scope != Scope::Cta)
    seen.join(location.wide);
  else {
    Clock all(blockOf(warp));
    all.join(location.wide);
    seen.own = all.own;
  }
  if (location.ctaBlock == blockOf(warp))
    seen.join(location.cta);
  if (order == Order::Acquire || order == Order::AcqRel) {
    acquire(warp, 1u << lane, seen);
    return;
  }
  for (FenceRecord &record : warp.observed)
    if (record.lanes == 1u << lane) {
      record.clock.join(seen);
      return;
    }
  warp.observed.push_back({1u << lane, 0, scope, std::move(seen)});
}

void announce(Warp &warp, u32 lane, u64 address, Order order, Scope scope,
              bool isAtomic) {
  LaunchState &launch = *warp.block->launch;
  const FenceRecord *fenced = nullptr;
  for (const FenceRecord &record : warp.fences)
    if (record.lanes >> lane & 1)
      fenced = &record;
  bool releases = order == Order::Release || order == Order::AcqRel;
  std::unique_lock<std::mutex> guard(launch.syncMutex, std::defer_lock);
  if (launch.threads > 1)
    guard.lock();
  if (!fenced && !releases) {
    if (!isAtomic && !launch.syncLocations.empty())
      launch.syncLocations.erase(address);
    return;
  }
  SyncLocation &location = launch.syncLocations[address];
  if (!isAtomic)
    location = SyncLocation();
  auto target = [&](Scope reach) -> Clock & {
    if (reach != Scope::Cta)
      return location.wide;
    if (location.ctaBlock != blockOf(warp)) {
      location.cta = Clock();
      location.ctaBlock = blockOf(warp);
    }
    return location.cta;
  };
  if (fenced) {
    Clock &clock = target(std::min(fenced->scope, scope));
    clock.join(fenced->clock);
    clock.learn(blockOf(warp), warp.index, 1u << lane, fenced->time);
  }
  if (releases) {
    publish(warp, 1u << lane, target(scope));
    tick(warp);
  }
}

//===----------------------------------------------------------------------===//
// Fence instructions
//===----------------------------------------------------------------------===//

void addFenceOps(HandlerTable &table) {
  table["fence"] = [](Warp &warp, const Inst &inst, u32 mask) {
    fence(warp, mask, inst.scope, inst.order != Order::Release,
          inst.order != Order::Acquire);
  };
  table["fence.proxy.async"] = [](Warp &warp, const Inst &, u32 mask) {
    proxyFence(warp, mask);
  };
  table["bar.warp.sync"] = [](Warp &warp, const Inst &, u32 mask) {
    meet(warp, mask);
  };
  table["nop"] = [](Warp &, const Inst &, u32) {};
  table["yield"] = [](Warp &warp, const Inst &, u32) { warp.yields = true; };
  table["trap"] = [](Warp &warp, const Inst &inst, u32 mask) {
    LaunchState &launch = *warp.block->launch;
    launch.reporter->add(FindingKind::Trap, warp, __builtin_ctz(mask),
                         pcOf(warp, inst),
                         inst.aux ? "a device-side assertion failed"
                                  : "the kernel executed trap");
    launch.stop = true;
  };
}

} // namespace moe::sim
