//===- PropagateReshapes.cpp - Work on rows before they are joined --------===//
//
// Matches an op of the moe dialect with free leading dims whose operand was
// joined from more dims by tensor.collapse_shape:
//
//   %p = tensor.collapse_shape %mix [[0], [1, 2], [3]]
//   %g, %i = moe.topk_renorm ins(%p)
//
// and lets it work on the dims as they were:
//
//   %g4, %i4 = moe.topk_renorm ins(%mix)
//   %g = tensor.collapse_shape %g4 [[0], [1, 2], [3]]
//
// Legal because the op treats its leading dims alike and in row-major order.
// It costs nothing: reshapes of whole tensors are views. What it buys is that
// the op and the producer of its operand share rows, so that one loop computes
// both. Bits do not change.
//
//===----------------------------------------------------------------------===//

#include "MoE/Dialect/MoE/IR/KernelConfig.h"
#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Interfaces/DestinationStyleOpInterface.h"
#include "mlir/Interfaces/IndexingMapOpInterface.h"
#include "mlir/Interfaces/TilingInterface.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEPROPAGATERESHAPESPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

#define DEBUG_TYPE "moe-propagate-reshapes"

using namespace mlir;
using namespace mlir::moe;

/// Whether the first dims of `map` are the op's `numLeading` leading dims.
static bool startsWithLeadingDims(AffineMap map, unsigned numLeading) {
  if (map.getNumResults() < numLeading)
    return false;
  for (unsigned dim = 0; dim < numLeading; ++dim)
    if (map.getResult(dim) != getAffineDimExpr(dim, map.getContext()))
      return false;
  return true;
}

/// Whether `map` reads none of the leading dims.
static bool hasNoLeadingDim(AffineMap map, unsigned numLeading) {
  for (unsigned dim = 0; dim < numLeading; ++dim)
    if (map.isFunctionOfDim(dim))
      return false;
  return true;
}

namespace {
/// The leading dims of an op, as groups of the dims that they were joined from.
class JoinedRows {
public:
  JoinedRows(OpBuilder &builder, Location loc, tensor::CollapseShapeOp collapse,
             unsigned numLeading)
      : builder(builder), loc(loc) {
    groups = collapse.getReassociationIndices();
    groups.truncate(numLeading);
    unsigned numRows = groups.back().back() + 1;
    sizes = tensor::getMixedSizes(builder, loc, collapse.getSrc());
    sizes.truncate(numRows);
  }

  SmallVector<ReassociationIndices> getReassociation(int64_t rank) const {
    SmallVector<ReassociationIndices> all(groups);
    for (int64_t next = sizes.size(); static_cast<int64_t>(all.size()) < rank;)
      all.push_back({next++});
    return all;
  }

  /// `value` with its leading dims split up.
  Value split(Value value) {
    auto type = cast<RankedTensorType>(value.getType());
    SmallVector<OpFoldResult> shape(sizes);
    SmallVector<OpFoldResult> own = tensor::getMixedSizes(builder, loc, value);
    llvm::append_range(shape, ArrayRef(own).drop_front(groups.size()));
    auto [sizesOf, dynamicSizes] = decomposeMixedValues(shape);
    return tensor::ExpandShapeOp::create(
        builder, loc, type.clone(sizesOf), value,
        getReassociation(type.getRank()), shape);
  }

private:
  OpBuilder &builder;
  Location loc;
  SmallVector<ReassociationIndices> groups;
  SmallVector<OpFoldResult> sizes;
};

/// op(collapse(x)) -> collapse(op(x)), for ops with free leading dims.
struct WorkOnRowsBeforeTheyAreJoined
    : OpInterfaceRewritePattern<MoEStructuredOpInterface> {
  using OpInterfaceRewritePattern::OpInterfaceRewritePattern;

  LogicalResult matchAndRewrite(MoEStructuredOpInterface op,
                                PatternRewriter &rewriter) const override {
    unsigned numLeading = op.getNumLeadingDims();
    auto dps = cast<DestinationStyleOpInterface>(op.getOperation());
    if (numLeading == 0 || !dps.hasPureTensorSemantics())
      return rewriter.notifyMatchFailure(op, "expected free leading dims");
    SmallVector<AffineMap> maps =
        cast<IndexingMapOpInterface>(op.getOperation()).getIndexingMapsArray();
    for (AffineMap map : maps)
      if (!startsWithLeadingDims(map, numLeading) &&
          !hasNoLeadingDim(map, numLeading))
        return rewriter.notifyMatchFailure(
            op, "expected operands to span all leading dims or none");
    tensor::CollapseShapeOp collapse = findCollapse(op, maps, numLeading);
    if (!collapse)
      return rewriter.notifyMatchFailure(op, "no operand has joined rows");

    JoinedRows rows(rewriter, op.getLoc(), collapse, numLeading);
    SmallVector<Value> operands;
    SmallVector<Type> resultTypes;
    for (OpOperand &operand : op->getOpOperands()) {
      Value value = operand.get();
      if (startsWithLeadingDims(maps[operand.getOperandNumber()], numLeading))
        value = value == collapse.getResult() ? collapse.getSrc()
                                              : rows.split(value);
      operands.push_back(value);
      if (dps.isDpsInit(&operand))
        resultTypes.push_back(value.getType());
    }
    Operation *split =
        mlir::clone(rewriter, op.getOperation(), resultTypes, operands);
    SmallVector<Value> joined;
    for (auto [result, old] :
         llvm::zip_equal(split->getResults(), op->getResults())) {
      auto type = cast<RankedTensorType>(old.getType());
      joined.push_back(tensor::CollapseShapeOp::create(
          rewriter, op.getLoc(), type, result,
          rows.getReassociation(type.getRank())));
    }
    rewriter.replaceOp(op, joined);
    return success();
  }

private:
  static bool canShareLoop(Operation *producer) {
    return isa_and_nonnull<TilingInterface>(producer) && !hasOwnLoop(producer);
  }

  /// The reshape that joins leading dims, and only those, of what an op that
  /// could share a loop with `op` computes.
  static tensor::CollapseShapeOp findCollapse(MoEStructuredOpInterface op,
                                              ArrayRef<AffineMap> maps,
                                              unsigned numLeading) {
    auto dps = cast<DestinationStyleOpInterface>(op.getOperation());
    for (OpOperand *input : dps.getDpsInputOperands()) {
      auto collapse = input->get().getDefiningOp<tensor::CollapseShapeOp>();
      if (!collapse || !canShareLoop(collapse.getSrc().getDefiningOp()) ||
          !startsWithLeadingDims(maps[input->getOperandNumber()], numLeading))
        continue;
      SmallVector<ReassociationIndices> groups =
          collapse.getReassociationIndices();
      if (llvm::all_of(ArrayRef(groups).drop_front(numLeading),
                       [](const ReassociationIndices &group) {
                         return group.size() == 1;
                       }))
        return collapse;
    }
    return {};
  }
};

struct PropagateReshapesPass
    : public mlir::moe::impl::MoEPropagateReshapesPassBase<
          PropagateReshapesPass> {
  using Base::Base;

  void runOnOperation() override {
    RewritePatternSet patterns(&getContext());
    patterns.add<WorkOnRowsBeforeTheyAreJoined>(&getContext());
    tensor::ExpandShapeOp::getCanonicalizationPatterns(patterns, &getContext());
    if (failed(applyPatternsGreedily(getOperation(), std::move(patterns))))
      signalPassFailure();
  }
};
} // namespace
