//===- TensorMapField.h - What tensormap.replace sets -----------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_TENSORMAPFIELD_H
#define MOE_LIB_SIMULATOR_TENSORMAPFIELD_H

#include "Types.h"

namespace moe::sim {

/// inst.aux of tensormap.replace; inst.aux2 is the dimension, from 0, and
/// inst.imm2 the bytes of one unit of a stride.
enum class TensorMapField : u8 {
  GlobalAddress,
  Rank,
  BoxDim,
  GlobalDim,
  GlobalStride,
  ElementStride,
  ElementType,
  Interleave,
  Swizzle,
  SwizzleAtomicity,
  Fill,
};

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_TENSORMAPFIELD_H
