//===- DistributeToGrid.cpp - Ops on whole problems to grids --------------===//
//
// Everything on buffers that no loop over blocks contains gets one: an op that
// works on a whole problem because its rows are not independent, or has no
// rows. An op with a pattern of its own becomes what that says. Of the others,
//
//   linalg ops, copies   the threads of all blocks share the iterations; a long
//                        reduction into few points takes two loops, of which
//                        the first makes one partial result a block
//   other moe ops        are the work of one block
//
// Loops after one another are kernels after one another, and what they hand on
// lies in buffers that the function allocates.
//
//===----------------------------------------------------------------------===//

#include "Emit/ThreadBuilder.h"
#include "Experts/GroupedLinear.h"
#include "Product/FewTokenRouters.h"
#include "ScatterLoops.h"
#include "ThreadLowerings.h"

#include "MoE/Conversion/Passes.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Transforms/Transforms.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Rewrite/FrozenRewritePatternSet.h"
#include "mlir/Rewrite/PatternApplicator.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEDISTRIBUTETOGRIDPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// Parts of a long reduction: fixed, because the order of a sum follows it.
static constexpr int64_t kParts = 64;

//===----------------------------------------------------------------------===//
// Grids
//===----------------------------------------------------------------------===//

AffineExpr mlir::moe::isMore(AffineExpr lhs, AffineExpr rhs) {
  constexpr int64_t limit = int64_t(1) << 31;
  return (lhs - rhs + (limit - 1)).floorDiv(limit);
}

SmallVector<Value> mlir::moe::createGrid(ThreadBuilder &b,
                                         ArrayRef<OpFoldResult> numBlocks) {
  static constexpr gpu::MappingId ids[] = {
      gpu::MappingId::DimZ, gpu::MappingId::DimY, gpu::MappingId::DimX};
  SmallVector<Attribute> mapping;
  for (gpu::MappingId id : ArrayRef(ids).take_back(numBlocks.size()))
    mapping.push_back(gpu::GPUBlockMappingAttr::get(b.getContext(), id));
  auto forall = scf::ForallOp::create(b, numBlocks, ValueRange(),
                                      b.getArrayAttr(mapping));
  b.setInsertionPointToStart(forall.getBody());
  return llvm::to_vector(forall.getInductionVars());
}

/// Emits a loop over `numBlocks` blocks before the insertion point of `b`.
static void
emitGrid(ThreadBuilder &b, BlockShape block, int64_t numBlocks,
         function_ref<void(ThreadBuilder &, Value id, Workers)> body) {
  OpBuilder::InsertionGuard guard(b);
  Value id = createGrid(b, b.getIndexAttr(numBlocks));
  body(b, id, Workers::ofGrid(b, block, id, numBlocks));
}

/// The product of `sizes`, or kDynamic.
static int64_t getProduct(ArrayRef<int64_t> sizes) {
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (ShapedType::isDynamic(size))
      return size;
    product *= size;
  }
  return product;
}

/// The blocks that `numPoints` points of `threadsAPoint` threads keep busy.
static int64_t getNumBlocks(BlockShape block, int64_t numPoints,
                            int64_t threadsAPoint) {
  if (ShapedType::isDynamic(numPoints))
    return kGridBlocks;
  return std::clamp<int64_t>(
      llvm::divideCeil(numPoints * threadsAPoint, block.numThreads), 1,
      kGridBlocks);
}

//===----------------------------------------------------------------------===//
// linalg
//===----------------------------------------------------------------------===//

static int64_t getNumStaticIterations(linalg::LinalgOp op,
                                      utils::IteratorType kind) {
  SmallVector<int64_t> sizes;
  for (auto [size, iterator] :
       llvm::zip_equal(op.getStaticLoopRanges(), op.getIteratorTypesArray()))
    if (iterator == kind)
      sizes.push_back(size);
  return getProduct(sizes);
}

bool mlir::moe::isLongReduction(linalg::LinalgOp op) {
  int64_t points = getNumStaticIterations(op, utils::IteratorType::parallel);
  int64_t terms = getNumStaticIterations(op, utils::IteratorType::reduction);
  return !ShapedType::isDynamic(points) && points <= kFewResults &&
         (ShapedType::isDynamic(terms) || terms >= kParts * kWarpSize);
}

/// Two loops over blocks: partial results, and their combination.
static void distributeReduction(ThreadBuilder &b, linalg::LinalgOp op,
                                BlockShape block, int64_t numBlocks) {
  SmallVector<Value> partials;
  for (OpOperand &out : op.getDpsInitsMutable()) {
    auto type = cast<MemRefType>(out.get().getType());
    SmallVector<int64_t> shape{kParts};
    llvm::append_range(shape, type.getShape());
    SmallVector<Value> sizes;
    for (int64_t dim = 0; dim < type.getRank(); ++dim)
      if (type.isDynamicDim(dim))
        sizes.push_back(memref::DimOp::create(b, out.get(), dim));
    partials.push_back(memref::AllocOp::create(
        b, MemRefType::get(shape, type.getElementType()), sizes));
  }
  emitGrid(b, block, kParts, [&](ThreadBuilder &b, Value part, Workers) {
    emitPartialReduction(b, op, block, part, kParts, partials);
  });
  emitGrid(b, block, numBlocks, [&](ThreadBuilder &b, Value, Workers workers) {
    emitCombineParts(b, op, workers, kParts, partials);
  });
}

static void distributeLinalg(ThreadBuilder &b, linalg::LinalgOp op,
                             BlockShape block) {
  int64_t points = getNumStaticIterations(op, utils::IteratorType::parallel);
  if (hasCombinableReduction(op) && isLongReduction(op))
    return distributeReduction(b, op, block, getNumBlocks(block, points, 1));
  int64_t threads = op.getNumReductionLoops() > 0 ? kWarpSize : 1;
  emitGrid(b, block, getNumBlocks(block, points, threads),
           [&](ThreadBuilder &b, Value, Workers workers) {
             emitLinalgForThreads(b, op, workers);
           });
}

//===----------------------------------------------------------------------===//
// Pass
//===----------------------------------------------------------------------===//

void mlir::moe::populateToGridPatterns(RewritePatternSet &patterns,
                                       BlockShape block) {
  populateAdjacencyToGridPatterns(patterns, block);
  populateCombineToGridPatterns(patterns, block);
  populateDispatchToGridPatterns(patterns, block);
  populateDispersionToGridPatterns(patterns, block);
  populateGroupedLinearToGridPatterns(patterns, block);
  populateTokenRowsToGridPatterns(patterns, block);
}

/// The ops on whole buffers that no loop over blocks contains.
static SmallVector<Operation *> getOpsOutsideOfBlocks(func::FuncOp function) {
  SmallVector<Operation *> ops;
  function.walk<WalkOrder::PreOrder>([&](Operation *op) {
    if (isa<scf::ForallOp>(op))
      return WalkResult::skip();
    bool isMoE = isa_and_nonnull<MoEDialect>(op->getDialect());
    // Of a loop that no kernel stands for all stores stay where they are, and
    // sizes are the shapes of reshapes.
    auto store = dyn_cast<memref::StoreOp>(op);
    bool isStore = store && op->getParentOp() == function &&
                   !store.getMemRefType().getElementType().isIndex();
    if (isMoE || isStore || isa<linalg::LinalgOp, memref::CopyOp>(op)) {
      ops.push_back(op);
      return WalkResult::skip();
    }
    return WalkResult::advance();
  });
  return ops;
}

namespace {
struct MoEDistributeToGridPass
    : public mlir::moe::impl::MoEDistributeToGridPassBase<
          MoEDistributeToGridPass> {
  using Base::Base;

  void getDependentDialects(DialectRegistry &registry) const override {
    Base::getDependentDialects(registry);
    registerThreadDialects(registry);
  }

  void runOnOperation() override {
    if (failed(verifyBlockSize(getOperation(), blockSize)))
      return signalPassFailure();
    BlockShape block = getBlockShape(getOperation(), blockSize);
    cutRoutersOfFewTokens(getOperation(), block);
    closeGapsOfGroupedLinear(getOperation());
    distributeScatterLoops(getOperation(), BlockShape{blockSize});
    RewritePatternSet set(&getContext());
    populateToGridPatterns(set, block);
    FrozenRewritePatternSet patterns(std::move(set));
    PatternApplicator applicator(patterns);
    applicator.applyDefaultCostModel();
    PatternRewriter rewriter(&getContext());
    for (Operation *op : getOpsOutsideOfBlocks(getOperation())) {
      rewriter.setInsertionPoint(op);
      if (failed(applicator.matchAndRewrite(op, rewriter)))
        distribute(rewriter, op);
    }
  }

private:
  void distribute(PatternRewriter &rewriter, Operation *op) {
    ThreadBuilder b(op->getLoc(), rewriter);
    BlockShape block{blockSize};
    if (auto copy = dyn_cast<memref::CopyOp>(op)) {
      int64_t elements = getProduct(copy.getSource().getType().getShape());
      emitGrid(b, block, getNumBlocks(block, elements, 1),
               [&](ThreadBuilder &b, Value, Workers workers) {
                 emitCopyForThreads(b, copy, workers);
               });
    } else if (auto store = dyn_cast<memref::StoreOp>(op)) {
      // A loop that ran once: of one token, say.
      emitGrid(b, block, 1, [&](ThreadBuilder &b, Value, Workers workers) {
        Value isFirst =
            b.compare(arith::CmpIPredicate::eq, workers.thread, b.index(0));
        b.ifThen(isFirst, [&] { b.clone(*store); });
      });
    } else if (auto linalgOp = dyn_cast<linalg::LinalgOp>(op)) {
      if (!linalgOp.hasPureBufferSemantics())
        return;
      distributeLinalg(b, linalgOp, block);
    } else {
      if (op->getNumResults() != 0)
        return;
      createGrid(b, b.getIndexAttr(1));
      rewriter.moveOpBefore(op, b.getInsertionBlock(), b.getInsertionPoint());
      return;
    }
    rewriter.eraseOp(op);
  }
};
} // namespace
