//===- AccessBoolsAsBytes.cpp - Loads and stores of i1 as bytes -----------===//
//
// Matches memref.load and memref.store of an i1 and accesses its byte instead.
//
// Why it is needed: in LLVM 22.1.8 with assertions finalize-memref-to-llvm
// aborts on a load or store of an i1.
// Why not upstream's emulate-narrow-type: it packs eight elements in a byte,
// and callers pass one element a byte, as torch.bool and numpy.bool_ do.
// Why it is safe: an i1 element occupies one byte in the LLVM dialect's
// layout, so addresses stay what they were. A byte other than 0 is true.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/Transforms/WalkPatternRewriteDriver.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEACCESSBOOLSASBYTESPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// base + offset + sum of index * stride, in bytes, as a pointer.
static Value getAddress(ImplicitLocOpBuilder &builder, Value memref,
                        ValueRange indices) {
  auto layout = memref::ExtractStridedMetadataOp::create(builder, memref);
  Value base = memref::ExtractAlignedPointerAsIndexOp::create(builder, memref);
  Value address = arith::AddIOp::create(builder, base, layout.getOffset());
  for (auto [index, stride] : llvm::zip_equal(indices, layout.getStrides())) {
    Value step = arith::MulIOp::create(builder, index, stride);
    address = arith::AddIOp::create(builder, address, step);
  }
  Value integer =
      arith::IndexCastOp::create(builder, builder.getI64Type(), address);
  return LLVM::IntToPtrOp::create(
      builder, LLVM::LLVMPointerType::get(builder.getContext()), integer);
}

static bool holdsBools(MemRefType type) {
  return type.getElementType().isInteger(1);
}

namespace {
/// %v = memref.load %m[%i] : memref<?xi1>
/// becomes %byte = llvm.load, %v = arith.cmpi ne, %byte, 0.
struct LoadByte : OpRewritePattern<memref::LoadOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(memref::LoadOp op,
                                PatternRewriter &rewriter) const override {
    if (!holdsBools(op.getMemRefType()))
      return rewriter.notifyMatchFailure(op, "expected elements of type i1");
    ImplicitLocOpBuilder builder(op.getLoc(), rewriter);
    Value address = getAddress(builder, op.getMemref(), op.getIndices());
    Value byte = LLVM::LoadOp::create(builder, builder.getI8Type(), address);
    Value zero = arith::ConstantIntOp::create(builder, builder.getI8Type(), 0);
    rewriter.replaceOpWithNewOp<arith::CmpIOp>(op, arith::CmpIPredicate::ne,
                                               byte, zero);
    return success();
  }
};

/// memref.store %v, %m[%i] : memref<?xi1>
/// becomes a llvm.store of `extui %v : i8`.
struct StoreByte : OpRewritePattern<memref::StoreOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(memref::StoreOp op,
                                PatternRewriter &rewriter) const override {
    if (!holdsBools(op.getMemRefType()))
      return rewriter.notifyMatchFailure(op, "expected elements of type i1");
    ImplicitLocOpBuilder builder(op.getLoc(), rewriter);
    Value address = getAddress(builder, op.getMemref(), op.getIndices());
    Value byte = arith::ExtUIOp::create(builder, builder.getI8Type(),
                                        op.getValueToStore());
    LLVM::StoreOp::create(builder, byte, address);
    rewriter.eraseOp(op);
    return success();
  }
};

struct AccessBoolsAsBytesPass
    : mlir::moe::impl::MoEAccessBoolsAsBytesPassBase<AccessBoolsAsBytesPass> {
  using Base::Base;

  void runOnOperation() override {
    RewritePatternSet patterns(&getContext());
    patterns.add<LoadByte, StoreByte>(&getContext());
    walkAndApplyPatterns(getOperation(), std::move(patterns));
  }
};
} // namespace
