//===- Barriers.h - Kinds of block barriers ---------------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_BARRIERS_H
#define MOE_LIB_SIMULATOR_BARRIERS_H

#include "Types.h"

namespace moe::sim {

/// inst.aux of a barrier. Its operands are the barrier's number, the thread
/// count (0: all threads) and, for reductions, a predicate.
enum class BarrierKind : u8 { Sync, Arrive, Popc, And, Or };

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_BARRIERS_H
