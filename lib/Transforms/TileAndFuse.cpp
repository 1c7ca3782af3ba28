//===- TileAndFuse.cpp - Tile over rows and fuse producers ----------------===//
//
// Matches any op with TilingInterface and DestinationStyleOpInterface. Which
// dims are cut follows from the maps alone; that the op may be cut there is
// what its interface says. A producer is computed inside the tile when each of
// its rows is needed by exactly one tile, so fusion never repeats work, and
// when the tiles cut all dims of its rows, so fusion never serialises it:
// RowGroup says which ops share a loop. Each op of a group whose result leaves
// it is tiled with its producers, and the loops become one, in which equal
// tiles of a producer are computed once. Bits do not change.
//
//===----------------------------------------------------------------------===//

#include "MergeLoops.h"
#include "MoE/Dialect/MoE/IR/KernelConfig.h"
#include "MoE/Support/Chips.h"
#include "MoE/Transforms/Passes.h"
#include "RowGroup.h"
#include "SliceBroadcasts.h"

#include "mlir/Analysis/SliceAnalysis.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/SCF/Transforms/TileUsingInterface.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/IR/Remarks.h"
#include "mlir/Interfaces/DestinationStyleOpInterface.h"
#include "mlir/Interfaces/IndexingMapOpInterface.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"
#include "mlir/Interfaces/TilingInterface.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOETILEANDFUSEPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

#define DEBUG_TYPE "moe-tile-and-fuse"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// What to tile
//===----------------------------------------------------------------------===//

/// Whether `op` sums over a dim of unknown size into few results: tiles of its
/// rows would be few, and each a long loop.
static bool isLongReduction(TilingInterface op) {
  auto maps = dyn_cast<IndexingMapOpInterface>(op.getOperation());
  // A dim that no operand spans has no size to ask for.
  if (!maps || !maps.getShapesToLoopsMap())
    return false;
  int64_t rows = 1;
  bool isLong = false;
  for (auto [size, iterator] :
       llvm::zip_equal(maps.getStaticLoopRanges(), op.getLoopIteratorTypes())) {
    if (iterator == utils::IteratorType::reduction)
      isLong |= ShapedType::isDynamic(size);
    else if (ShapedType::isDynamic(size))
      return false;
    else
      rows *= size;
  }
  return isLong && rows <= kFewResults;
}

static SmallVector<OpFoldResult>
getTileSizes(TilingInterface op, ArrayRef<unsigned> rows, const RowTile &tile) {
  Builder builder(op.getContext());
  SmallVector<OpFoldResult> sizes(op.getLoopIteratorTypes().size(),
                                  builder.getIndexAttr(0));
  for (auto [loop, dim] : llvm::enumerate(rows))
    sizes[dim] = loop == tile.loop ? tile.rows : builder.getIndexAttr(1);
  return sizes;
}

/// The rows of `large` where each of `threads` then has enough tiles, else
/// `small`.
static Value chooseTileRows(ImplicitLocOpBuilder &b, TilingInterface op,
                            ArrayRef<unsigned> rows, Value threads,
                            int64_t small, const WantedTile &large) {
  // The last of the tiles that a thread takes keeps others waiting.
  constexpr int64_t kTilesPerThread = 4;
  auto index = [&](int64_t value) -> Value {
    return arith::ConstantIndexOp::create(b, value);
  };
  Value numTiles;
  SmallVector<Range> domain = op.getIterationDomain(b);
  for (auto [loop, dim] : llvm::enumerate(rows)) {
    Value size =
        getValueOrCreateConstantIndexOp(b, op.getLoc(), domain[dim].size);
    if (loop == large.loop)
      size = arith::CeilDivSIOp::create(b, size, index(large.rows));
    numTiles = numTiles ? arith::MulIOp::create(b, numTiles, size) : size;
  }
  Value isAlone =
      arith::CmpIOp::create(b, arith::CmpIPredicate::eq, threads, index(1));
  Value enough = arith::MulIOp::create(b, threads, index(kTilesPerThread));
  Value areMany =
      arith::CmpIOp::create(b, arith::CmpIPredicate::sge, numTiles, enough);
  return arith::SelectOp::create(b, arith::OrIOp::create(b, isAlone, areMany),
                                 index(large.rows), index(small));
}

/// Maps the tiles of `numLoops` dims to the blocks of a grid, the innermost to
/// x.
static SmallVector<Attribute> getBlockMapping(MLIRContext *context,
                                              unsigned numLoops) {
  static constexpr gpu::MappingId ids[] = {
      gpu::MappingId::DimX, gpu::MappingId::DimY, gpu::MappingId::DimZ};
  if (numLoops > 3)
    return {};
  SmallVector<Attribute> mapping;
  for (unsigned loop = 0; loop < numLoops; ++loop)
    mapping.push_back(
        gpu::GPUBlockMappingAttr::get(context, ids[numLoops - 1 - loop]));
  return mapping;
}

//===----------------------------------------------------------------------===//
// What to fuse
//===----------------------------------------------------------------------===//

/// Whether one op reads `result` at two places at once, to compare an element
/// with the others.
static bool isComparedWithItself(OpResult result) {
  return llvm::any_of(result.getUsers(), [&](Operation *user) {
    auto op = dyn_cast<linalg::LinalgOp>(user);
    if (!op)
      return false;
    llvm::SmallDenseSet<AffineMap> maps;
    for (OpOperand *input : op.getDpsInputOperands())
      if (input->get() == result)
        maps.insert(op.getMatchingIndexingMap(input));
    return maps.size() > 1;
  });
}

/// Whether the floats that `op` computes depend on the order of a loop, in it
/// or in what it reads of the block.
static bool dependsOnOrder(Operation *op) {
  SetVector<Operation *> slice;
  BackwardSliceOptions options;
  options.filter = [&](Operation *other) {
    return other->getBlock() == op->getBlock();
  };
  options.inclusive = true;
  if (failed(getBackwardSlice(op, &slice, options)))
    return true;
  return llvm::any_of(slice, [](Operation *other) {
    auto tiled = dyn_cast<TilingInterface>(other);
    return tiled &&
           llvm::is_contained(tiled.getLoopIteratorTypes(),
                              utils::IteratorType::reduction) &&
           llvm::any_of(other->getResultTypes(), [](Type type) {
             return isa<FloatType>(getElementTypeOrSelf(type));
           });
  });
}

/// Whether the kernel of an op that reads `slice` copies rows from global
/// memory to where tensor cores multiply them: what a block computes lies
/// elsewhere.
static bool isCopiedByKernel(tensor::ExtractSliceOp slice) {
  return llvm::any_of(slice->getUses(), [](OpOperand &use) {
    auto op = dyn_cast<DestinationStyleOpInterface>(use.getOwner());
    return op && op.isDpsInput(&use) &&
           (hasSchedule(op, KernelSchedule::Mma) ||
            hasSchedule(op, KernelSchedule::Wgmma));
  });
}

/// Why the producer of `slice`, of which nothing is known but that it can be
/// tiled, stays outside of the tile; empty to fuse it. `numLoops` tile offsets
/// must all appear in the slice: otherwise several tiles need the same rows
/// and each would compute them again. The ops of `onlyFused` have no user
/// outside of the tile.
static std::string whyNotFused(tensor::ExtractSliceOp slice, OpResult producer,
                               unsigned numLoops,
                               const DenseSet<Operation *> &onlyFused) {
  Operation *op = producer.getOwner();
  if (!isa<TilingInterface>(op))
    return "it cannot be tiled";
  if (isLoopOfKernel(op))
    return "its kernel makes the loop over its rows";
  if (!isForGPU(op) && hasEffectsInBody(op))
    return "its body has effects, which stay in their order";
  if (isCopiedByKernel(slice))
    return "the kernel that reads it copies it from global memory";
  if (isComparedWithItself(producer) && dependsOnOrder(op))
    return "it is compared with itself, and two tiles of it could round in two "
           "orders";
  unsigned cut = llvm::count_if(slice.getMixedOffsets(), [](OpFoldResult o) {
    return !isa<Attribute>(o);
  });
  if (cut < numLoops)
    return "several tiles need the same rows of it";
  // A mean over rows would otherwise compute all rows that it spans in one
  // tile.
  SmallVector<unsigned> rows = getRowDims(cast<TilingInterface>(op));
  if (rows.size() > numLoops)
    return "it has more rows to run in parallel";
  if (isForGPU(op) && !hasBoundedTile(op, rows))
    return "a tile of it has no bounded size";
  if (onlyFused.contains(op))
    return "";
  Operation *user = nullptr;
  for (OpResult result : op->getResults())
    for (Operation *other : result.getUsers()) {
      // Slices inside the loop, and the loop that carries a destination, stand
      // for the consumer that is being tiled.
      if (isa<tensor::ExtractSliceOp, tensor::DimOp>(other) ||
          other->isAncestor(slice))
        continue;
      if (user && user != other)
        return "its result has several users";
      user = other;
    }
  return "";
}

/// The producers of `consumer`, near and far, that nothing else uses. A part
/// that two ops of a tile read is computed for each of them; the copies are
/// equal, so that common subexpression elimination keeps one.
static DenseSet<Operation *> getOnlyFused(Operation *consumer) {
  DenseSet<Operation *> fused;
  for (Operation &op : llvm::reverse(*consumer->getBlock())) {
    if (!op.isBeforeInBlock(consumer) || !isa<TilingInterface>(op) ||
        op.use_empty())
      continue;
    if (llvm::all_of(op.getUsers(), [&](Operation *user) {
          return user == consumer || fused.contains(user) ||
                 isa<tensor::DimOp>(user);
        }))
      fused.insert(&op);
  }
  return fused;
}

/// Erases what tiling left unused in `loop`: slices of whole operands of which
/// the tile is computed inside. They would tie the loop to those operands.
static void eraseDeadOps(RewriterBase &rewriter, scf::ForallOp loop) {
  for (Operation &op :
       llvm::make_early_inc_range(llvm::reverse(*loop.getBody())))
    if (isOpTriviallyDead(&op))
      rewriter.eraseOp(&op);
}

//===----------------------------------------------------------------------===//
// The pass
//===----------------------------------------------------------------------===//

namespace {
struct TileAndFusePass
    : public mlir::moe::impl::MoETileAndFusePassBase<TileAndFusePass> {
  using Base::Base;

  void runOnOperation() override {
    if (tileSize < 1) {
      getOperation().emitError()
          << "expected tiles of at least 1 row, found " << tileSize.getValue();
      return signalPassFailure();
    }
    hasGrid = isForGPU(getOperation());
    IRRewriter rewriter(&getContext());
    if (hasGrid)
      for (Block &block : getOperation().getBody())
        mergeEqualChecks(rewriter, block);
    // Consumers come before their producers, so that a producer is fused into
    // its consumer before it is tiled on its own.
    SmallVector<TilingInterface> ops;
    getOperation().walk([&](TilingInterface op) {
      if (!op->getParentOfType<scf::ForallOp>())
        ops.push_back(op);
    });
    DenseSet<Operation *> taken;
    for (TilingInterface op : llvm::reverse(ops)) {
      if (taken.contains(op) || getRowDims(op).empty())
        continue;
      // No work for many blocks: it is left to be cut along its reduction.
      if (hasGrid && isLongReduction(op))
        continue;
      if (failed(tileGroup(rewriter, op, taken)))
        return signalPassFailure();
    }
  }

private:
  /// Tiles the group of `seed`; its members, which are erased, become taken.
  LogicalResult tileGroup(IRRewriter &rewriter, TilingInterface seed,
                          DenseSet<Operation *> &taken) {
    RowGroup group(seed, [&](Operation *op) { return taken.contains(op); });
    SmallVector<Operation *> members = group.getMembers();
    SmallVector<TilingInterface> roots = group.getRoots();
    reportWholeConsumers(group);
    RowTile tile = getTile(rewriter, group);
    // Consumers first: a root that feeds another one is still an op then, and
    // not the result of a loop.
    SmallVector<scf::ForallOp> loops;
    for (TilingInterface root : llvm::reverse(roots)) {
      FailureOr<scf::ForallOp> loop =
          tileRoot(rewriter, root, group, tile, taken);
      if (failed(loop))
        return failure();
      loops.insert(loops.begin(), *loop);
    }
    taken.insert(members.begin(), members.end());
    for (Operation *member : llvm::reverse(members))
      if (member->use_empty())
        rewriter.eraseOp(member);
    numTiled += roots.size();
    numFused += members.size() - roots.size();
    if (loops.size() > 1)
      mergeLoops(rewriter, loops);
    return success();
  }

  /// The most rows that a kernel of the group wants, without such `tile-size`
  /// of the loop whose rows share most; fewer where the threads of a CPU would
  /// not all have tiles, or where what a GPU's ops hand on would not fit into a
  /// block.
  RowTile getTile(IRRewriter &rewriter, const RowGroup &group) {
    SmallVector<Operation *> members = group.getMembers();
    std::optional<WantedTile> wanted;
    bool isPlanned = false;
    for (Operation *member : members) {
      std::optional<WantedTile> own =
          getWantedTile(cast<TilingInterface>(member), group.getRows(member));
      if (own && (!wanted || own->rows > wanted->rows))
        wanted = own;
      KernelConfigAttr config = getKernelConfig(member);
      isPlanned |= config && config.getSharedBytes() > 0;
    }
    unsigned loop = hasGrid ? group.getNumLoops() - 1 : group.getSharingLoop();
    WantedTile tile = wanted.value_or(WantedTile{loop, tileSize});
    if (hasGrid) {
      int64_t bytes = isPlanned ? 0 : group.getBytesARow();
      while (tile.rows > 1 && tile.rows * bytes > ::moe::kMaxStaticSharedBytes)
        tile.rows /= 2;
      // Wide rows give the threads of a block work, and a warp sums each.
      constexpr int64_t kFewWideRows = 4, kElements = 4096;
      int64_t elements = group.isOfRouting() ? 0 : group.getMostElementsARow();
      while (tile.rows > kFewWideRows && tile.rows * elements > kElements)
        tile.rows /= 2;
    }
    OpFoldResult rows = rewriter.getIndexAttr(tile.rows);
    if (hasGrid || tile.rows <= tileSize)
      return {tile.loop, rows};
    // In front of all loops of the group.
    auto first = cast<TilingInterface>(members.front());
    ImplicitLocOpBuilder builder(first.getLoc(), rewriter);
    builder.setInsertionPoint(first);
    Value threads = buildThreadCount(builder);
    if (threads)
      rows = chooseTileRows(builder, first, group.getRows(first), threads,
                            tileSize, tile);
    return {tile.loop, rows};
  }

  FailureOr<scf::ForallOp> tileRoot(IRRewriter &rewriter, TilingInterface root,
                                    const RowGroup &group, const RowTile &tile,
                                    DenseSet<Operation *> &taken) {
    ArrayRef<unsigned> rows = group.getRows(root);
    scf::SCFTilingOptions tiling;
    tiling.setLoopType(scf::SCFTilingOptions::LoopType::ForallOp)
        .setTileSizes(getTileSizes(root, rows, tile));
    if (hasGrid)
      tiling.setMapping(getBlockMapping(&getContext(), rows.size()));

    DenseSet<Operation *> onlyFused;
    if (hasGrid)
      onlyFused = getOnlyFused(root);
    scf::SCFTileAndFuseOptions options;
    options.setTilingOptions(tiling);
    options.setFusionControlFn(
        [&](tensor::ExtractSliceOp slice, OpResult producer, bool isInit)
            -> std::optional<scf::SCFTileAndFuseOptions::ControlFnResult> {
          Operation *op = producer.getOwner();
          if (hasEmptyOperand(op))
            return std::nullopt;
          std::string reason;
          if (!group.contains(op)) {
            auto missed = group.getMissed().find(op);
            reason =
                missed != group.getMissed().end() && !onlyFused.contains(op)
                    ? missed->second
                    : whyNotFused(slice, producer, rows.size(), onlyFused);
          }
          if (reason.empty())
            return scf::SCFTileAndFuseOptions::ControlFnResult{};
          // A destination is storage, not work that could be shared.
          if (!isInit && !isa<tensor::EmptyOp>(op))
            reportNotFused(root, op, reason);
          return std::nullopt;
        });

    rewriter.setInsertionPoint(root);
    FailureOr<scf::SCFTileAndFuseResult> result =
        scf::tileConsumerAndFuseProducersUsingSCF(rewriter, root, options);
    if (failed(result))
      return root->emitOpError("expected the op to tile over its rows");
    for (OpResult value : root->getResults())
      if (Value replacement = result->replacements.lookup(value))
        rewriter.replaceAllUsesWith(value, replacement);
    for (Operation *producer : result->fusedProducers)
      if (!group.contains(producer)) {
        ++numFused;
        taken.insert(producer);
        if (producer->use_empty())
          rewriter.eraseOp(producer);
      }
    auto loop = cast<scf::ForallOp>(result->loops.front().getOperation());
    if (!hasGrid)
      taken.insert_range(sliceBroadcasts(rewriter, loop));
    eraseDeadOps(rewriter, loop);
    return loop;
  }

  void reportNotFused(Operation *consumer, Operation *producer,
                      StringRef reason) {
    // A reshape is no work that could be shared; what it shows may be.
    while (isa_and_nonnull<tensor::ExpandShapeOp, tensor::CollapseShapeOp>(
        producer)) {
      producer = producer->getOperand(0).getDefiningOp();
      reason = "a reshape lies between them";
    }
    if (!producer)
      return;
    ++numNotFused;
    remark::missed(producer->getLoc(),
                   remark::RemarkOpts::name("TileAndFuse").category(DEBUG_TYPE))
        << (producer->getName().getStringRef() + " not fused into " +
            consumer->getName().getStringRef())
               .str()
        << remark::reason("{0}", reason);
  }

  /// Says why ops of the dialect that read the group's results row by row, but
  /// need all rows, do not run in its loop.
  void reportWholeConsumers(const RowGroup &group) {
    for (Operation *member : group.getMembers())
      for (OpOperand &use : member->getUses()) {
        auto user = dyn_cast<MoEStructuredOpInterface>(use.getOwner());
        // On a CPU moe-fuse-reductions tries, and reports, next.
        if (!user || group.contains(user) ||
            (!hasGrid && isa<SplitReductionOpInterface>(use.getOwner())) ||
            !getRowDims(cast<TilingInterface>(user.getOperation())).empty())
          continue;
        AffineMap map = cast<IndexingMapOpInterface>(user.getOperation())
                            .getMatchingIndexingMap(&use);
        bool isReduction = llvm::any_of(map.getResults(), [&](AffineExpr expr) {
          auto dim = dyn_cast<AffineDimExpr>(expr);
          return dim && user.getDims()[dim.getPosition()].iterator ==
                            utils::IteratorType::reduction;
        });
        ++numNotFused;
        remark::missed(
            user->getLoc(),
            remark::RemarkOpts::name("TileAndFuse").category(DEBUG_TYPE))
            << (user->getName().getStringRef() + " not fused with " +
                member->getName().getStringRef())
                   .str()
            << remark::reason(
                   "{0}", isReduction
                              ? "it sums over the rows that the loop cuts, and "
                                "each tile would need sums of its own"
                              : "it needs all rows at once");
      }
  }

  /// Whether tiles become the blocks of a GPU's grid.
  bool hasGrid = false;
};
} // namespace
