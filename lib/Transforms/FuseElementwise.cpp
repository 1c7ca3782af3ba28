//===- FuseElementwise.cpp - Compute elementwise ops at their reader ------===//
//
// Matches a linalg.generic that reads the result of another one, which nothing
// else reads, at each of its own iterations once:
//
//   %y = linalg.generic ins(%x) { truncf }
//   %z = linalg.generic ins(%y) { extf, mulf }
//
// becomes one op without the buffer of %y. A tile of %y would lie in a cache,
// as TileAndFuse leaves them; to write and to read it takes longer than most
// bodies compute. Bits do not change.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Linalg/Transforms/Transforms.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/PatternMatch.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEFUSEELEMENTWISEPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// Whether the elements that a vector of iterations reads lie next to each
/// other, or are one.
static bool isReadInOrder(linalg::GenericOp op, OpOperand *operand) {
  AffineMap map = op.getMatchingIndexingMap(operand);
  unsigned last = op.getNumLoops() - 1;
  if (!map.isFunctionOfDim(last))
    return true;
  if (map.getResults().back() != getAffineDimExpr(last, op.getContext()) ||
      !map.isProjectedPermutation(/*allowZeroInResults=*/true))
    return false;
  auto slice = operand->get().getDefiningOp<tensor::ExtractSliceOp>();
  return !slice || isOneInteger(slice.getMixedStrides().back());
}

/// Whether the body only computes, element by element, and reads no output (as
/// a sum over a dim of size 1 does). Vectors of a CPU need one that asks for no
/// index and loads from no tensor, too.
static bool isElementwise(linalg::GenericOp op, bool forGPU) {
  return op.getNumResults() == 1 && op.getNumLoops() > 0 &&
         op.getNumLoops() == op.getNumParallelLoops() &&
         !op.payloadUsesValueFromOperand(op.getDpsInitOperand(0)) &&
         llvm::all_of(
             op.getBody()->without_terminator(), [&](Operation &nested) {
               return OpTrait::hasElementwiseMappableTraits(&nested) ||
                      (forGPU &&
                       isa<linalg::IndexOp, tensor::ExtractOp>(nested));
             });
}

/// The operands of both ops, without the one between them.
static unsigned countInputs(linalg::GenericOp producer,
                            linalg::GenericOp consumer) {
  llvm::SmallDenseSet<Value> inputs;
  inputs.insert_range(producer.getInputs());
  inputs.insert_range(consumer.getInputs());
  return inputs.size() - 1;
}

/// Whether `op` reads each element of an operand once.
static bool isReadOnce(linalg::GenericOp op, OpOperand *operand) {
  AffineMap map = op.getMatchingIndexingMap(operand);
  if (!map.isProjectedPermutation())
    return false;
  SmallVector<int64_t> sizes = op.getStaticLoopRanges();
  return llvm::all_of(llvm::seq(op.getNumLoops()), [&](unsigned dim) {
    return sizes[dim] == 1 || map.isFunctionOfDim(dim);
  });
}

/// Whether fusing the ops neither changes a product nor makes one of a sum.
/// Kernels of products round a product and its sum once, and add in an order of
/// their own.
static bool keepsProducts(linalg::GenericOp producer,
                          linalg::GenericOp consumer) {
  return consumer.getNumReductionLoops() == 0 ||
         (consumer.getNumDpsInputs() == 1 && producer.getNumDpsInputs() == 1);
}

/// Whether vectors of iterations stay vectors of elements where the consumer
/// computes what it reads.
static bool keepsVectors(linalg::GenericOp producer, OpOperand *operand) {
  return isReadInOrder(cast<linalg::GenericOp>(operand->getOwner()), operand) &&
         llvm::all_of(producer.getDpsInputOperands(), [&](OpOperand *input) {
           return isReadInOrder(producer, input);
         });
}

/// Whether `op` only moves elements and converts them, so that it may be
/// computed for each of several readers.
static bool isCheap(linalg::GenericOp op) {
  return llvm::all_of(op.getBody()->without_terminator(),
                      [](Operation &nested) {
                        return isa<arith::ExtFOp, arith::TruncFOp>(nested);
                      });
}

/// On a CPU nothing is computed twice, and no loop over vectors lost to an
/// input that is not in order. Threads of a GPU have no vectors, and what lies
/// between two ops is a launch.
static bool isFusable(OpOperand *operand, unsigned maxInputs, bool forGPU) {
  auto consumer = cast<linalg::GenericOp>(operand->getOwner());
  auto producer = operand->get().getDefiningOp<linalg::GenericOp>();
  if (!producer || !isElementwise(producer, forGPU) ||
      producer->getBlock() != consumer->getBlock() ||
      !keepsProducts(producer, consumer))
    return false;
  bool isOnce = producer->hasOneUse() && isReadOnce(consumer, operand);
  if (!isOnce && !(forGPU && isCheap(producer)))
    return false;
  return (forGPU || keepsVectors(producer, operand)) &&
         countInputs(producer, consumer) <= maxInputs &&
         linalg::areElementwiseOpsFusable(operand);
}

/// Drops the first result of `op`, which has no user. Upstream keeps what a
/// producer with fewer loops wrote.
static linalg::GenericOp dropFirstResult(RewriterBase &rewriter,
                                         linalg::GenericOp op) {
  SmallVector<AffineMap> maps = op.getIndexingMapsArray();
  maps.erase(maps.begin() + op.getNumDpsInputs());
  auto others = [](auto range) {
    return llvm::to_vector(llvm::drop_begin(range));
  };
  auto narrow = linalg::GenericOp::create(
      rewriter, op.getLoc(), others(op.getResultTypes()), op.getInputs(),
      others(op.getOutputs()), maps, op.getIteratorTypesArray());
  rewriter.inlineRegionBefore(op.getRegion(), narrow.getRegion(),
                              narrow.getRegion().begin());
  Block *body = narrow.getBody();
  body->eraseArgument(op.getNumDpsInputs());
  body->getTerminator()->eraseOperand(0);
  for (auto [old, result] :
       llvm::zip_equal(llvm::drop_begin(op.getResults()), narrow.getResults()))
    rewriter.replaceAllUsesWith(old, result);
  rewriter.eraseOp(op);
  return narrow;
}

/// Fuses one producer into `consumer`; null if none is fusable.
static linalg::GenericOp fuseProducer(RewriterBase &rewriter,
                                      linalg::GenericOp consumer,
                                      unsigned maxInputs, bool forGPU) {
  for (OpOperand *operand : consumer.getDpsInputOperands()) {
    if (!isFusable(operand, maxInputs, forGPU))
      continue;
    rewriter.setInsertionPoint(consumer);
    Operation *producer = operand->get().getDefiningOp();
    if (!producer->hasOneUse()) { // Its other readers keep theirs.
      producer = rewriter.clone(*producer);
      rewriter.modifyOpInPlace(consumer,
                               [&] { operand->set(producer->getResult(0)); });
    }
    FailureOr<linalg::ElementwiseOpFusionResult> fused =
        linalg::fuseElementwiseOps(rewriter, operand);
    if (failed(fused))
      continue;
    for (auto [from, to] : fused->replacements)
      if (from.getDefiningOp() == consumer)
        rewriter.replaceAllUsesWith(from, to);
    unsigned numResults = consumer.getNumResults();
    rewriter.eraseOp(consumer);
    rewriter.eraseOp(producer);
    auto op = cast<linalg::GenericOp>(fused->fusedOp);
    return op.getNumResults() > numResults ? dropFirstResult(rewriter, op) : op;
  }
  return nullptr;
}

namespace {
struct FuseElementwisePass
    : public mlir::moe::impl::MoEFuseElementwisePassBase<FuseElementwisePass> {
  using Base::Base;

  void runOnOperation() override {
    // In the order of the program, so that a producer is whole.
    SmallVector<linalg::GenericOp> consumers;
    getOperation().walk([&](linalg::GenericOp op) {
      if (op.hasPureTensorSemantics())
        consumers.push_back(op);
    });
    IRRewriter rewriter(&getContext());
    bool forGPU = isForGPU(getOperation());
    for (linalg::GenericOp consumer : consumers)
      while (consumer)
        consumer = fuseProducer(rewriter, consumer, maxInputs, forGPU);
  }
};
} // namespace
