//===- WarpgroupAgreement.cpp - What four warps must do alike -------------===//
//
// Hardware runs one wgmma for a warpgroup, with the operands of one of its
// warps. The simulator runs it for each warp by itself, so what they disagree
// in would not show in values.
//
//===----------------------------------------------------------------------===//

#include "WarpgroupAgreement.h"

#include <algorithm>
#include <string>

namespace moe::sim {
namespace {

constexpr u32 kGroupWarps = 4;

void report(Warp &warp, u32 lane, u32 pc, const std::string &what,
            u32 otherPc) {
  Reporter &reporter = *warp.block->launch->reporter;
  if (!reporter.repeats(FindingKind::Deadlock, warp, pc, otherPc))
    reporter.add(FindingKind::Deadlock, warp, lane, pc, what, otherPc,
                 reporter.describe(otherPc));
}

u32 warpsOfGroup(const Block &block, u32 group) {
  return std::min<u32>(kGroupWarps, block.warps.size() - group * kGroupWarps);
}

void compare(Warp &warp, u32 pc, const GroupWgmma &first,
             const std::array<u64, 3> &operands) {
  static constexpr const char *names[] = {"descriptor of A", "descriptor of B",
                                          "scale-d"};
  u32 lane = __builtin_ctz(warp.live);
  std::string whom = "warp " + std::to_string(first.warp) + " of the warpgroup";
  if (first.pc != pc) {
    report(warp, lane, pc,
           "expected the wgmma that " + whom +
               " executes: " + warp.block->launch->reporter->describe(first.pc),
           first.pc);
    return;
  }
  for (u32 i = 0; i < operands.size(); ++i)
    if (operands[i] != first.operands[i])
      report(warp, lane, pc,
             std::string("expected the ") + names[i] + " of " + whom + ", " +
                 std::to_string(first.operands[i]) + ", found " +
                 std::to_string(operands[i]),
             pc);
}

} // namespace

void checkAgreement(Warp &warp, u32 pc, const std::array<u64, 3> &operands) {
  Block &block = *warp.block;
  u32 group = warp.index / kGroupWarps, warps = warpsOfGroup(block, group);
  if (warps < kGroupWarps)
    report(warp, __builtin_ctz(warp.live), pc,
           "expected a warpgroup of four warps, found " + std::to_string(warps),
           pc);
  WarpgroupLog &log = block.warpgroups[group];
  u64 turn = warp.numWgmmas++;
  if (turn - log.first == log.wgmmas.size()) {
    log.wgmmas.push_back({pc, operands, warp.index});
  } else {
    GroupWgmma &first = log.wgmmas[turn - log.first];
    compare(warp, pc, first, operands);
    ++first.executed;
  }
  // Those that all have executed come first, and go in one piece now and then.
  constexpr size_t kKept = 64;
  if (log.wgmmas.size() < kKept)
    return;
  size_t done = 0;
  while (done < log.wgmmas.size() && log.wgmmas[done].executed == warps)
    ++done;
  log.wgmmas.erase(log.wgmmas.begin(), log.wgmmas.begin() + done);
  log.first += done;
}

void checkWarpgroups(Block &block) {
  for (u32 group = 0; group < block.warpgroups.size(); ++group) {
    const WarpgroupLog &log = block.warpgroups[group];
    u32 warps = warpsOfGroup(block, group);
    for (const GroupWgmma &wgmma : log.wgmmas)
      if (wgmma.executed < warps)
        report(block.warps[wgmma.warp], 0, wgmma.pc,
               "expected all four warps of the warpgroup to execute this "
               "wgmma, found " +
                   std::to_string(wgmma.executed),
               wgmma.pc);
    size_t changes = 0;
    for (u32 i = 0; i < warps; ++i)
      changes = std::max(
          changes, block.warps[group * kGroupWarps + i].registerChanges.size());
    for (u32 i = 0; i < warps; ++i) {
      Warp &warp = block.warps[group * kGroupWarps + i];
      size_t own = warp.registerChanges.size();
      for (u32 k = 0; own < changes && k < warps; ++k)
        if (const Warp &other = block.warps[group * kGroupWarps + k];
            other.registerChanges.size() > own)
          report(warp, 0, other.registerChanges[own].pc,
                 "expected all warps of the warpgroup to execute this "
                 "setmaxnreg; warp " +
                     std::to_string(warp.index) + " has not",
                 other.registerChanges[own].pc);
    }
  }
}

} // namespace moe::sim
