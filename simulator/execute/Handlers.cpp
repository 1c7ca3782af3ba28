//===- Handlers.cpp - Collects the handlers for this CPU ------------------===//

#include "Handlers.h"
#include "CarryOps.h"
#include "PackedOps.h"

namespace moe::sim {
namespace {

bool hasAvx2() {
#if defined(MOE_SIM_HAS_AVX2_OBJECTS)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

HandlerTable collect() {
  HandlerTable table;
  addMemoryOps(table);
  addAtomicOps(table);
  addWarpOps(table);
  addFenceOps(table);
  addAsyncCopyOps(table);
  addMbarrierOps(table);
  addTensorMapOps(table);
  addBulkCopyOps(table);
  addWgmmaOps(table);
  addMatrixMemoryOps(table);
  addCarryOps(table);
  addPackedOps(table);
  addDirectedOps(table);
  addGenericConversions(table);
#if defined(MOE_SIM_HAS_AVX2_OBJECTS)
  if (hasAvx2()) {
    avx2::addIntegerOps(table);
    avx2::addFloatOps(table);
    avx2::addHalfOps(table);
    avx2::addConversionOps(table);
    avx2::addMmaOps(table);
    return table;
  }
#endif
  baseline::addIntegerOps(table);
  baseline::addFloatOps(table);
  baseline::addHalfOps(table);
  baseline::addConversionOps(table);
  baseline::addMmaOps(table);
  return table;
}

} // namespace

const HandlerTable &handlers() {
  static const HandlerTable table = collect();
  return table;
}

const MatrixKernels &matrixKernels() {
#if defined(MOE_SIM_HAS_AVX2_OBJECTS)
  static const MatrixKernels kernels =
      hasAvx2() ? avx2::matrixKernels() : baseline::matrixKernels();
#else
  static const MatrixKernels kernels = baseline::matrixKernels();
#endif
  return kernels;
}

} // namespace moe::sim
