//===- DecomposeForGPU.cpp - Decompose the ops without a GPU kernel -------===//
//
// Which ops have a kernel is read off the patterns of convert-moe-to-gpu and of
// moe-distribute-to-grid, and which forms of them off the kernels' facts. What
// the other ops decompose into is fused where that saves a buffer without
// repeating expensive work: a kernel pays for a buffer with workgroup memory,
// and a grid with a launch.
//
//===----------------------------------------------------------------------===//

#include "ThreadLowerings.h"

#include "MoE/Conversion/Passes.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/IR/MoEStructured.h"
#include "MoE/Transforms/Passes.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Linalg/IR/LinalgInterfaces.h"
#include "mlir/Dialect/Linalg/Transforms/Transforms.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/Remarks.h"
#include "mlir/Pass/PassManager.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEDECOMPOSEFORGPUPASS
#define GEN_PASS_DEF_MOEDECOMPOSEFORGRIDSPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

#define DEBUG_TYPE "moe-decompose-for-gpu"

/// Whether a tile of rows of `op` spans another dim of unknown size.
static bool hasUnboundedTile(MoEStructuredOpInterface op) {
  SmallVector<unsigned> rows =
      getRowDims(cast<TilingInterface>(op.getOperation()));
  if (rows.empty())
    return false;
  for (unsigned dim = 0, e = op.getDims().size(); dim < e; ++dim)
    if (!llvm::is_contained(rows, dim) && succeeded(findDim(op, dim)) &&
        ShapedType::isDynamic(getStaticDimSize(op, dim)))
      return true;
  return false;
}

namespace {
struct MoEDecomposeForGridsPass
    : public mlir::moe::impl::MoEDecomposeForGridsPassBase<
          MoEDecomposeForGridsPass> {
  using Base::Base;

  void runOnOperation() override {
    decomposeIf(getOperation(), [](linalg::AggregatedOpInterface op) {
      return isa<linalg::LinalgDialect>(op->getDialect());
    });
    KernelFacts facts = getGPUKernelFacts(getOperation());
    decomposeIf(getOperation(), [&](linalg::AggregatedOpInterface op) {
      auto structured = dyn_cast<MoEStructuredOpInterface>(op.getOperation());
      return structured && !facts.hasKernel(op) && hasUnboundedTile(structured);
    });
  }
};
} // namespace

/// Whether the body of `op` takes a few instructions only.
static bool isCheap(linalg::LinalgOp op) {
  return llvm::none_of(*op.getBlock(), [](Operation &nested) {
    return isa<math::MathDialect>(nested.getDialect()) ||
           isa<arith::DivFOp, arith::DivSIOp, arith::DivUIOp>(nested);
  });
}

/// Whether computing the producer of `operand` inside of its consumer costs
/// nothing: it has no other user, and it is cheap or used once.
static bool isWorthFusing(OpOperand *operand) {
  auto producer = operand->get().getDefiningOp<linalg::LinalgOp>();
  auto consumer = dyn_cast<linalg::LinalgOp>(operand->getOwner());
  if (!producer || !consumer || !producer->hasOneUse())
    return false;
  return isCheap(producer) || consumer.getNumLoops() == producer.getNumLoops();
}

namespace {
struct MoEDecomposeForGPUPass
    : public mlir::moe::impl::MoEDecomposeForGPUPassBase<
          MoEDecomposeForGPUPass> {
  using Base::Base;

  LogicalResult initialize(MLIRContext *context) override {
    RewritePatternSet kernels(context);
    populateToThreadsPatterns(kernels, BlockShape());
    populateToGridPatterns(kernels, BlockShape());
    MoEDecomposePassOptions options;
    options.ops = getOpsWithoutKernel(context, kernels);
    pipeline = OpPassManager(
        getOpName().value_or(OpPassManager::getAnyOpAnchorName()));
    // An empty list would mean every op.
    if (!options.ops.empty())
      pipeline.addPass(createMoEDecomposePass(options));

    RewritePatternSet patterns(context);
    linalg::populateElementwiseOpsFusionPatterns(patterns, isWorthFusing);
    fusion = std::move(patterns);
    return success();
  }

  void runOnOperation() override {
    // Forms first: what they consist of may have no kernel either.
    decomposeFormsWithoutKernel(
        getOperation(), getGPUKernelFacts(getOperation()),
        remark::RemarkOpts::name("DecomposeForGPU").category(DEBUG_TYPE));
    if (failed(runPipeline(pipeline, getOperation())))
      return signalPassFailure();
    if (failed(applyPatternsGreedily(getOperation(), fusion)))
      signalPassFailure();
  }

private:
  OpPassManager pipeline;
  FrozenRewritePatternSet fusion;
};
} // namespace
