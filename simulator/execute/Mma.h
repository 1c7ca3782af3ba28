//===- Mma.h - Shapes and numerics of matrix instructions -------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_MMA_H
#define MOE_LIB_SIMULATOR_MMA_H

#include "Machine.h"
#include "decode/Conversion.h"

#include <bit>

namespace moe::sim {

/// What an mma instruction's inst.imm holds.
struct MmaShape {
  NumberType typeA = NumberType::F16;
  NumberType typeB = NumberType::F16;
  u16 k = 16;
  u8 elementBytes = 2;
  u8 elementBits = 16;
  bool signedA : 1 = false;
  bool signedB : 1 = false;
  bool saturates : 1 = false;
  /// C or D are packed f16.
  bool halfC : 1 = false;
  bool halfD : 1 = false;
  u8 reserved = 0;

  i64 pack() const { return std::bit_cast<i64>(*this); }
  static MmaShape unpack(i64 bits) { return std::bit_cast<MmaShape>(bits); }
};
static_assert(sizeof(MmaShape) == 8);

/// D += A B as the modes TensorCore and Perturbed have it.
void multiplyInexact(Warp &warp, float *d, const float *a, const float *b,
                     u32 rows, u32 n, u32 k);

/// An instruction touches a register that a wgmma in flight uses.
void checkWgmmaHazard(Warp &warp, const Inst &inst, u32 pc);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_MMA_H
