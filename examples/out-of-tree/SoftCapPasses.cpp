//===- SoftCapPasses.cpp - Passes on router logits ------------------------===//

#include "SoftCap.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

namespace softcap {
#define GEN_PASS_DEF_INSERTSOFTCAPPASS
#define GEN_PASS_DEF_CONVERTSOFTCAPTOLINALGPASS
#include "SoftCapPasses.h.inc"
} // namespace softcap

using namespace mlir;
using namespace softcap;

namespace {

/// A pattern on an op of moe-mlir.
struct CapLogits : OpRewritePattern<moe::TopKRenormOp> {
  CapLogits(MLIRContext *context, double cap)
      : OpRewritePattern(context), cap(cap) {}

  LogicalResult matchAndRewrite(moe::TopKRenormOp op,
                                PatternRewriter &rewriter) const override {
    if (op.getKind() != moe::ScoreKind::Logits)
      return rewriter.notifyMatchFailure(op, "reads probabilities");
    if (!isa<RankedTensorType>(op.getScores().getType()))
      return rewriter.notifyMatchFailure(op, "reads a buffer");
    if (op.getScores().getDefiningOp<CapOp>())
      return rewriter.notifyMatchFailure(op, "is capped already");
    Value capped = CapOp::create(rewriter, op.getLoc(), op.getScores(),
                                 rewriter.getF32FloatAttr(cap));
    rewriter.modifyOpInPlace(op, [&] { op.getScoresMutable().assign(capped); });
    return success();
  }

private:
  double cap;
};

/// cap * tanh(x / cap), in f32 whatever the type of x.
Value buildCap(OpBuilder &b, Location loc, Value x, FloatAttr cap) {
  Type type = x.getType();
  bool isNarrow = !type.isF32();
  if (isNarrow)
    x = arith::ExtFOp::create(b, loc, b.getF32Type(), x);
  Value limit = arith::ConstantOp::create(b, loc, cap);
  Value ratio = arith::DivFOp::create(b, loc, x, limit);
  Value squashed = math::TanhOp::create(b, loc, ratio);
  Value result = arith::MulFOp::create(b, loc, squashed, limit);
  return isNarrow ? arith::TruncFOp::create(b, loc, type, result) : result;
}

/// The meaning of the op, one element at a time.
struct LowerCap : OpRewritePattern<CapOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(CapOp op,
                                PatternRewriter &rewriter) const override {
    Location loc = op.getLoc();
    auto type = op.getInput().getType();
    Value init = tensor::EmptyOp::create(
        rewriter, loc, tensor::getMixedSizes(rewriter, loc, op.getInput()),
        type.getElementType());
    AffineMap identity = rewriter.getMultiDimIdentityMap(type.getRank());
    SmallVector<utils::IteratorType> loops(type.getRank(),
                                           utils::IteratorType::parallel);
    FloatAttr cap = op.getCapAttr();
    rewriter.replaceOpWithNewOp<linalg::GenericOp>(
        op, type, op.getInput(), init, ArrayRef{identity, identity}, loops,
        [cap](OpBuilder &b, Location loc, ValueRange args) {
          linalg::YieldOp::create(b, loc, buildCap(b, loc, args[0], cap));
        });
    return success();
  }
};

struct InsertSoftCapPass
    : softcap::impl::InsertSoftCapPassBase<InsertSoftCapPass> {
  using InsertSoftCapPassBase::InsertSoftCapPassBase;

  void runOnOperation() override {
    // Else every op that the pattern makes would fail its verifier.
    if (!(cap > 0)) {
      emitError(getOperation()->getLoc())
          << getArgument() << ": expected cap to be positive, found " << cap;
      return signalPassFailure();
    }
    RewritePatternSet patterns(&getContext());
    patterns.add<CapLogits>(&getContext(), cap);
    if (failed(applyPatternsGreedily(getOperation(), std::move(patterns))))
      signalPassFailure();
  }
};

struct ConvertSoftCapToLinalgPass
    : softcap::impl::ConvertSoftCapToLinalgPassBase<
          ConvertSoftCapToLinalgPass> {
  void runOnOperation() override {
    RewritePatternSet patterns(&getContext());
    patterns.add<LowerCap>(&getContext());
    if (failed(applyPatternsGreedily(getOperation(), std::move(patterns))))
      signalPassFailure();
  }
};

} // namespace
