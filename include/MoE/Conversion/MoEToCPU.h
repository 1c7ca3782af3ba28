//===- MoEToCPU.h - Leaf ops on buffers to vector code ----------*- C++ -*-===//

#ifndef MOE_CONVERSION_MOETOCPU_H
#define MOE_CONVERSION_MOETOCPU_H

#include "mlir/IR/PatternMatch.h"

namespace mlir::moe {
class KernelFacts;

/// What the CPU's kernels say. Those that prepare a matrix for the rows of a
/// tile ask for twice `tileRows` rows.
KernelFacts getCPUKernelFacts(MLIRContext *context, int64_t tileRows);

/// The vectors that code may use.
struct CPUVectorOptions {
  /// Lanes of every f32 vector: 16 is one register of AVX-512.
  int64_t vectorWidth = 16;
  /// Register tiles fill them: AVX-512 has 32, AVX2 16.
  int64_t vectorRegisters = 32;
  /// Whether pairs of bf16 products are summed in f32 by one instruction, that
  /// of AVX512_BF16 on 16 lanes.
  bool bf16Dot = false;
};

/// Patterns that turn moe ops and contractions on buffers into loops over 1-D
/// vectors.
void populateMoEToCPUPatterns(RewritePatternSet &patterns,
                              const CPUVectorOptions &options);

} // namespace mlir::moe

#endif // MOE_CONVERSION_MOETOCPU_H
