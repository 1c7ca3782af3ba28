//===- StoreBoolsAsBytes.cpp - Stores of i1 as stores of bytes ------------===//
//
// Matches memref.store of an i1 and stores the byte 0 or 1 instead.
//
// Why it is needed: in LLVM 22.1.8 with assertions finalize-memref-to-llvm
// aborts on a store of an i1.
// Why not upstream's emulate-narrow-type: it packs eight elements in a byte,
// and callers pass one element a byte, as torch.bool and numpy.bool_ do.
// Why it is safe: an i1 element occupies one byte in the LLVM dialect's
// layout, and loads of it read that byte. Bits do not change.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/Transforms/WalkPatternRewriteDriver.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOESTOREBOOLSASBYTESPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

namespace {
/// memref.store %v, %m[%i] : memref<?xi1>
/// becomes a llvm.store of `extui %v : i8` at base + offset + i * stride.
struct StoreByte : OpRewritePattern<memref::StoreOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(memref::StoreOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.getMemRefType().getElementType().isInteger(1))
      return rewriter.notifyMatchFailure(op, "expected elements of type i1");
    ImplicitLocOpBuilder builder(op.getLoc(), rewriter);
    auto layout = memref::ExtractStridedMetadataOp::create(builder,
                                                           op.getMemref());
    Value address = arith::AddIOp::create(
        builder,
        memref::ExtractAlignedPointerAsIndexOp::create(builder,
                                                       op.getMemref()),
        layout.getOffset());
    for (auto [index, stride] :
         llvm::zip_equal(op.getIndices(), layout.getStrides()))
      address = arith::AddIOp::create(
          builder, address, arith::MulIOp::create(builder, index, stride));
    Value pointer = LLVM::IntToPtrOp::create(
        builder, LLVM::LLVMPointerType::get(getContext()),
        arith::IndexCastOp::create(builder, builder.getI64Type(), address));
    Value byte = arith::ExtUIOp::create(builder, builder.getI8Type(),
                                        op.getValueToStore());
    LLVM::StoreOp::create(builder, byte, pointer);
    rewriter.eraseOp(op);
    return success();
  }
};

struct StoreBoolsAsBytesPass
    : mlir::moe::impl::MoEStoreBoolsAsBytesPassBase<StoreBoolsAsBytesPass> {
  using Base::Base;

  void runOnOperation() override {
    RewritePatternSet patterns(&getContext());
    patterns.add<StoreByte>(&getContext());
    walkAndApplyPatterns(getOperation(), std::move(patterns));
  }
};
} // namespace
