//===- KeepReducedDims.cpp - Reductions with a dim of size 1 --------------===//
//
// Matches a reshape that adds dims of size 1 to what a reduction, or what is
// computed of it element by element, has as its only user:
//
//   %s = linalg.generic ins(%x : tensor<?x512xf32>) .. -> tensor<?xf32>
//   %k = tensor.expand_shape %s [[0, 1]] : tensor<?xf32> into tensor<?x1xf32>
//
// becomes a reduction with a loop of one iteration:
//
//   %k = linalg.generic ins(%x : tensor<?x512xf32>) .. -> tensor<?x1xf32>
//
// Its rows are then those of what it sums and of what reads it, the mean of a
// norm for example, so that one loop computes all of them. Bits do not change.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEKEEPREDUCEDDIMSPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;

/// The dims that `op` adds; nothing unless it only adds dims of size 1.
static std::optional<SmallVector<bool>> getAddedDims(tensor::ExpandShapeOp op) {
  // All of them where the reshape starts with a scalar.
  SmallVector<bool> added(op.getResultType().getRank(),
                          op.getSrcType().getRank() == 0);
  for (auto [dim, group] : llvm::enumerate(op.getReassociationIndices())) {
    // The dim itself is the first that may have its size.
    int64_t size = op.getSrcType().getDimSize(dim);
    bool isFound = false;
    for (int64_t position : group) {
      bool isOwn = !isFound &&
                   (op.getResultType().getDimSize(position) != 1 || size == 1);
      if (!isOwn && op.getResultType().getDimSize(position) != 1)
        return std::nullopt;
      added[position] = !isOwn;
      isFound |= isOwn;
    }
    if (!isFound)
      return std::nullopt;
  }
  return added;
}

/// The op that computes `value` for one user, and that may move to it: checks
/// stay where they are.
static linalg::GenericOp getOwnProducer(Value value) {
  auto op = value.getDefiningOp<linalg::GenericOp>();
  bool isOwn = op && op->hasOneUse() && op.getNumResults() == 1 &&
               op.hasPureTensorSemantics() && !op.hasIndexSemantics() &&
               !moe::hasEffectsInBody(op);
  return isOwn ? op : linalg::GenericOp();
}

/// Whether results are loops in their order.
static bool isOrdered(AffineMap map) {
  return map.isProjectedPermutation() &&
         llvm::is_sorted(map.getResults(), [](AffineExpr a, AffineExpr b) {
           return cast<AffineDimExpr>(a).getPosition() <
                  cast<AffineDimExpr>(b).getPosition();
         });
}

/// Whether `op` reduces one tensor, or is computed of such a result element by
/// element. Products have kernels, which take them as they are.
static bool isOfReduction(linalg::GenericOp op) {
  if (op.getNumReductionLoops() > 0)
    return op.getNumDpsInputs() == 1;
  return llvm::any_of(op.getInputs(), [](Value input) {
    linalg::GenericOp producer = getOwnProducer(input);
    return producer && isOfReduction(producer);
  });
}

namespace {
/// The loops of an op with additional ones of one iteration, each behind that
/// of the dim of the result in front of it.
class LoopsWithUnits {
public:
  LoopsWithUnits(linalg::GenericOp op, ArrayRef<bool> added)
      : context(op.getContext()), renamed(op.getNumLoops()) {
    AffineMap written = op.getMatchingIndexingMap(op.getDpsInitOperand(0));
    SmallVector<utils::IteratorType> old = op.getIteratorTypesArray();
    // The number of a dim of the old result, and of one of the new result.
    unsigned next = 0, position = 0;
    results.resize(added.size());
    auto addUnits = [&] {
      for (; position < added.size() && added[position]; ++position)
        results[position] = addLoop(utils::IteratorType::parallel);
    };
    addUnits();
    for (auto [dim, iterator] : llvm::enumerate(old)) {
      renamed[dim] = addLoop(iterator);
      if (next < written.getNumResults() &&
          written.getDimPosition(next) == dim) {
        results[position++] = renamed[dim];
        ++next;
        addUnits();
      }
    }
  }

  AffineMap rename(AffineMap map) const {
    return map.replaceDimsAndSymbols(renamed, {}, iterators.size(), 0);
  }
  AffineMap getResultMap() const {
    return AffineMap::get(iterators.size(), 0, results, context);
  }

  SmallVector<utils::IteratorType> iterators;

private:
  AffineExpr addLoop(utils::IteratorType iterator) {
    iterators.push_back(iterator);
    return getAffineDimExpr(iterators.size() - 1, context);
  }

  MLIRContext *context;
  SmallVector<AffineExpr> renamed, results;
};

/// expand_shape(generic(x)) -> generic'(x).
struct AddUnitLoops : OpRewritePattern<tensor::ExpandShapeOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(tensor::ExpandShapeOp expand,
                                PatternRewriter &rewriter) const override {
    linalg::GenericOp op = getOwnProducer(expand.getSrc());
    if (!op || !isOfReduction(op))
      return rewriter.notifyMatchFailure(expand, "expected a reduction");
    AffineMap written = op.getMatchingIndexingMap(op.getDpsInitOperand(0));
    std::optional<SmallVector<bool>> added = getAddedDims(expand);
    if (!added || !isOrdered(written))
      return rewriter.notifyMatchFailure(expand, "expected dims of size 1");
    Value init = expandInit(rewriter, op, expand);
    if (!init)
      return rewriter.notifyMatchFailure(expand,
                                         "expected a constant to start");

    LoopsWithUnits loops(op, *added);
    SmallVector<Value> inputs;
    SmallVector<AffineMap> maps;
    for (OpOperand *input : op.getDpsInputOperands()) {
      AffineMap map = op.getMatchingIndexingMap(input);
      bool hasShapeOfResult = map == written;
      inputs.push_back(hasShapeOfResult
                           ? expandAs(rewriter, input->get(), expand)
                           : input->get());
      maps.push_back(hasShapeOfResult ? loops.getResultMap()
                                      : loops.rename(map));
    }
    maps.push_back(loops.getResultMap());
    auto wide =
        linalg::GenericOp::create(rewriter, op.getLoc(), expand.getType(),
                                  inputs, init, maps, loops.iterators);
    rewriter.inlineRegionBefore(op.getRegion(), wide.getRegion(),
                                wide.getRegion().begin());
    rewriter.replaceOp(expand, wide.getResults());
    rewriter.eraseOp(op);
    return success();
  }

private:
  static Value expandAs(PatternRewriter &rewriter, Value value,
                        tensor::ExpandShapeOp expand) {
    auto type =
        expand.getResultType().clone(getElementTypeOrSelf(value.getType()));
    return tensor::ExpandShapeOp::create(rewriter, expand.getLoc(), type, value,
                                         expand.getReassociationIndices(),
                                         expand.getMixedOutputShape());
  }

  /// What the wider op starts with: a constant, or nothing that is read.
  static Value expandInit(PatternRewriter &rewriter, linalg::GenericOp op,
                          tensor::ExpandShapeOp expand) {
    Value init = op.getDpsInitOperand(0)->get();
    auto fill = init.getDefiningOp<linalg::FillOp>();
    bool isRead =
        !op.getMatchingBlockArgument(op.getDpsInitOperand(0)).use_empty();
    if (isRead && !fill)
      return nullptr;
    Value empty = tensor::EmptyOp::create(rewriter, op.getLoc(),
                                          expand.getMixedOutputShape(),
                                          getElementTypeOrSelf(init.getType()));
    return isRead ? linalg::FillOp::create(rewriter, fill.getLoc(),
                                           fill.value(), empty)
                        .getResult(0)
                  : empty;
  }
};

struct KeepReducedDimsPass
    : public mlir::moe::impl::MoEKeepReducedDimsPassBase<KeepReducedDimsPass> {
  using Base::Base;

  void runOnOperation() override {
    RewritePatternSet patterns(&getContext());
    patterns.add<AddUnitLoops>(&getContext());
    if (failed(applyPatternsGreedily(getOperation(), std::move(patterns))))
      signalPassFailure();
  }
};
} // namespace
