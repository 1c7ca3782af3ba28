//===- RegisterBudget.cpp - setmaxnreg ------------------------------------===//
//
// A block starts with the kernel's registers for each of its threads, which is
// all it ever has. setmaxnreg.dec gives a warp's surplus to the block's pool,
// and setmaxnreg.inc takes from it: where the pool has too few, the warp waits
// until others have given theirs back. If they never do, nothing goes on.
//
// Where the text does not say how many registers the kernel starts with,
// ptxas ignores setmaxnreg and so does this, but for what holds of any.
//
//===----------------------------------------------------------------------===//

#include "execute/Handlers.h"
#include "memory/Memory.h"

#include <algorithm>

namespace moe::sim {
namespace {

constexpr u32 kGroupWarps = 4;

void report(Warp &warp, u32 pc, FindingKind kind, const std::string &what,
            u32 otherPc = kNone) {
  Reporter &reporter = *warp.block->launch->reporter;
  if (!reporter.repeats(kind, warp, pc, otherPc))
    reporter.add(kind, warp, __builtin_ctz(warp.live), pc, what, otherPc,
                 otherPc == kNone ? "" : reporter.describe(otherPc));
}

/// Whether the warp asks once more for as many registers as the last time, and
/// that is let pass.
bool repeats(const Warp &warp, u32 pc) {
  const LaunchState &launch = *warp.block->launch;
  const auto &code = launch.kernel->code;
  return launch.config->allows.repeatedSetmaxnreg &&
         !warp.registerChanges.empty() &&
         code[warp.registerChanges.back().pc].imm == code[pc].imm;
}

/// All warps of a warpgroup execute the same setmaxnreg, and synchronise
/// before the next one.
void checkGroup(Warp &warp, u32 pc) {
  Block &block = *warp.block;
  u32 first = warp.index / kGroupWarps * kGroupWarps;
  u32 end = std::min<u32>(first + kGroupWarps, block.warps.size());
  size_t turn = warp.registerChanges.size();
  for (u32 i = first; i < end; ++i) {
    const Warp &other = block.warps[i];
    const auto &changes = other.registerChanges;
    if (i == warp.index)
      continue;
    if (changes.size() > turn && changes[turn].pc != pc)
      report(warp, pc, FindingKind::Deadlock,
             "expected all warps of the warpgroup to execute the same "
             "setmaxnreg, found warp " +
                 std::to_string(i) + " at " +
                 block.launch->reporter->describe(changes[turn].pc),
             changes[turn].pc);
    if (turn == 0 || repeats(warp, pc))
      continue;
    bool knows =
        changes.size() >= turn &&
        warp.clockOf(__builtin_ctz(warp.live))
            .knows(block.linear, i, other.initial, changes[turn - 1].time);
    if (!knows && block.launch->checks.race)
      report(warp, pc, FindingKind::Race,
             "executes setmaxnreg again, and nothing orders it after the one "
             "before of warp " +
                 std::to_string(i) +
                 ": expected the warps of the warpgroup to synchronise "
                 "between the two");
  }
}

/// Whether the warp goes on.
bool change(Warp &warp, const Inst &inst) {
  Block &block = *warp.block;
  u32 wanted = static_cast<u32>(inst.imm);
  u64 threads = kWarpSize;
  if (wanted > warp.maxRegisters) {
    u64 more = (wanted - warp.maxRegisters) * threads;
    if (more > block.freeRegisters)
      return false;
    block.freeRegisters -= more;
  } else {
    block.freeRegisters += (warp.maxRegisters - wanted) * threads;
  }
  warp.maxRegisters = wanted;
  block.executor->progressed = true;
  return true;
}

/// Lets warps go for which there are registers now.
void grantRegisters(Block &block) {
  for (Warp &warp : block.warps)
    for (Group &group : warp.groups)
      if (group.wait == Wait::Registers &&
          change(warp, block.launch->kernel->code[group.pc])) {
        group.wait = Wait::None;
        ++group.pc;
      }
}

} // namespace

void requestRegisters(Warp &warp, size_t groupIndex) {
  Group &group = warp.groups[groupIndex];
  const Inst &inst = warp.block->launch->kernel->code[group.pc];
  u32 wanted = static_cast<u32>(inst.imm);
  bool increases = inst.aux, known = warp.maxRegisters != 0;
  checkGroup(warp, group.pc);
  warp.registerChanges.push_back({group.pc, warp.time});
  tick(warp);
  if (known &&
      (increases ? wanted < warp.maxRegisters : wanted > warp.maxRegisters)) {
    report(warp, group.pc, FindingKind::Bounds,
           std::string("expected setmaxnreg.") +
               (increases ? "inc to ask for at least" : "dec to keep at most") +
               " the " + std::to_string(warp.maxRegisters) +
               " registers that the warp has, found " + std::to_string(wanted));
    known = false;
  }
  group.wait = known && !change(warp, inst) ? Wait::Registers : Wait::None;
  if (group.wait == Wait::None)
    ++group.pc;
  if (known && !increases)
    grantRegisters(*warp.block);
}

} // namespace moe::sim
