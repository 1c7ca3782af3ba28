//===- ConcatenateInPlace.cpp - Leave a part where it is ------------------===//
//
// Matches a concatenation whose part is a slice that would be put where it
// comes from, in a tensor of the same shape:
//
//   %a = tensor.extract_slice %x[0, 0] [%n, 448] : tensor<?x512xf32>
//   %y = tensor.insert_slice %a into %empty[0, 0] [%n, 448]
//   %z = tensor.insert_slice %b into %y[0, 448] [%n, 64]
//
// `%x` takes the place of `%y`, which has the same elements and others that
// nobody reads. The part is not copied, and `%z` has the memory of `%x` where
// nothing else reads it later: a rotary embedding of a part of each head.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/Interfaces/DestinationStyleOpInterface.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOECONCATENATEINPLACEPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;

static bool haveEqualShapes(Value a, Value b) {
  auto type = cast<RankedTensorType>(a.getType());
  if (type != b.getType())
    return false;
  return llvm::all_of(llvm::seq(type.getRank()), [&](int64_t dim) {
    if (!type.isDynamicDim(dim))
      return true;
    FailureOr<bool> equal =
        ValueBoundsConstraintSet::areEqual({a, dim}, {b, dim});
    return succeeded(equal) && *equal;
  });
}

/// What may take the place of `op`; null if nothing does.
static Value getWhole(tensor::InsertSliceOp op) {
  auto slice = op.getSource().getDefiningOp<tensor::ExtractSliceOp>();
  if (!slice || !op.getDest().getDefiningOp<tensor::EmptyOp>())
    return nullptr;
  Value whole = slice.getSource();
  // An argument is not written.
  bool isComputed = whole.getDefiningOp<DestinationStyleOpInterface>() ||
                    whole.getDefiningOp<tensor::InsertSliceOp>();
  return isComputed && slice.getMixedOffsets() == op.getMixedOffsets() &&
                 slice.getMixedSizes() == op.getMixedSizes() &&
                 slice.getMixedStrides() == op.getMixedStrides() &&
                 haveEqualShapes(whole, op.getDest())
             ? whole
             : nullptr;
}

namespace {
struct ConcatenateInPlacePass
    : public mlir::moe::impl::MoEConcatenateInPlacePassBase<
          ConcatenateInPlacePass> {
  using Base::Base;

  void runOnOperation() override {
    IRRewriter rewriter(&getContext());
    getOperation().walk([&](tensor::InsertSliceOp op) {
      if (Value whole = getWhole(op))
        rewriter.replaceOp(op, whole);
    });
  }
};
} // namespace
