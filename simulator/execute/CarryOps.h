//===- CarryOps.h - Extended-precision arithmetic ---------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_CARRYOPS_H
#define MOE_LIB_SIMULATOR_CARRYOPS_H

#include "Handlers.h"

namespace moe::sim {

/// add.cc, addc, sub.cc, subc, mad.cc and madc.
void addCarryOps(HandlerTable &table);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_CARRYOPS_H
