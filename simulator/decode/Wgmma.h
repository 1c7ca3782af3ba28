//===- Wgmma.h - A wgmma instruction's shape --------------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_WGMMA_H
#define MOE_LIB_SIMULATOR_WGMMA_H

#include "Conversion.h"

#include <bit>

namespace moe::sim {

/// What the inst.imm of wgmma.mma_async holds. M is 64, and K has 32 bytes.
struct WgmmaShape {
  NumberType typeA = NumberType::F16;
  NumberType typeB = NumberType::F16;
  u16 n = 8;
  u8 elementBytes = 2;
  bool registersA : 1 = false;
  bool halfD : 1 = false;
  bool integer : 1 = false;
  bool saturates : 1 = false;
  bool negateA : 1 = false;
  bool negateB : 1 = false;
  bool transposeA : 1 = false;
  bool transposeB : 1 = false;
  u16 reserved = 0;

  i64 pack() const { return std::bit_cast<i64>(*this); }
  static WgmmaShape unpack(i64 bits) { return std::bit_cast<WgmmaShape>(bits); }
};
static_assert(sizeof(WgmmaShape) == 8);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_WGMMA_H
