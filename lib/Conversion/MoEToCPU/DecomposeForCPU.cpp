//===- DecomposeForCPU.cpp - Decompose the ops without a CPU kernel -------===//
//
// Which ops have a kernel is read off the patterns of convert-moe-to-cpu, so
// an op that gains one or has none needs no entry anywhere.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/MoEToCPU.h"
#include "MoE/Conversion/Passes.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Transforms/KernelFacts.h"
#include "MoE/Transforms/Passes.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Pass/PassManager.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEDECOMPOSEFORCPUPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

#define DEBUG_TYPE "moe-decompose-for-cpu"

namespace {
struct MoEDecomposeForCPUPass
    : mlir::moe::impl::MoEDecomposeForCPUPassBase<MoEDecomposeForCPUPass> {
  using Base::Base;

  LogicalResult initialize(MLIRContext *context) override {
    RewritePatternSet kernels(context);
    populateMoEToCPUPatterns(kernels, CPUTarget());
    MoEDecomposePassOptions options;
    options.ops = getOpsWithoutKernel(context, kernels);
    pipeline = OpPassManager(
        getOpName().value_or(OpPassManager::getAnyOpAnchorName()));
    // An empty list would mean every op.
    if (!options.ops.empty())
      pipeline.addPass(createMoEDecomposePass(options));
    return success();
  }

  void runOnOperation() override {
    decomposeFormsWithoutKernel(
        getOperation(),
        getCPUKernelFacts(&getContext(), /*tileRows=*/0, vectorWidth),
        remark::RemarkOpts::name("DecomposeForCPU").category(DEBUG_TYPE));
    if (failed(runPipeline(pipeline, getOperation())))
      signalPassFailure();
  }

private:
  OpPassManager pipeline;
};
} // namespace
