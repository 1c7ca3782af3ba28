//===- ApproximateMath.cpp - Transcendental functions as polynomials ------===//
//
// Applies upstream's polynomial approximations. Bits change: see the pass's
// description.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Math/Transforms/Passes.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEAPPROXIMATEMATHPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

namespace {
struct ApproximateMathPass
    : mlir::moe::impl::MoEApproximateMathPassBase<ApproximateMathPass> {
  using Base::Base;

  void runOnOperation() override {
    RewritePatternSet patterns(&getContext());
    auto isTranscendental = [](StringRef name) {
      return !llvm::is_contained(
          {math::AbsFOp::getOperationName(), math::FmaOp::getOperationName(),
           math::SqrtOp::getOperationName(), math::FloorOp::getOperationName(),
           math::CeilOp::getOperationName(), math::RoundOp::getOperationName(),
           math::RoundEvenOp::getOperationName(),
           math::TruncOp::getOperationName(),
           math::RsqrtOp::getOperationName()},
          name);
    };
    populateMathF32ExpansionPatterns(patterns, isTranscendental);
    populateMathPolynomialApproximationPatterns(patterns, isTranscendental);
    if (failed(applyPatternsGreedily(getOperation(), std::move(patterns))))
      signalPassFailure();
  }
};
} // namespace
