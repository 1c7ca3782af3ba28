//===- RaceReport.h - What the race detector says ---------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_RACEREPORT_H
#define MOE_LIB_SIMULATOR_RACEREPORT_H

#include "Shadow.h"

namespace moe::sim {

enum class RaceKind : u8 {
  ReadAfterWrite,
  WriteAfterWrite,
  WriteAfterRead,
  /// By one instruction of two warps, and the bytes were the same.
  EqualStores
};

/// `mine` and `other` collide at `address` of the memory called `memory`.
/// `proxy`: only a proxy fence is missing between the two.
void reportRace(const Access &access, RaceKind kind, const char *memory,
                u64 address, const Stamp &mine, const Stamp &other, bool proxy);

/// Two values of one place.
struct StoredValues {
  const u8 *mine;
  const u8 *other;
  u32 bytes;
};

/// Two lanes of one warp store different values by one instruction.
void reportLaneStores(const Access &access, const char *memory, u64 address,
                      const Stamp &mine, const Stamp &other,
                      const StoredValues &values);

/// `lane` reads bytes that nothing has initialised.
void reportUninitRead(const Access &access, const char *memory, u64 address,
                      u32 lane);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_RACEREPORT_H
