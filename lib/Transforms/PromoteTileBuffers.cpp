//===- PromoteTileBuffers.cpp - Buffers of a tile to the stack ------------===//
//
// Matches memref.alloc inside a scf.forall whose size has a constant bound, as
// the buffers of a tile do: a tile has at most so many rows. The buffer becomes
// a stack buffer of the bound, seen through a view of the size that is used,
// so that a tile allocates nothing. Upstream's promote-buffers-to-stack takes
// static sizes only. Bits do not change.
//
//===----------------------------------------------------------------------===//

#include "MoE/Support/ElementBytes.h"
#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEPROMOTETILEBUFFERSPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// The static shape that every size of `alloc` fits in. Only the outermost dim
/// may vary: the strides of a view must be those of the buffer's own type.
static FailureOr<SmallVector<int64_t>> getBound(memref::AllocOp alloc) {
  MemRefType type = alloc.getType();
  if (!type.getLayout().isIdentity())
    return failure();
  SmallVector<int64_t> shape(type.getShape());
  for (int64_t position = 0; position < type.getRank(); ++position) {
    if (!type.isDynamicDim(position))
      continue;
    if (position != 0)
      return failure();
    FailureOr<int64_t> bound = ValueBoundsConstraintSet::computeConstantBound(
        presburger::BoundType::UB, {alloc.getDynamicSizes().front()},
        /*stopCondition=*/nullptr, /*closedUB=*/true);
    if (failed(bound))
      return failure();
    shape[0] = *bound;
  }
  return shape;
}

/// %b = memref.alloc(%n) : memref<?x16xf32>, %n <= 64
/// becomes, with the first line at the top of the parallel loop's body,
/// %a = memref.alloca() : memref<64x16xf32>
/// %s = memref.subview %a[0, 0] [%n, 16] [1, 1]
/// %b = memref.cast %s : ... to memref<?x16xf32>
static void promote(RewriterBase &rewriter, memref::AllocOp alloc,
                    scf::ForallOp forall, ArrayRef<int64_t> shape) {
  ImplicitLocOpBuilder builder(alloc.getLoc(), rewriter);
  MemRefType type = alloc.getType();
  builder.setInsertionPointToStart(forall.getBody());
  Value buffer = memref::AllocaOp::create(
      builder, MemRefType::get(shape, type.getElementType()), ValueRange(),
      builder.getI64IntegerAttr(64));
  builder.setInsertionPoint(alloc);
  if (!type.hasStaticShape()) {
    SmallVector<OpFoldResult> offsets(type.getRank(), builder.getIndexAttr(0));
    SmallVector<OpFoldResult> strides(type.getRank(), builder.getIndexAttr(1));
    buffer = memref::SubViewOp::create(builder, buffer, offsets,
                                       alloc.getMixedSizes(), strides);
    buffer = memref::CastOp::create(builder, type, buffer);
  }
  rewriter.replaceOp(alloc, buffer);
}

namespace {
struct PromoteTileBuffersPass
    : mlir::moe::impl::MoEPromoteTileBuffersPassBase<PromoteTileBuffersPass> {
  using Base::Base;

  void runOnOperation() override {
    SmallVector<memref::AllocOp> allocs;
    getOperation().walk(
        [&](memref::AllocOp alloc) { allocs.push_back(alloc); });
    IRRewriter rewriter(&getContext());
    for (memref::AllocOp alloc : allocs) {
      auto forall = alloc->getParentOfType<scf::ForallOp>();
      if (!forall)
        continue;
      FailureOr<SmallVector<int64_t>> shape = getBound(alloc);
      if (failed(shape) || getBytes(alloc.getType(), *shape) > maxBytes)
        continue;
      promote(rewriter, alloc, forall, *shape);
      ++numPromoted;
    }
  }

private:
  static int64_t getBytes(MemRefType type, ArrayRef<int64_t> shape) {
    int64_t bytes = getElementBytes(type.getElementType());
    for (int64_t size : shape)
      bytes *= size;
    return bytes;
  }
};
} // namespace
