//===- WgmmaHazards.cpp - Registers of wgmmas in flight -------------------===//

#include "decode/Wgmma.h"
#include "execute/Handlers.h"
#include "execute/Machine.h"
#include "execute/Mma.h"

#include <algorithm>

namespace moe::sim {
namespace {

bool contains(const u32 *places, u32 count, u32 place) {
  return std::find(places, places + count, place) != places + count;
}

bool meets(const u32 *a, u32 countA, const u32 *b, u32 countB) {
  return std::any_of(a, a + countA,
                     [&](u32 place) { return contains(b, countB, place); });
}

/// The sources that the instruction reads as it issues, or as the hardware
/// reads A: scale-d and descriptors of a wgmma lie apart.
const char *hazardOf(const Inst &inst, bool isWgmma,
                     const WgmmaInFlight &flight) {
  const u32 *d = flight.accumulators;
  u32 nd = flight.numAccumulators;
  if (meets(inst.s, inst.ns, d, nd))
    return "reads an accumulator";
  // Those with the same accumulators follow each other without a wait.
  bool chained = isWgmma && inst.nd == nd && std::equal(d, d + nd, inst.d);
  if (!chained && meets(inst.d, inst.nd, d, nd))
    return "overwrites an accumulator";
  if (meets(inst.d, inst.nd, flight.registersA, flight.numRegistersA))
    return "overwrites a register of A";
  return nullptr;
}

} // namespace

void checkWgmmaHazard(Warp &warp, const Inst &inst, u32 pc) {
  static const Handler mma = handlers().at("wgmma.mma_async");
  LaunchState &launch = *warp.block->launch;
  if (!launch.checks.race)
    return;
  for (const WgmmaInFlight &flight : warp.wgmmas) {
    const char *hazard = hazardOf(inst, inst.run == mma, flight);
    if (!hazard)
      continue;
    Reporter &reporter = *launch.reporter;
    if (!reporter.repeats(FindingKind::Race, warp, pc, flight.pc))
      reporter.add(FindingKind::Race, warp, __builtin_ctz(warp.live), pc,
                   std::string(hazard) + " of the wgmma at " +
                       reporter.describe(flight.pc) +
                       " before wgmma.wait_group covers it",
                   flight.pc, reporter.describe(flight.pc));
    return;
  }
}

} // namespace moe::sim
