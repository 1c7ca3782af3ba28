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

/// How a block computes the gradient on tensor cores: rows that it takes at a
/// time, and what emits that.
struct TensorGradientPlan {
  int64_t tileRows;
  std::function<void(WarpBuilder &b, MixGradient mix)> emit;
};
/// With `sharedBytes` of shared memory; nullopt if it cannot.
std::optional<TensorGradientPlan>
planGradientOnTensorCores(MixGradient mix, int64_t sharedBytes);

/// The widest rows that the registers of a warp accumulate.
inline constexpr int64_t kMaxGradientWidth = 1024;
/// Emits the gradient by warps that take a row each; rows have a static width
/// of at most kMaxGradientWidth.
void emitGradientOnFloatUnits(WarpBuilder &b, MixGradient mix, Workers workers);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIXBACKWARD_H
