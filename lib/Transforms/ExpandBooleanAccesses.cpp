//===- ExpandBooleanAccesses.cpp - Read and write i1 through vectors ------===//
//
// Rewrites loads and stores of single booleans as vectors of one:
//
//   %b = memref.load %m[%i] : memref<?xi1>
//   ->
//   %v = vector.load %m[%i] : memref<?xi1>, vector<1xi1>
//   %b = vector.extract %v[0] : i1 from vector<1xi1>
//
// Why it is needed: the conversion of memref.load and memref.store to LLVM
// asserts that integers have at least 8 bits, so that with a toolchain that has
// assertions any mask ends the compiler. Why not the upstream emulation of
// narrow types: it packs eight booleans into a byte, while callers pass one
// byte each. Why it is safe: LLVM loads a vector of one i1 from bit 0 of its
// byte and stores a byte of 0 or 1, and a boolean of the caller is one of
// these.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/Transforms/WalkPatternRewriteDriver.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEEXPANDBOOLEANACCESSESPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;

/// A vector of one element with a dim for each that `memref` allows: vector
/// accesses have no more dims than their buffer.
static VectorType getVectorOfOne(Value memref) {
  auto type = cast<MemRefType>(memref.getType());
  SmallVector<int64_t> sizes(std::min<int64_t>(type.getRank(), 1), 1);
  return VectorType::get(sizes, type.getElementType());
}

namespace {
struct ExpandLoad : OpRewritePattern<memref::LoadOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(memref::LoadOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.getType().isInteger(1))
      return rewriter.notifyMatchFailure(op, "not a boolean");
    Value vector = vector::LoadOp::create(rewriter, op.getLoc(),
                                          getVectorOfOne(op.getMemRef()),
                                          op.getMemRef(), op.getIndices());
    SmallVector<int64_t> first(cast<VectorType>(vector.getType()).getRank(), 0);
    rewriter.replaceOpWithNewOp<vector::ExtractOp>(op, vector, first);
    return success();
  }
};

struct ExpandStore : OpRewritePattern<memref::StoreOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(memref::StoreOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.getValue().getType().isInteger(1))
      return rewriter.notifyMatchFailure(op, "not a boolean");
    Value vector = vector::BroadcastOp::create(
        rewriter, op.getLoc(), getVectorOfOne(op.getMemRef()), op.getValue());
    rewriter.replaceOpWithNewOp<vector::StoreOp>(op, vector, op.getMemRef(),
                                                 op.getIndices());
    return success();
  }
};

struct MoEExpandBooleanAccessesPass
    : public mlir::moe::impl::MoEExpandBooleanAccessesPassBase<
          MoEExpandBooleanAccessesPass> {
  using Base::Base;

  void runOnOperation() override {
    RewritePatternSet patterns(&getContext());
    patterns.add<ExpandLoad, ExpandStore>(&getContext());
    walkAndApplyPatterns(getOperation(), std::move(patterns));
  }
};
} // namespace
