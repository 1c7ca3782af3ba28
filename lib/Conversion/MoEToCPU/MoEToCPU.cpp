//===- MoEToCPU.cpp - Leaf ops on buffers to vector code ------------------===//
//
// The pass only gathers the families of patterns and checks that no moe op is
// left. What each family does is said at the head of its file.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/MoEToCPU.h"
#include "MoE/Conversion/Passes.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "Patterns.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/Transforms/WalkPatternRewriteDriver.h"
#include "llvm/Support/MathExtras.h"

namespace mlir::moe {
#define GEN_PASS_DEF_CONVERTMOETOCPUPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

void mlir::moe::populateMoEToCPUPatterns(RewritePatternSet &patterns,
                                         const CPUVectorOptions &options) {
  populateCoSelectionsToCPUPatterns(patterns, options);
  populateCombineToCPUPatterns(patterns, options);
  populateContractionToCPUPatterns(patterns, options);
  populateDispatchToCPUPatterns(patterns, options);
  populateDispersionToCPUPatterns(patterns, options);
  populateGroupedLinearToCPUPatterns(patterns, options);
  populateGroupedOuterToCPUPatterns(patterns, options);
  populateRowsToCPUPatterns(patterns, options);
  populateSoftmaxMixBackwardSelfToCPUPatterns(patterns, options);
  populateSoftmaxMixBackwardToCPUPatterns(patterns, options);
  populateSoftmaxMixSelfToCPUPatterns(patterns, options);
  populateSoftmaxMixToCPUPatterns(patterns, options);
  populateTopKBackwardToCPUPatterns(patterns, options);
  populateTopKToCPUPatterns(patterns, options);
}

KernelFacts mlir::moe::getCPUKernelFacts(MLIRContext *context,
                                         int64_t tileRows) {
  KernelFacts facts;
  RewritePatternSet kernels(context);
  populateMoEToCPUPatterns(kernels, CPUVectorOptions());
  facts.addKernels(kernels);
  addContractionFacts(facts);
  addGroupedLinearFacts(facts);
  addSoftmaxMixFacts(facts, tileRows);
  addSoftmaxMixSelfFacts(facts);
  addTopKFacts(facts);
  return facts;
}

namespace {
struct ConvertMoEToCPUPass
    : mlir::moe::impl::ConvertMoEToCPUPassBase<ConvertMoEToCPUPass> {
  using Base::Base;

  void runOnOperation() override {
    if (vectorWidth < 4 || !llvm::isPowerOf2_64(vectorWidth)) {
      getOperation()->emitError()
          << "expected 'vector-width' to be a power of two of at least 4, "
             "found "
          << vectorWidth;
      return signalPassFailure();
    }
    if (bf16Dot && vectorWidth != 16) {
      getOperation()->emitError()
          << "expected 'vector-width' to be 16 with 'bf16-dot', found "
          << vectorWidth;
      return signalPassFailure();
    }
    RewritePatternSet patterns(&getContext());
    populateMoEToCPUPatterns(
        patterns, CPUVectorOptions{vectorWidth, vectorRegisters, bf16Dot});
    // One walk: no pattern makes work for another, and the greedy driver's
    // folding would visit all the code that the patterns wrote.
    walkAndApplyPatterns(getOperation(), std::move(patterns));
    if (failed(verifyNoMoEOpIsLeft()))
      signalPassFailure();
  }

private:
  LogicalResult verifyNoMoEOpIsLeft() {
    WalkResult result = getOperation()->walk([](Operation *op) {
      if (!isa_and_nonnull<MoEDialect>(op->getDialect()))
        return WalkResult::advance();
      op->emitOpError("expected buffers with contiguous rows and a static k; "
                      "bufferize first, and run moe-decompose for ops without "
                      "a lowering of their own");
      return WalkResult::interrupt();
    });
    return failure(result.wasInterrupted());
  }
};
} // namespace
