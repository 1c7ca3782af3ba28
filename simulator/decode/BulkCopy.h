//===- BulkCopy.h - A bulk copy instruction's shape -------------*- C++ -*-===//
//
// Sources of bulk copies, all of which have at least these places:
//
//   s[0]    the global address or the tensor map, with inst.imm
//   s[1]    the shared address
//   s[2]    the mbarrier
//   s[3]    the multicast mask
//   s[4...] the size, or the coordinates
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_SIMULATOR_BULKCOPY_H
#define MOE_LIB_SIMULATOR_BULKCOPY_H

#include "Conversion.h"

#include <bit>

namespace moe::sim {

enum class BulkReduction : u8 { Add, Min, Max, And, Or, Xor, Inc, Dec };

/// What inst.imm2 holds.
struct BulkShape {
  /// Dimensions of the tensor; 0: plain bytes.
  u8 rank = 0;
  NumberType type = NumberType::U32;
  BulkReduction reduction = BulkReduction::Add;
  u8 elementBytes = 4;
  bool reduces : 1 = false;
  bool multicast : 1 = false;
  bool wideShared : 1 = false;
  bool wideMbarrier : 1 = false;
  bool generic : 1 = false;
  u8 reserved[3] = {};

  i64 pack() const { return std::bit_cast<i64>(*this); }
  static BulkShape unpack(i64 bits) { return std::bit_cast<BulkShape>(bits); }
};
static_assert(sizeof(BulkShape) == 8);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_BULKCOPY_H
