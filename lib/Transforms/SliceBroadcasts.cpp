//===- SliceBroadcasts.cpp - Read what is broadcast in tiles --------------===//

#include "SliceBroadcasts.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
/// A slice of what a linalg.generic repeats, by the loops of that.
struct BroadcastSlice {
  linalg::GenericOp broadcast;
  SmallVector<OpFoldResult> offsets, sizes;
};
} // namespace

/// Whether `op` only repeats its one input, whose dims stay in their order, and
/// checks nothing.
static bool isBroadcast(linalg::GenericOp op) {
  if (op.getNumDpsInputs() != 1 || op.getNumDpsInits() != 1 ||
      op.getNumLoops() != op.getNumParallelLoops() ||
      !op.hasPureTensorSemantics() ||
      !op.getMatchingIndexingMap(op.getDpsInitOperand(0)).isIdentity())
    return false;
  Block *body = op.getBody();
  AffineMap map = op.getMatchingIndexingMap(op.getDpsInputOperand(0));
  SmallVector<unsigned> dims;
  for (AffineExpr expr : map.getResults())
    if (auto dim = dyn_cast<AffineDimExpr>(expr))
      dims.push_back(dim.getPosition());
  return body->without_terminator().empty() &&
         body->getTerminator()->getOperand(0) == body->getArgument(0) &&
         map.isProjectedPermutation(/*allowZeroInResults=*/true) &&
         llvm::is_sorted(dims);
}

/// The offsets along dims of these sizes whose collapsed dim has `offset`;
/// nothing where a size that tells is not known.
static LogicalResult delinearize(OpBuilder &builder, Location loc,
                                 OpFoldResult offset, ArrayRef<int64_t> sizes,
                                 SmallVector<OpFoldResult> &offsets) {
  if (llvm::any_of(sizes.drop_front(), ShapedType::isDynamic))
    return failure();
  int64_t inner = 1;
  for (int64_t size : sizes.drop_front())
    inner *= size;
  AffineExpr position = builder.getAffineSymbolExpr(0);
  for (auto [number, size] : llvm::enumerate(sizes)) {
    if (number > 0)
      inner /= size;
    AffineExpr own = position.floorDiv(inner);
    if (number > 0)
      own = own % size;
    offsets.push_back(affine::makeComposedFoldedAffineApply(
        builder, loc, AffineMap::get(0, 1, own), {offset}));
  }
  return success();
}

/// Offsets and sizes in front of `collapse` of a slice that has one of each dim
/// that was collapsed.
static LogicalResult expandSlice(OpBuilder &builder,
                                 tensor::CollapseShapeOp collapse,
                                 BroadcastSlice &slice) {
  SmallVector<OpFoldResult> offsets, sizes;
  for (auto [group, offset, size] : llvm::zip_equal(
           collapse.getReassociationIndices(), slice.offsets, slice.sizes)) {
    if (group.size() == 1) {
      offsets.push_back(offset);
      sizes.push_back(size);
      continue;
    }
    ArrayRef<int64_t> shape =
        collapse.getSrcType().getShape().slice(group.front(), group.size());
    if (!isOneInteger(size) ||
        failed(delinearize(builder, collapse.getLoc(), offset, shape, offsets)))
      return failure();
    sizes.append(group.size(), builder.getIndexAttr(1));
  }
  slice.offsets = offsets;
  slice.sizes = sizes;
  return success();
}

/// What `op` is a slice of, if that is a broadcast.
static FailureOr<BroadcastSlice> matchSlice(OpBuilder &builder,
                                            tensor::ExtractSliceOp op) {
  Value source = op.getSource();
  auto collapse = source.getDefiningOp<tensor::CollapseShapeOp>();
  if (collapse)
    source = collapse.getSrc();
  auto broadcast = source.getDefiningOp<linalg::GenericOp>();
  if (!broadcast || !isBroadcast(broadcast) || !op.hasUnitStride())
    return failure();
  BroadcastSlice slice{broadcast, op.getMixedOffsets(), op.getMixedSizes()};
  if (collapse && failed(expandSlice(builder, collapse, slice)))
    return failure();
  // One along each dim that the input lacks.
  AffineMap map =
      broadcast.getMatchingIndexingMap(broadcast.getDpsInputOperand(0));
  for (auto [dim, size] : llvm::enumerate(slice.sizes))
    if (!map.isFunctionOfDim(dim) && !isOneInteger(size))
      return failure();
  return slice;
}

/// The same slice, taken of the input; null if its shape would be another one.
static Value sliceInput(OpBuilder &builder, Location loc,
                        const BroadcastSlice &slice, RankedTensorType type) {
  linalg::GenericOp broadcast = slice.broadcast;
  OpOperand *input = broadcast.getDpsInputOperand(0);
  SmallVector<OpFoldResult> offsets, sizes;
  for (AffineExpr expr : broadcast.getMatchingIndexingMap(input).getResults()) {
    auto dim = dyn_cast<AffineDimExpr>(expr);
    offsets.push_back(dim ? slice.offsets[dim.getPosition()]
                          : OpFoldResult(builder.getIndexAttr(0)));
    sizes.push_back(dim ? slice.sizes[dim.getPosition()]
                        : OpFoldResult(builder.getIndexAttr(1)));
  }
  auto source = cast<RankedTensorType>(input->get().getType());
  RankedTensorType whole =
      tensor::ExtractSliceOp::inferResultType(source, sizes);
  if (isRankReducedType(whole, type) != SliceVerificationResult::Success)
    return nullptr;
  SmallVector<OpFoldResult> strides(offsets.size(), builder.getIndexAttr(1));
  return tensor::ExtractSliceOp::create(builder, loc, type, input->get(),
                                        offsets, sizes, strides);
}

/// Asks the destination of a broadcast for the sizes that its loop asks of it,
/// in front of the broadcast.
static void takeSizesOfInit(RewriterBase &rewriter,
                            linalg::GenericOp broadcast) {
  Value init = broadcast.getDpsInitOperand(0)->get();
  auto replace = [&](tensor::DimOp dim, int64_t position) {
    rewriter.setInsertionPoint(broadcast);
    rewriter.replaceOp(
        dim, tensor::DimOp::create(rewriter, dim.getLoc(), init, position));
  };
  for (Operation *user : llvm::make_early_inc_range(broadcast->getUsers())) {
    if (auto dim = dyn_cast<tensor::DimOp>(user))
      if (std::optional<int64_t> position = dim.getConstantIndex())
        replace(dim, *position);
    auto collapse = dyn_cast<tensor::CollapseShapeOp>(user);
    if (!collapse)
      continue;
    auto groups = collapse.getReassociationIndices();
    for (Operation *other : llvm::make_early_inc_range(collapse->getUsers())) {
      auto dim = dyn_cast<tensor::DimOp>(other);
      std::optional<int64_t> position;
      if (dim)
        position = dim.getConstantIndex();
      if (position && groups[*position].size() == 1)
        replace(dim, groups[*position].front());
    }
  }
}

SmallVector<Operation *> mlir::moe::sliceBroadcasts(RewriterBase &rewriter,
                                                    scf::ForallOp loop) {
  llvm::SetVector<linalg::GenericOp> broadcasts;
  for (auto op : llvm::make_early_inc_range(
           loop.getBody()->getOps<tensor::ExtractSliceOp>())) {
    rewriter.setInsertionPoint(op);
    FailureOr<BroadcastSlice> slice = matchSlice(rewriter, op);
    if (failed(slice))
      continue;
    if (Value input = sliceInput(rewriter, op.getLoc(), *slice, op.getType())) {
      broadcasts.insert(slice->broadcast);
      rewriter.replaceOp(op, input);
    }
  }
  SmallVector<Operation *> erased;
  for (linalg::GenericOp broadcast : broadcasts) {
    takeSizesOfInit(rewriter, broadcast);
    for (Operation *user : llvm::make_early_inc_range(broadcast->getUsers()))
      if (isOpTriviallyDead(user))
        rewriter.eraseOp(user);
    if (!broadcast->use_empty())
      continue;
    erased.push_back(broadcast);
    rewriter.eraseOp(broadcast);
  }
  return erased;
}
