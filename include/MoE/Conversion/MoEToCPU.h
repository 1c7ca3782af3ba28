//===- MoEToCPU.h - Leaf ops on buffers to vector code ----------*- C++ -*-===//

#ifndef MOE_CONVERSION_MOETOCPU_H
#define MOE_CONVERSION_MOETOCPU_H

#include "MoE/Conversion/CPUTarget.h"

#include "mlir/IR/PatternMatch.h"

namespace mlir::moe {
class KernelFacts;

/// What the CPU's kernels say. Those that prepare a matrix for the rows of a
/// tile ask for twice `tileRows` rows; some want panels of whole vectors of
/// `vectorWidth` lanes.
KernelFacts getCPUKernelFacts(MLIRContext *context, int64_t tileRows,
                              int64_t vectorWidth = CPUTarget().vectorWidth);

/// Patterns that turn moe ops and contractions on buffers into loops over 1-D
/// vectors.
void populateMoEToCPUPatterns(RewritePatternSet &patterns,
                              const CPUTarget &options);

} // namespace mlir::moe

#endif // MOE_CONVERSION_MOETOCPU_H
