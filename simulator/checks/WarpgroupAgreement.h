//===- WarpgroupAgreement.h - What four warps must do alike ------*- C++
//-*-===//

#ifndef MOE_LIB_SIMULATOR_WARPGROUPAGREEMENT_H
#define MOE_LIB_SIMULATOR_WARPGROUPAGREEMENT_H

#include "execute/Machine.h"

namespace moe::sim {

/// The warp executes a wgmma: reports if the other warps of its warpgroup have
/// executed another one in its place, or with other operands.
void checkAgreement(Warp &warp, u32 pc, const std::array<u64, 3> &operands);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_WARPGROUPAGREEMENT_H
