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

#include "mlir/Dialect/AMX/AMXDialect.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/Transforms/WalkPatternRewriteDriver.h"

namespace mlir::moe {
#define GEN_PASS_DEF_CONVERTMOETOCPUPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

void mlir::moe::populateMoEToCPUPatterns(RewritePatternSet &patterns,
                                         const CPUTarget &options) {
  populateCoSelectionsToCPUPatterns(patterns, options);
  populateCombineToCPUPatterns(patterns, options);
  populateContractionToCPUPatterns(patterns, options);
  populateDispatchToCPUPatterns(patterns, options);
  populateDispersionToCPUPatterns(patterns, options);
  populateGroupedLinearToCPUPatterns(patterns, options);
  populateQuantizedLinearToCPUPatterns(patterns, options);
  populateGroupedOuterToCPUPatterns(patterns, options);
  populateRowsToCPUPatterns(patterns, options);
  populateSoftmaxMixBackwardSelfToCPUPatterns(patterns, options);
  populateSoftmaxMixBackwardToCPUPatterns(patterns, options);
  populateSoftmaxMixSelfToCPUPatterns(patterns, options);
  populateSoftmaxMixToCPUPatterns(patterns, options);
  populateTopKBackwardToCPUPatterns(patterns, options);
  populateTopKToCPUPatterns(patterns, options);
}

KernelFacts mlir::moe::getCPUKernelFacts(MLIRContext *context, int64_t tileRows,
                                         int64_t vectorWidth) {
  KernelFacts facts;
  RewritePatternSet kernels(context);
  populateMoEToCPUPatterns(kernels, CPUTarget());
  facts.addKernels(kernels);
  addContractionFacts(facts);
  addGroupedLinearFacts(facts, vectorWidth);
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
    CPUTarget target{vectorWidth,    vectorRegisters,  bf16Dot,
                     bf16Tiles,      int8Dot,          bytePairs,
                     byteTable,      streamPrefetcher, l2Bytes,
                     productVectors, productRows,      productPanels,
                     expertRows,     mixQueries,       fetchBytes};
    if (llvm::Error error = target.verify()) {
      getOperation()->emitError() << llvm::toString(std::move(error));
      return signalPassFailure();
    }
    RewritePatternSet patterns(&getContext());
    populateMoEToCPUPatterns(patterns, target);
    // One walk: no pattern makes work for another, and the greedy driver's
    // folding would visit all the code that the patterns wrote.
    walkAndApplyPatterns(getOperation(), std::move(patterns));
    if (failed(verifyNoMoEOpIsLeft()))
      signalPassFailure();
  }

private:
  LogicalResult verifyNoMoEOpIsLeft() {
    WalkResult result = getOperation()->walk([](Operation *op) {
      if (!isa<MoEStructuredOpInterface>(op))
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
