//===- Scheduler.cpp - Runs warps, blocks and the grid --------------------===//
//
// A warp is a list of groups of lanes that share a pc, normally one. Policy 0
// runs the group that comes first in the control flow (ControlFlow.h) and
// merges groups that meet, so lanes reconverge where the branch's paths do.
// Policy 1 runs a random group for a random while and merges only where the ISA
// says that lanes come together: legal under independent thread scheduling, and
// hard on code that trusts in lock step.
//
// Warps of a block run in random order for random spans of time, some of them
// very long: skew is what makes a missing barrier visible in values. Blocks
// start in random order. When none of the running blocks finishes in its
// turn, one more joins, so blocks may wait for each other.
//
//===----------------------------------------------------------------------===//

#include "Scheduler.h"
#include "Mma.h"
#include "checks/DefinedBits.h"
#include "memory/Memory.h"

#include <algorithm>

namespace moe::sim {
namespace {

//===----------------------------------------------------------------------===//
// Groups of lanes
//===----------------------------------------------------------------------===//

void mergeGroups(Warp &warp, bool onlyWaiting) {
  auto &groups = warp.groups;
  if (groups.size() < 2)
    return;
  std::sort(groups.begin(), groups.end(), [](const Group &a, const Group &b) {
    return a.pc != b.pc       ? a.pc < b.pc
           : a.wait != b.wait ? a.wait < b.wait
                              : __builtin_ctz(a.mask) < __builtin_ctz(b.mask);
  });
  size_t kept = 0;
  for (size_t i = 1; i < groups.size(); ++i) {
    bool may = !onlyWaiting || groups[i].wait == Wait::Lanes ||
               groups[i].wait == Wait::Converge;
    if (may && groups[i].pc == groups[kept].pc &&
        groups[i].wait == groups[kept].wait && groups[i].wait != Wait::Barrier)
      groups[kept].mask |= groups[i].mask;
    else
      groups[++kept] = groups[i];
  }
  groups.resize(kept + 1);
}

/// Splits `lanes` off the group; they go on at `pc`.
void splitGroup(Warp &warp, size_t index, u32 lanes, u32 pc) {
  warp.groups[index].mask &= ~lanes;
  warp.groups.push_back({pc, lanes, Wait::None});
}

void exitLanes(Warp &warp, size_t index, u32 lanes) {
  Block &block = *warp.block;
  checkUnwaited(warp, lanes);
  warp.live &= ~lanes;
  block.liveThreads -= __builtin_popcount(lanes);
  block.executor->progressed = true;
  if (block.liveThreads == 0) {
    checkUnwaited(block);
    checkWarpgroups(block);
  }
  Group &group = warp.groups[index];
  group.mask &= ~lanes;
  if (group.mask)
    ++group.pc;
  else
    warp.groups.erase(warp.groups.begin() + index);
  checkBarriers(block);
}

//===----------------------------------------------------------------------===//
// Collectives
//===----------------------------------------------------------------------===//

/// The membermask of one lane.
u32 memberMask(Warp &warp, const Inst &inst, u32 lane) {
  if (inst.aligned)
    return warp.live;
  if (inst.memberRegister == kNone)
    return inst.memberMask;
  return lanesOf<u32>(warp, inst.memberRegister)[lane];
}

void reportNotMember(Warp &warp, u32 lane, u32 pc, u32 members) {
  LaunchState &launch = *warp.block->launch;
  char text[96];
  std::snprintf(text, sizeof text,
                "lane %u takes part but its membermask 0x%08x does not name "
                "it",
                lane, members);
  launch.reporter->add(FindingKind::Deadlock, warp, lane, pc, text);
}

/// Lanes waiting at the group's instruction, or at any bar.warp.sync if it is
/// one, whose membermask is `members`.
u32 waitingWith(Warp &warp, const Inst &inst, u32 pc, u32 members) {
  const Inst *code = warp.block->launch->kernel->code.data();
  u32 lanes = 0;
  for (const Group &group : warp.groups) {
    if (group.wait != Wait::Lanes)
      continue;
    bool same = group.pc == pc || (inst.aux2 && code[group.pc].run == inst.run);
    if (!same)
      continue;
    for (u32 lane : Lanes(group.mask))
      if (memberMask(warp, code[group.pc], lane) == members)
        lanes |= 1u << lane;
  }
  return lanes;
}

/// Runs the collective for `lanes`, wherever they wait, and lets them go on.
void releaseLanes(Warp &warp, const Inst &inst, u32 pc, u32 lanes) {
  const Inst *code = warp.block->launch->kernel->code.data();
  if (inst.tracked)
    trackDefinedness(warp, inst, pc, lanes, lanes);
  inst.run(warp, inst, lanes);
  size_t count = warp.groups.size();
  for (size_t i = 0; i < count; ++i) {
    u32 mine = warp.groups[i].mask & lanes;
    if (!mine || warp.groups[i].wait != Wait::Lanes ||
        code[warp.groups[i].pc].run != inst.run)
      continue;
    if (mine == warp.groups[i].mask) {
      warp.groups[i].wait = Wait::None;
      ++warp.groups[i].pc;
    } else {
      splitGroup(warp, i, mine, warp.groups[i].pc + 1);
    }
  }
}

/// Releases waiting lanes whose membermask is complete; false if there are
/// none.
bool releaseCollectives(Warp &warp) {
  const Inst *code = warp.block->launch->kernel->code.data();
  mergeGroups(warp, /*onlyWaiting=*/true);
  for (size_t i = 0; i < warp.groups.size(); ++i) {
    const Group group = warp.groups[i];
    if (group.wait == Wait::Converge && (group.mask & warp.live) == warp.live) {
      warp.groups[i].wait = Wait::None;
      const Inst &inst = code[group.pc];
      if (inst.flow == Flow::Barrier) {
        arriveAtBarrier(warp, i);
      } else if (inst.flow == Flow::ClusterWait) {
        warp.groups[i].wait = Wait::Cluster;
      } else if (inst.flow == Flow::Registers) {
        requestRegisters(warp, i);
      }
      return true;
    }
    if (group.wait != Wait::Lanes)
      continue;
    const Inst &inst = code[group.pc];
    for (u32 lane : Lanes(group.mask)) {
      u32 members = memberMask(warp, inst, lane);
      u32 lanes = waitingWith(warp, inst, group.pc, members);
      u32 needed = members & warp.live;
      if ((lanes & needed) != needed)
        continue;
      releaseLanes(warp, inst, group.pc, lanes);
      return true;
    }
  }
  return false;
}

/// A collective reached by `mask` lanes of the group. True if it ran at once.
bool enterCollective(Warp &warp, size_t index, const Inst &inst, u32 mask) {
  Group &group = warp.groups[index];
  u32 first = memberMask(warp, inst, __builtin_ctz(mask));
  bool uniform = inst.aligned || inst.memberRegister == kNone;
  if (!uniform) {
    uniform = true;
    for (u32 lane : Lanes(mask)) {
      u32 members = memberMask(warp, inst, lane);
      uniform &= members == first;
      if (!(members >> lane & 1))
        reportNotMember(warp, lane, group.pc, members);
    }
  } else if (!inst.aligned && (mask & ~first)) {
    reportNotMember(warp, __builtin_ctz(mask & ~first), group.pc, first);
  }
  u32 needed = first & warp.live;
  if (uniform && mask == group.mask && (mask & needed) == needed) {
    if (inst.tracked)
      trackDefinedness(warp, inst, group.pc, mask, mask);
    inst.run(warp, inst, mask);
    ++group.pc;
    return true;
  }
  u32 rest = group.mask & ~mask;
  group.wait = Wait::Lanes;
  if (rest)
    splitGroup(warp, index, rest, group.pc + 1);
  return false;
}

/// A barrier reached by `mask` lanes of the group.
void enterBarrier(Warp &warp, size_t index, const Inst &inst, u32 mask) {
  u32 rest = warp.groups[index].mask & ~mask;
  u32 pc = warp.groups[index].pc;
  if (inst.flow == Flow::ClusterWait)
    checkClusterWait(warp, mask, pc);
  if (rest)
    splitGroup(warp, index, rest, pc + 1);
  if (inst.aligned && mask != warp.live) {
    warp.groups[index].wait = Wait::Converge;
    return;
  }
  if (inst.flow == Flow::ClusterWait)
    warp.groups[index].wait = Wait::Cluster;
  else if (inst.flow == Flow::Registers)
    requestRegisters(warp, index);
  else
    arriveAtBarrier(warp, index);
}

//===----------------------------------------------------------------------===//
// One warp
//===----------------------------------------------------------------------===//

class WarpRunner {
public:
  WarpRunner(Warp &warp)
      : warp(warp), block(*warp.block), launch(*block.launch),
        code(launch.kernel->code.data()),
        executed(block.executor->counters.executed.data()) {}

  /// Runs up to `quantum` instructions; false if the warp could do nothing.
  bool run(u32 quantum) {
    bool any = false;
    left = quantum;
    warp.yields = false;
    while (left > 0 && !warp.groups.empty() && !warp.yields && !launch.stop) {
      size_t index = choose();
      if (index == kNobody) {
        if (!releaseCollectives(warp))
          break;
        any = true;
        continue;
      }
      any = true;
      runGroup(index, slice());
    }
    block.executor->counters.totals.laneInstructions += lanes;
    lanes = 0;
    return any;
  }

  /// Instructions of the last quantum that were not run.
  u32 unused() const { return left; }

private:
  static constexpr size_t kNobody = ~size_t(0);

  size_t choose() {
    auto &groups = warp.groups;
    if (groups.size() == 1)
      return groups[0].wait == Wait::None ? 0 : kNobody;
    bool adversarial = launch.policy == 1;
    if (!adversarial)
      mergeGroups(warp, false);
    const std::vector<u32> &order = launch.kernel->order;
    u32 ready = 0;
    size_t first = kNobody;
    for (size_t i = 0; i < groups.size(); ++i)
      if (groups[i].wait == Wait::None) {
        ++ready;
        if (first == kNobody || order[groups[i].pc] < order[groups[first].pc])
          first = i;
      }
    // Now and then another group runs, and for long enough to get somewhere: a
    // lane may spin until another lane of its warp does something.
    detour = ready > 1 && !adversarial && launch.kernel->spins &&
             block.random.oneIn(64);
    if (ready < 2 || (!adversarial && !detour))
      return first;
    u32 pick = block.random.below(ready);
    for (size_t i = 0;; ++i)
      if (groups[i].wait == Wait::None && pick-- == 0)
        return i;
  }

  u32 slice() {
    if (warp.groups.size() == 1)
      return left;
    if (launch.policy == 1)
      return 1 + block.random.below(16);
    return detour ? 64 : 1;
  }

  void runGroup(size_t index, u32 budget) {
    size_t groups = warp.groups.size();
    budget = std::min(budget, left);
    while (budget-- > 0) {
      --left;
      if (!step(index) || warp.yields || warp.groups.size() != groups)
        return;
    }
  }

  /// One instruction of the group; false if it cannot go on at once.
  bool step(size_t index) {
    Group &group = warp.groups[index];
    u32 pc = group.pc;
    const Inst &inst = code[pc];
    u32 mask = group.mask;
    if (inst.guard != kNone) {
      u32 p = predicateOf(warp, inst.guard);
      mask &= inst.guardNegated ? ~p : p;
    }
    ++executed[pc];
    lanes += __builtin_popcount(mask);
    if (launch.sharedTrace && launch.tracedStatements[pc] && mask)
      launch.sharedTrace->push_back({SharedEvent::Statement, warp.block->linear,
                                     warp.index, SharedEvent::kWholeWarp,
                                     inst.line, mask, 0});
    if (inst.tracked && inst.flow != Flow::WarpSync)
      trackDefinedness(warp, inst, pc, group.mask, mask);
    if (inst.feedsWgmma)
      warp.wgmmaFenced = false;
    if (!warp.wgmmas.empty() && mask)
      checkWgmmaHazard(warp, inst, pc);
    switch (inst.flow) {
    case Flow::Next:
      if (mask)
        inst.run(warp, inst, mask);
      ++warp.groups[index].pc;
      return !launch.stop;
    case Flow::Branch:
      return branch(index, inst, mask);
    case Flow::BranchIndex:
      return branchIndex(index, inst, mask);
    case Flow::Exit:
      if (!mask) {
        ++group.pc;
        return true;
      }
      exitLanes(warp, index, mask);
      return false;
    case Flow::WarpSync:
      if (!mask) {
        ++group.pc;
        return true;
      }
      return enterCollective(warp, index, inst, mask);
    case Flow::Barrier:
    case Flow::ClusterWait:
    case Flow::Registers:
      if (!mask) {
        ++group.pc;
        return true;
      }
      enterBarrier(warp, index, inst, mask);
      return false;
    }
    return false;
  }

  bool branch(size_t index, const Inst &inst, u32 mask) {
    Group &group = warp.groups[index];
    if (mask == group.mask) {
      group.pc = inst.target;
    } else {
      u32 next = ++group.pc;
      if (mask && inst.target != next)
        splitGroup(warp, index, mask, inst.target);
    }
    return true;
  }

  bool branchIndex(size_t index, const Inst &inst, u32 mask) {
    const std::vector<u32> &table = launch.kernel->branchTables[inst.target];
    const u32 *which = lanesOf<u32>(warp, inst.s[0]);
    u32 pc = warp.groups[index].pc;
    warp.groups[index].pc = pc + 1;
    while (mask) {
      u32 lane = __builtin_ctz(mask), entry = which[lane], same = 0;
      for (u32 l : Lanes(mask))
        same |= static_cast<u32>(which[l] == entry) << l;
      mask &= ~same;
      if (entry >= table.size()) {
        launch.reporter->add(FindingKind::Bounds, warp, lane, pc,
                             "expected a branch index below " +
                                 std::to_string(table.size()) + ", found " +
                                 std::to_string(entry));
        launch.stop = true;
        return false;
      }
      if (same == warp.groups[index].mask)
        warp.groups[index].pc = table[entry];
      else
        splitGroup(warp, index, same, table[entry]);
    }
    return true;
  }

  Warp &warp;
  Block &block;
  LaunchState &launch;
  const Inst *code;
  u64 *executed;
  u64 lanes = 0;
  u32 left = 0;
  bool detour = false;
};

//===----------------------------------------------------------------------===//
// Blocks
//===----------------------------------------------------------------------===//

constexpr u32 kQuantum = 64;

bool runEvents(Block &block) {
  bool any = false;
  for (size_t i = 0; i < block.events.size();) {
    if (block.events[i].due > block.now) {
      ++i;
      continue;
    }
    Event event = std::move(block.events[i]);
    block.events.erase(block.events.begin() + static_cast<i64>(i));
    event.run();
    any = true;
  }
  block.executor->progressed |= any;
  // Something will still happen by itself.
  return any || !block.events.empty();
}

bool runBlock(Block &block, u64 &executed) {
  bool any = runEvents(block);
  Random &random = block.random;
  random.shuffle(block.order.data(), static_cast<u32>(block.order.size()));
  for (u32 index : block.order) {
    Warp &warp = block.warps[index];
    if (!warp.live)
      continue;
    u32 quantum = 1 + random.below(2 * kQuantum);
    if (random.oneIn(8))
      quantum = 1u << 14;
    WarpRunner runner(warp);
    any |= runner.run(quantum);
    executed += quantum - runner.unused();
  }
  block.now += kQuantum;
  return any || checkBarriers(block);
}

} // namespace

std::string describeWaiting(const Cluster &cluster) {
  constexpr u32 kShown = 12;
  u32 shown = 0;
  std::string text;
  for (const auto &block : cluster.blocks)
    for (const Warp &warp : block->warps)
      for (const Group &group : warp.groups) {
        if (++shown > kShown)
          continue;
        const Reporter &reporter = *block->launch->reporter;
        static constexpr const char *reasons[] = {
            "runs",
            "waits for the lanes of its membermask",
            "waits for the rest of its warp",
            "waits at the barrier",
            "waits for the cluster",
            "waits for registers"};
        text += (text.empty() ? "" : "; ") + std::string("warp ") +
                std::to_string(warp.index) + " (" +
                std::to_string(__builtin_popcount(group.mask)) + " lanes) " +
                reasons[static_cast<u8>(group.wait)] + " at " +
                reporter.describe(group.pc);
      }
  if (shown > kShown)
    text += "; and " + std::to_string(shown - kShown) + " more";
  return text;
}

ClusterStatus runCluster(Cluster &cluster, u64 budget) {
  LaunchState &launch = *cluster.blocks[0]->launch;
  u64 executed = 0;
  // Rounds in which all wait for a copy to land execute next to nothing.
  for (u64 rounds = 0; executed < budget && rounds < budget &&
                       !cluster.blocks[0]->executor->endsTurn;
       ++rounds) {
    if (launch.stop)
      return ClusterStatus::Done;
    bool any = false, live = false;
    for (auto &block : cluster.blocks) {
      any |= runBlock(*block, executed);
      live |= block->liveThreads != 0;
    }
    any |= cluster.blocks.size() > 0 && checkClusterBarrier(cluster);
    if (!live)
      return ClusterStatus::Done;
    if (!any)
      return ClusterStatus::Stuck;
    if (launch.reporter->overflowed())
      launch.stop = true;
  }
  cluster.executed += executed;
  return ClusterStatus::Running;
}

} // namespace moe::sim
