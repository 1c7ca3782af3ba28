//===- MoEToCPU.h - Leaf ops on buffers to vector code ----------*- C++ -*-===//

#ifndef MOE_CONVERSION_MOETOCPU_H
#define MOE_CONVERSION_MOETOCPU_H

#include "mlir/IR/PatternMatch.h"

namespace mlir::moe {

struct CPUVectorOptions {
  /// Lanes of every f32 vector: 16 is one register of AVX-512.
  int64_t vectorWidth = 16;
};

/// Patterns that turn moe ops and contractions on buffers into loops over 1-D
/// vectors.
void populateMoEToCPUPatterns(RewritePatternSet &patterns,
                              const CPUVectorOptions &options);

} // namespace mlir::moe

#endif // MOE_CONVERSION_MOETOCPU_H
