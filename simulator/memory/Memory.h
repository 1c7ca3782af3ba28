//===- Memory.h - From addresses to host memory, with checks ----*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_MEMORY_H
#define MOE_LIB_SIMULATOR_MEMORY_H

#include "execute/Machine.h"

namespace moe::sim {

struct Access;

struct MemoryRequest {
  u32 bytes = 0;
  bool read = false;
  bool write = false;
  /// Stamp flags (Shadow.h).
  u32 flags = 0;
  /// What is stored: `bytes` for each lane, 32 lanes; may be null.
  const u8 *values = nullptr;
  /// Lanes whose stored value is undefined.
  u32 undefinedLanes = 0;
  /// Alignment that the instruction asks for; 0: its size.
  u32 alignment = 0;
  /// Goes into the counters.
  bool counts = true;
};

/// Where the memory of the lanes lies.
struct Places {
  /// Lanes whose access is in bounds; the others must be left out.
  u32 good = 0;
  u8 *pointers[kWarpSize];
  /// If not null, all lanes are good and lane l's memory is run + l * step.
  u8 *run = nullptr;
  u32 step = 0;

  void fill(u8 *from, u32 by) {
    run = from;
    step = by;
  }
};

/// Checks an access and finds the memory behind it.
void resolve(Warp &warp, const Inst &inst, u32 mask, Space space,
             const u64 *addresses, const MemoryRequest &request,
             Places &places);

/// The addresses s[0] + imm of all lanes.
void addressesOf(Warp &warp, const Inst &inst, u64 *addresses);
/// An access to s[0] + imm in the instruction's space.
void resolveOperand(Warp &warp, const Inst &inst, u32 mask,
                    const MemoryRequest &request, Places &places);
inline u64 laneAddress(Warp &warp, u32 place, bool wide, u32 lane) {
  return wide ? lanesOf<u64>(warp, place)[lane]
              : lanesOf<u32>(warp, place)[lane];
}

/// The block whose shared memory a shared address means, and the offset in its
/// window; null if there is none. `bytes` must lie inside.
Block *sharedOwner(Block &block, u64 address, u64 bytes, u64 &offset);
/// As sharedOwner, for a generic address.
Block *sharedOwnerOfGeneric(Block &block, u64 address, u64 &sharedAddress);

/// Checks one access of `lanes` to shared memory; null if it is out of bounds.
u8 *touchShared(Warp &warp, u64 address, u32 bytes, Access &access);
/// Adds an access of a lane, or of no single one, to the launch's trace.
void traceShared(const Warp &warp, const Access &access, u32 lane, u64 address,
                 u32 bytes);
/// As touchShared, for memory behind global addresses.
u8 *touchGlobal(Warp &warp, u64 address, u64 bytes, Access &access);
Region *findRegion(LaunchState &launch, u64 address, u64 bytes);

inline u32 pcOf(const Warp &warp, const Inst &inst) {
  return static_cast<u32>(&inst - warp.block->launch->kernel->code.data());
}

void reportAlignment(Warp &warp, const Inst &inst, u32 lane, u64 address,
                     u32 alignment);
u32 stampFlags(const Inst &inst);

void countShared(Warp &warp, u32 mask, const u64 *addresses, u32 bytes,
                 bool write);
void countGlobal(Warp &warp, u32 mask, const u64 *addresses, u32 bytes,
                 bool write);
/// A warp's access to `bytes` consecutive bytes of global memory.
void countConsecutive(Warp &warp, u64 address, u32 bytes, bool write);

/// Lanes of `mask` in which the register is defined.
inline u32 definedLanes(Warp &warp, u32 place, u32 mask) {
  const Kernel &kernel = *warp.block->launch->kernel;
  if (kernel.tracked.empty())
    return mask;
  auto it = kernel.trackedIndex.find(place);
  return it == kernel.trackedIndex.end() ? mask
                                         : mask & warp.defined[it->second];
}

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_MEMORY_H
