//===- Patterns.h - The families of leaf lowerings --------------*- C++ -*-===//
//
// A kernel is a class that writes the code of one op: `KernelTy(e, op).emit()`.
// KernelPattern makes a pattern of it; each file adds its own.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PATTERNS_H
#define MOE_LIB_CONVERSION_MOETOCPU_PATTERNS_H

#include "Emit/Emitter.h"

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Transforms/KernelFacts.h"

namespace mlir::moe {

/// Replaces an op for which `match` succeeds by the code of its kernel.
template <typename OpTy, typename KernelTy, auto match = matchContiguousBuffers>
struct KernelPattern : OpRewritePattern<OpTy> {
  KernelPattern(MLIRContext *context, const CPUTarget &options)
      : OpRewritePattern<OpTy>(context), options(options) {}

  LogicalResult matchAndRewrite(OpTy op,
                                PatternRewriter &rewriter) const override {
    if (failed(match(op, rewriter)))
      return failure();
    Emitter e(op.getLoc(), rewriter, options);
    KernelTy(e, op).emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUTarget options;
};

void populateCoSelectionsToCPUPatterns(RewritePatternSet &patterns,
                                       const CPUTarget &options);

void populateCombineToCPUPatterns(RewritePatternSet &patterns,
                                  const CPUTarget &options);

void populateContractionToCPUPatterns(RewritePatternSet &patterns,
                                      const CPUTarget &options);

void populateDispatchToCPUPatterns(RewritePatternSet &patterns,
                                   const CPUTarget &options);

void populateDispersionToCPUPatterns(RewritePatternSet &patterns,
                                     const CPUTarget &options);

void populateGroupedLinearToCPUPatterns(RewritePatternSet &patterns,
                                        const CPUTarget &options);

void populateGroupedOuterToCPUPatterns(RewritePatternSet &patterns,
                                       const CPUTarget &options);

void populateQuantizedLinearToCPUPatterns(RewritePatternSet &patterns,
                                          const CPUTarget &options);

void populateRowsToCPUPatterns(RewritePatternSet &patterns,
                               const CPUTarget &options);

void populateSoftmaxMixBackwardSelfToCPUPatterns(RewritePatternSet &patterns,
                                                 const CPUTarget &options);

void populateSoftmaxMixBackwardToCPUPatterns(RewritePatternSet &patterns,
                                             const CPUTarget &options);

void populateSoftmaxMixToCPUPatterns(RewritePatternSet &patterns,
                                     const CPUTarget &options);

void populateSoftmaxMixSelfToCPUPatterns(RewritePatternSet &patterns,
                                         const CPUTarget &options);

void populateTopKBackwardToCPUPatterns(RewritePatternSet &patterns,
                                       const CPUTarget &options);

void populateTopKToCPUPatterns(RewritePatternSet &patterns,
                               const CPUTarget &options);

// What families of kernels say of their ops, beside their patterns.
void addContractionFacts(KernelFacts &facts);
/// Whether a grouped_linear with a weight of codes has a kernel.
bool hasQuantizedKernel(GroupedLinearOp op, int64_t vectorWidth);
void addGroupedLinearFacts(KernelFacts &facts, int64_t vectorWidth);
void addSoftmaxMixFacts(KernelFacts &facts, int64_t tileRows);
void addSoftmaxMixSelfFacts(KernelFacts &facts);
void addTopKFacts(KernelFacts &facts);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PATTERNS_H
