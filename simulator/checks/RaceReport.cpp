//===- RaceReport.cpp - What the race detector says -----------------------===//

#include "RaceReport.h"
#include "execute/Machine.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

namespace moe::sim {
namespace {

std::string placeName(const Warp &warp, const char *memory, u64 address) {
  if (std::strcmp(memory, "shared memory") != 0)
    return std::string(memory) + "+" + std::to_string(address);
  u64 offset = address - warp.block->launch->sharedBase;
  for (const auto &variable : warp.block->launch->kernel->sharedVariables)
    if (offset >= variable.offset && offset < variable.offset + variable.bytes)
      return "shared memory " + variable.name + "+" +
             std::to_string(offset - variable.offset);
  return "shared memory+" + std::to_string(offset);
}

std::string actorName(const Warp &warp, const Stamp &stamp, u32 lane) {
  const Block &block = *warp.block;
  u32 ofBlock = (stamp.actor - 1) / block.actors();
  u32 local = (stamp.actor - 1) % block.actors();
  std::string text;
  if (ofBlock != block.linear) {
    const u32 *grid = block.launch->grid;
    text = "block (" + std::to_string(ofBlock % grid[0]) + "," +
           std::to_string(ofBlock / grid[0] % grid[1]) + "," +
           std::to_string(ofBlock / grid[0] / grid[1]) + ") ";
  }
  if (local == block.asyncActor())
    return text + "an asynchronous copy";
  return text + "warp " + std::to_string(local) + " lane " +
         std::to_string(lane);
}

/// A lane of each access; two lanes of one warp race with one another, never a
/// lane with itself.
std::pair<u32, u32> pickLanes(const Stamp &mine, const Stamp &other) {
  u32 lane = __builtin_ctz(mine.lanes), otherLane = other.lane();
  if (mine.actor != other.actor || lane != otherLane)
    return {lane, otherLane};
  if (u32 rest = mine.lanes & ~(1u << otherLane))
    return {static_cast<u32>(__builtin_ctz(rest)), otherLane};
  if (u32 rest = other.lanes & ~(1u << lane))
    return {lane, static_cast<u32>(__builtin_ctz(rest))};
  return {lane, otherLane};
}

/// The first word in which the values differ, as (mine, other).
std::pair<std::string, std::string> differingWords(const StoredValues &values) {
  u32 width = std::min<u32>(values.bytes, 4), at = 0;
  while (at + width < values.bytes &&
         std::memcmp(values.mine + at, values.other + at, width) == 0)
    at += width;
  auto hex = [&](const u8 *bytes) {
    u32 word = 0;
    std::memcpy(&word, bytes + at, width);
    char text[16];
    std::snprintf(text, sizeof text, "0x%0*x", static_cast<int>(2 * width),
                  word);
    return std::string(text);
  };
  return {hex(values.mine), hex(values.other)};
}

} // namespace

void reportRace(const Access &access, RaceKind kind, const char *memory,
                u64 address, const Stamp &mine, const Stamp &other,
                bool proxy) {
  Warp &warp = *access.warp;
  Reporter &reporter = *warp.block->launch->reporter;
  u32 otherPc = other.info & kPcMask;
  bool equal = kind == RaceKind::EqualStores;
  FindingKind found = equal ? FindingKind::EqualStores : FindingKind::Race;
  if (reporter.repeats(found, warp, access.pc, otherPc))
    return;
  static constexpr const char *kinds[] = {
      "read-after-write race", "write-after-write race",
      "write-after-read race", "equal stores"};
  bool read = kind == RaceKind::ReadAfterWrite;
  std::string what = std::string(kinds[static_cast<u8>(kind)]) + ": " +
                     (read ? "reads " : "writes ") +
                     placeName(warp, memory, address);
  auto [lane, otherLane] = pickLanes(mine, other);
  std::string whom = actorName(warp, other, otherLane) +
                     (kind == RaceKind::WriteAfterRead ? " read" : " wrote") +
                     " at " + reporter.describe(otherPc);
  what += ", which " + whom;
  if (equal)
    what += " with the same value";
  if (other.pending())
    what += "; that access is asynchronous and not waited for";
  else if (proxy)
    what += " through the generic proxy: expected fence.proxy.async between "
            "that write and this asynchronous access";
  else
    what += "; nothing orders the two";
  reporter.add(found, warp, lane, access.pc, what, otherPc, whom);
}

void reportLaneStores(const Access &access, const char *memory, u64 address,
                      const Stamp &mine, const Stamp &other,
                      const StoredValues &values) {
  const Warp &warp = *access.warp;
  Reporter &reporter = *warp.block->launch->reporter;
  // Not counted with races of this instruction in two warps.
  if (reporter.repeats(FindingKind::Race, warp, access.pc))
    return;
  auto [lane, otherLane] = pickLanes(mine, other);
  auto [word, otherWord] = differingWords(values);
  reporter.add(FindingKind::Race, warp, lane, access.pc,
               "race of lanes: stores " + word + " to " +
                   placeName(warp, memory, address) + ", and lane " +
                   std::to_string(otherLane) +
                   " of the same warp stores another value there by the same "
                   "instruction, " +
                   otherWord +
                   "; one of the two stays, and which one is not defined",
               kNone,
               actorName(warp, other, otherLane) + " wrote at " +
                   reporter.describe(access.pc));
}

void reportUninitRead(const Access &access, const char *memory, u64 address,
                      u32 lane) {
  const Warp &warp = *access.warp;
  const LaunchState &launch = *warp.block->launch;
  if (!launch.checks.uninit ||
      launch.reporter->repeats(FindingKind::Uninit, warp, access.pc))
    return;
  launch.reporter->add(FindingKind::Uninit, warp, lane, access.pc,
                       "reads " + placeName(warp, memory, address) +
                           ", which nothing has initialised");
}

} // namespace moe::sim
