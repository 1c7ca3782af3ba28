//===- JoinRows.cpp - One dim for the rows that a weight serves -----------===//
//
// Matches a contraction of linalg whose kernel takes all rows itself and whose
// rows lie along several dims of both its input and its result:
//
//   y[b, t, n] += x[b, t, k] w[n, k]  ->  y[r, n] += x[r, k] w[n, k]
//
// A kernel that met them as several dims would read the weight anew for each
// row of the outer ones. Reshapes of whole tensors are views. Bits do not
// change.
//
//===----------------------------------------------------------------------===//

#include "MoE/Dialect/MoE/IR/KernelConfig.h"
#include "MoE/Transforms/Passes.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Linalg/IR/LinalgInterfaces.h"
#include "mlir/Dialect/Linalg/Transforms/Transforms.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Dialect/Tensor/Transforms/Transforms.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEJOINROWSPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

bool mlir::moe::canJoinRows(linalg::LinalgOp op) {
  FailureOr<linalg::ContractionDimensions> dims =
      linalg::inferContractionDims(op);
  // A dim that an input reads at one place only, as `x[t, 0, k]`, has no order
  // that could be kept.
  return succeeded(dims) && dims->m.size() > 1 &&
         llvm::all_of(
             op.getIndexingMapsArray(),
             [](AffineMap map) { return map.isProjectedPermutation(); }) &&
         linalg::areDimSequencesPreserved(
             op.getIndexingMapsArray(),
             {ReassociationIndices(dims->m.begin(), dims->m.end())});
}

namespace {
struct JoinRowsOfContraction : OpInterfaceRewritePattern<linalg::LinalgOp> {
  using OpInterfaceRewritePattern::OpInterfaceRewritePattern;

  LogicalResult matchAndRewrite(linalg::LinalgOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureTensorSemantics() || !isLoopOfKernel(op) || !canJoinRows(op))
      return rewriter.notifyMatchFailure(
          op, "expected a contraction on tensors whose kernel takes rows that "
              "lie along several dims");
    FailureOr<linalg::ContractionDimensions> dims =
        linalg::inferContractionDims(op);
    KernelConfigAttr config = getKernelConfig(op);
    FailureOr<linalg::CollapseResult> joined = linalg::collapseOpIterationDims(
        op, {ReassociationIndices(dims->m.begin(), dims->m.end())}, rewriter);
    if (failed(joined))
      return rewriter.notifyMatchFailure(op, "its rows cannot be joined");
    joined->collapsedOp->setAttr(kKernelConfigAttrName, config);
    rewriter.replaceOp(op, joined->results);
    return success();
  }
};

struct JoinRowsPass
    : public mlir::moe::impl::MoEJoinRowsPassBase<JoinRowsPass> {
  using Base::Base;

  void runOnOperation() override {
    RewritePatternSet patterns(&getContext());
    patterns.add<JoinRowsOfContraction>(&getContext());
    linalg::FillOp::getCanonicalizationPatterns(patterns, &getContext());
    tensor::CollapseShapeOp::getCanonicalizationPatterns(patterns,
                                                         &getContext());
    tensor::ExpandShapeOp::getCanonicalizationPatterns(patterns, &getContext());
    tensor::populateFoldTensorEmptyPatterns(patterns);
    if (failed(applyPatternsGreedily(getOperation(), std::move(patterns))))
      signalPassFailure();
  }
};
} // namespace
