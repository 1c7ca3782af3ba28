//===- Patterns.h - The families of leaf lowerings --------------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PATTERNS_H
#define MOE_LIB_CONVERSION_MOETOCPU_PATTERNS_H

#include "MoE/Conversion/MoEToCPU.h"
#include "MoE/Transforms/KernelFacts.h"

namespace mlir::moe {

void populateCoSelectionsToCPUPatterns(RewritePatternSet &patterns,
                                       const CPUVectorOptions &options);

void populateCombineToCPUPatterns(RewritePatternSet &patterns,
                                  const CPUVectorOptions &options);

void populateContractionToCPUPatterns(RewritePatternSet &patterns,
                                      const CPUVectorOptions &options);

void populateDispatchToCPUPatterns(RewritePatternSet &patterns,
                                   const CPUVectorOptions &options);

void populateDispersionToCPUPatterns(RewritePatternSet &patterns,
                                     const CPUVectorOptions &options);

void populateRowsToCPUPatterns(RewritePatternSet &patterns,
                               const CPUVectorOptions &options);

void populateSoftmaxMixBackwardSelfToCPUPatterns(
    RewritePatternSet &patterns, const CPUVectorOptions &options);

void populateSoftmaxMixBackwardToCPUPatterns(RewritePatternSet &patterns,
                                             const CPUVectorOptions &options);

void populateSoftmaxMixToCPUPatterns(RewritePatternSet &patterns,
                                     const CPUVectorOptions &options);

void populateSoftmaxMixSelfToCPUPatterns(RewritePatternSet &patterns,
                                         const CPUVectorOptions &options);

void populateTopKBackwardToCPUPatterns(RewritePatternSet &patterns,
                                       const CPUVectorOptions &options);

void populateTopKToCPUPatterns(RewritePatternSet &patterns,
                               const CPUVectorOptions &options);

// What families of kernels say of their ops, beside their patterns.
void addSoftmaxMixFacts(KernelFacts &facts, int64_t tileRows);
void addSoftmaxMixSelfFacts(KernelFacts &facts);
void addTopKFacts(KernelFacts &facts);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PATTERNS_H
