//===- PackedOps.h - Two numbers in a register ------------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_PACKEDOPS_H
#define MOE_LIB_SIMULATOR_PACKEDOPS_H

#include "Handlers.h"

namespace moe::sim {

/// Arithmetic on .s16x2, .u16x2 and .f32x2. Pairs of 16-bit floats are in
/// HalfOps.cpp.
void addPackedOps(HandlerTable &table);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_PACKEDOPS_H
