//===- SoftmaxMixBackward.h - The gradient's schedules ----------*- C++ -*-===//
//
// Each is a kernel of a file of its own; SoftmaxMixBackward.cpp lists them.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIXBACKWARD_H
#define MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIXBACKWARD_H

#include "MixGradient.h"
#include "ThreadLowerings.h"

namespace mlir::moe {

/// Rows that a block takes at a time on tensor cores with `sharedBytes` of
/// shared memory; nullopt if the gradient cannot run there.
std::optional<int64_t> getTensorGradientRows(MixGradient mix,
                                             int64_t sharedBytes);
/// Emits such a gradient.
void emitGradientOnTensorCores(WarpBuilder &b, MixGradient mix,
                               int64_t sharedBytes);

/// The widest rows that the registers of a warp accumulate.
inline constexpr int64_t kMaxGradientWidth = 1024;
/// Emits the gradient by warps that take a row each; rows have a static width
/// of at most kMaxGradientWidth.
void emitGradientOnFloatUnits(WarpBuilder &b, MixGradient mix, Workers workers);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIXBACKWARD_H
