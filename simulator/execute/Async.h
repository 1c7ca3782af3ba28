//===- Async.h - Asynchronous copies and mbarriers --------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_ASYNC_H
#define MOE_LIB_SIMULATOR_ASYNC_H

#include "memory/Memory.h"

namespace moe::sim {

/// When something asynchronous happens: at most this many ticks from now.
constexpr u32 kAsyncDelay = 2000;

/// `run` belongs to `block`: it must happen before that block ends.
void schedule(Block &block, Warp &warp, u32 lane, u32 pc,
              std::function<void()> run);

/// The mbarrier at a shared address (of a block of the cluster). Reports what
/// is wrong with it and returns null if it cannot be used.
struct MbarrierRef {
  Mbarrier *barrier = nullptr;
  Block *owner = nullptr;
  /// Its key in the owner's table. What happens later looks it up again, for it
  /// may be gone by then.
  u64 place = 0;
};
MbarrierRef findMbarrier(Warp &warp, const Inst &inst, u32 lane, u64 address,
                         bool byAsyncProxy);
/// The mbarrier that something was started with; null, and a finding, if it has
/// been invalidated or initialised anew since.
Mbarrier *findStarted(Warp &warp, u32 lane, u32 pc, Block &owner, u64 place,
                      u32 serial);
/// Completes the phase if nothing is outstanding.
void checkPhase(Block &owner, Mbarrier &barrier);
void arriveOn(Warp &warp, u32 lane, u32 pc, const MbarrierRef &ref, u32 count);

/// The shared address that s[index] + offset means; converts generic ones.
u64 sharedAddress(Warp &warp, u32 place, bool wide, i64 offset, bool generic,
                  u32 lane);

/// The lane's cp.asyncs of all groups land and count as waited for.
void finishCopies(Warp &warp, u32 lane, u32 beforeGroup);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_ASYNC_H
