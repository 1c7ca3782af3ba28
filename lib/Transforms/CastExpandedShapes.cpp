//===- CastExpandedShapes.cpp - Shapes of several unknown sizes as casts --===//
//
// Matches an expanded shape with two dynamic sizes in one group, as rows that
// were joined for a product have behind it:
//
//   memref.expand_shape %a [[0, 1], [2]] output_shape [%b, %n, 64]
//       : memref<?x64xf32> into memref<?x?x64xf32>
//
// becomes memref.reinterpret_cast. The upstream lowering computes the dynamic
// size of a group from its static ones, and has an assertion that there is one.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOECASTEXPANDEDSHAPESPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

SmallVector<OpFoldResult>
mlir::moe::getContiguousStrides(ImplicitLocOpBuilder &b,
                                ArrayRef<OpFoldResult> sizes) {
  SmallVector<OpFoldResult> strides(sizes.size());
  OpFoldResult stride = b.getIndexAttr(1);
  AffineExpr lhs, rhs;
  bindSymbols(b.getContext(), lhs, rhs);
  for (int64_t dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride = affine::makeComposedFoldedAffineApply(b, b.getLoc(), lhs * rhs,
                                                   {stride, sizes[dim]});
  }
  return strides;
}

static bool hasSeveralDynamicSizes(memref::ExpandShapeOp op) {
  ArrayRef<int64_t> shape = op.getResultType().getShape();
  return llvm::any_of(op.getReassociationIndices(),
                      [&](const ReassociationIndices &group) {
                        return llvm::count_if(group, [&](int64_t dim) {
                                 return ShapedType::isDynamic(shape[dim]);
                               }) > 1;
                      });
}

namespace {
struct CastExpandedShapesPass
    : public mlir::moe::impl::MoECastExpandedShapesPassBase<
          CastExpandedShapesPass> {
  using Base::Base;

  void runOnOperation() override {
    getOperation()->walk([](memref::ExpandShapeOp op) {
      if (!hasSeveralDynamicSizes(op) ||
          !op.getSrcType().getLayout().isIdentity() ||
          !op.getResultType().getLayout().isIdentity())
        return;
      ImplicitLocOpBuilder b(op.getLoc(), op);
      SmallVector<OpFoldResult> sizes = op.getMixedOutputShape();
      Value cast = memref::ReinterpretCastOp::create(
          b, op.getResultType(), op.getSrc(), b.getIndexAttr(0), sizes,
          getContiguousStrides(b, sizes));
      op.replaceAllUsesWith(cast);
      op.erase();
    });
  }
};
} // namespace
