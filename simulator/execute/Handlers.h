//===- Handlers.h - Tables of instruction handlers --------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_HANDLERS_H
#define MOE_LIB_SIMULATOR_HANDLERS_H

#include "decode/Program.h"

#include <string>
#include <unordered_map>

namespace moe::sim {

using HandlerTable = std::unordered_map<std::string, Handler>;

/// All handlers for this CPU, by key; DecodeScalar.cpp and its siblings build
/// the keys.
const HandlerTable &handlers();

// Compiled for memory and control: one version.
void addMemoryOps(HandlerTable &table);
void addAtomicOps(HandlerTable &table);
void addWarpOps(HandlerTable &table);
void addFenceOps(HandlerTable &table);
void addAsyncCopyOps(HandlerTable &table);
void addMbarrierOps(HandlerTable &table);
void addTensorMapOps(HandlerTable &table);
void addBulkCopyOps(HandlerTable &table);
void addWgmmaOps(HandlerTable &table);
void addMatrixMemoryOps(HandlerTable &table);
void addDirectedOps(HandlerTable &table);
void addGenericConversions(HandlerTable &table);

/// D[m][n] += A[m][k] B[k][n] with row strides; the arithmetic of mma and
/// wgmma. Chosen for this CPU.
struct MatrixKernels {
  /// D is rows x n, A is rows x k, B is k x n, all f32.
  void (*multiply)(float *d, const float *a, const float *b, u32 rows, u32 n,
                   u32 k);
  void (*widenF16)(float *to, const u16 *from, u32 count);
  void (*widenBF16)(float *to, const u16 *from, u32 count);
};
const MatrixKernels &matrixKernels();

// Compiled once for any x86-64 and once for AVX2, F16C and FMA.
#define MOE_SIM_DECLARE_ISA(isa)                                               \
  namespace isa {                                                              \
  void addIntegerOps(HandlerTable &table);                                     \
  void addFloatOps(HandlerTable &table);                                       \
  void addHalfOps(HandlerTable &table);                                        \
  void addConversionOps(HandlerTable &table);                                  \
  void addMmaOps(HandlerTable &table);                                         \
  MatrixKernels matrixKernels();                                               \
  }
MOE_SIM_DECLARE_ISA(baseline)
MOE_SIM_DECLARE_ISA(avx2)
#undef MOE_SIM_DECLARE_ISA

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_HANDLERS_H
