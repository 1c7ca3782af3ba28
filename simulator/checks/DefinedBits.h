//===- DefinedBits.h - Bits of registers that nothing has written -*- C++
//-*-===//
//
// A register that may be read before it is written has a shadow register of
// the same shape, whose ones are the bits that are undefined. Compilers pack a
// half that nothing has written with one that counts, and mask it away later:
// only bits that something depends on are a fault.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_SIMULATOR_DEFINEDBITS_H
#define MOE_LIB_SIMULATOR_DEFINEDBITS_H

#include "execute/Machine.h"

namespace moe::sim {

/// How the undefined bits of the results follow from those of the sources.
enum class BitRule : u8 {
  /// All, if any bit of any source is undefined.
  Whole,
  /// The instruction only moves the bits of its first `data` sources: it moves
  /// their shadows in the same way.
  Moves,
  And,
  Or,
  /// Bit by bit, from undefined bits only.
  Xor,
  Lop3,
  /// From the lowest undefined bit on, as carries run.
  Carries,
  /// Each half from the same halves.
  Halves,
  /// The second source gives the low half, the first the high one.
  PackHalves,
  /// A conversion of one or two elements, each from its own source or part of
  /// one.
  Elements,
  /// The handler does it.
  Own,
};

struct BitTransfer {
  BitRule rule = BitRule::Whole;
  /// Of Moves.
  u8 data = 0;
};

BitTransfer bitTransferOf(Handler run);

/// Follows the undefined bits through an instruction of the kernel that is
/// about to run for `mask` out of the lanes `group`; reports branches and
/// addresses that depend on them.
void trackDefinedness(Warp &warp, const Inst &inst, u32 pc, u32 group,
                      u32 mask);

/// Lanes of `mask` in which the low `bytes` bytes of the register are defined
/// in part at least.
u32 partlyDefinedLanes(Warp &warp, u32 place, u32 bytes, u32 mask);

/// shfl: lane l gets what lane from[l] has, and nothing if that takes no part.
void shuffleDefinedness(Warp &warp, const Inst &inst, u32 mask,
                        const u32 *from);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_DEFINEDBITS_H
