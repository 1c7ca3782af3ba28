//===- TileAndFuse.cpp - Tile over rows and fuse producers ----------------===//
//
// Matches any op with TilingInterface and DestinationStyleOpInterface. Which
// dims are cut follows from the maps alone; that the op may be cut there is
// what its interface says. A producer is computed inside the tile when each of
// its rows is needed by exactly one tile, so fusion never repeats work.
// Bits do not change.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/SCF/Transforms/TileUsingInterface.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/Remarks.h"
#include "mlir/Interfaces/DestinationStyleOpInterface.h"
#include "mlir/Interfaces/IndexingMapOpInterface.h"
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

/// The dims along which the rows of `op` lie, outermost first: parallel, part
/// of every result, and not the innermost dim of the results, which is kept
/// contiguous unless `op` asks for tiles of its own size. Empty if `op` has no
/// such dims.
static SmallVector<unsigned> getRowDims(TilingInterface op) {
  auto maps = dyn_cast<IndexingMapOpInterface>(op.getOperation());
  auto dps = dyn_cast<DestinationStyleOpInterface>(op.getOperation());
  if (!maps || !dps || dps.getNumDpsInits() == 0)
    return {};
  SmallVector<utils::IteratorType> iterators = op.getLoopIteratorTypes();
  SmallVector<unsigned> spans(iterators.size(), 0), innermost(spans);
  for (OpOperand &init : dps.getDpsInitsMutable()) {
    AffineMap map = maps.getMatchingIndexingMap(&init);
    for (AffineExpr expr : map.getResults())
      if (auto dim = dyn_cast<AffineDimExpr>(expr))
        ++spans[dim.getPosition()];
    if (map.getNumResults() > 1)
      if (auto dim = dyn_cast<AffineDimExpr>(map.getResults().back()))
        ++innermost[dim.getPosition()];
  }
  SmallVector<unsigned> rows;
  bool mayCutInnermost = op->hasAttr(kTileRowsAttrName);
  unsigned numInits = dps.getNumDpsInits();
  for (auto [dim, iterator] : llvm::enumerate(iterators))
    if (iterator == utils::IteratorType::parallel && spans[dim] == numInits &&
        (innermost[dim] < numInits || mayCutInnermost))
      rows.push_back(dim);
  return rows;
}

/// Whether `op` sums over a dim of unknown size into few results: tiles of its
/// rows would be few, and each a long loop.
static bool isLongReduction(TilingInterface op) {
  constexpr int64_t fewRows = 1024;
  auto maps = dyn_cast<IndexingMapOpInterface>(op.getOperation());
  if (!maps)
    return false;
  int64_t rows = 1;
  bool isLong = false;
  for (auto [size, iterator] : llvm::zip_equal(maps.getStaticLoopRanges(),
                                               op.getLoopIteratorTypes())) {
    if (iterator == utils::IteratorType::reduction)
      isLong |= ShapedType::isDynamic(size);
    else if (ShapedType::isDynamic(size))
      return false;
    else
      rows *= size;
  }
  return isLong && rows <= fewRows;
}

/// One row of the outer dims, `tileSize` rows of the last.
static SmallVector<OpFoldResult>
getTileSizes(TilingInterface op, ArrayRef<unsigned> rows, int64_t tileSize) {
  Builder builder(op.getContext());
  SmallVector<OpFoldResult> sizes(op.getLoopIteratorTypes().size(),
                                  builder.getIndexAttr(0));
  for (unsigned dim : rows)
    sizes[dim] = builder.getIndexAttr(dim == rows.back() ? tileSize : 1);
  return sizes;
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

/// Why the producer of `slice` stays outside of the tile; empty to fuse it.
/// `numLoops` tile offsets must all appear in the slice: otherwise several
/// tiles need the same rows and each would compute them again. The ops of
/// `onlyFused` have no user outside of the tile.
static std::string whyNotFused(tensor::ExtractSliceOp slice, OpResult producer,
                               unsigned numLoops,
                               const DenseSet<Operation *> &onlyFused) {
  Operation *op = producer.getOwner();
  if (!isa<TilingInterface>(op))
    return "it cannot be tiled";
  unsigned cut = llvm::count_if(slice.getMixedOffsets(), [](OpFoldResult o) {
    return !isa<Attribute>(o);
  });
  if (cut < numLoops)
    return "several tiles need the same rows of it";
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

namespace {
struct TileAndFusePass
    : public mlir::moe::impl::MoETileAndFusePassBase<TileAndFusePass> {
  using Base::Base;

  void runOnOperation() override {
    IRRewriter rewriter(&getContext());
    // Consumers come before their producers, so that a producer is fused into
    // its consumer before it is tiled on its own.
    SmallVector<TilingInterface> ops;
    getOperation().walk([&](TilingInterface op) {
      if (!op->getParentOfType<scf::ForallOp>())
        ops.push_back(op);
    });
    DenseSet<Operation *> fused;
    for (TilingInterface op : llvm::reverse(ops)) {
      if (fused.contains(op))
        continue;
      if (failed(tile(rewriter, op, fused)))
        return signalPassFailure();
    }
  }

private:
  LogicalResult tile(IRRewriter &rewriter, TilingInterface op,
                     DenseSet<Operation *> &fused) {
    SmallVector<unsigned> rows = getRowDims(op);
    // What is no work for many blocks is left to be cut along its reduction.
    if (rows.empty() || (gpuBlocks && isLongReduction(op)))
      return success();

    int64_t tileRows = tileSize;
    if (auto rows = op->getAttrOfType<IntegerAttr>(kTileRowsAttrName))
      tileRows = rows.getInt();
    op->removeAttr(kTileRowsAttrName);
    scf::SCFTilingOptions tiling;
    tiling.setLoopType(scf::SCFTilingOptions::LoopType::ForallOp)
        .setTileSizes(getTileSizes(op, rows, tileRows));
    if (gpuBlocks)
      tiling.setMapping(getBlockMapping(&getContext(), rows.size()));

    DenseSet<Operation *> onlyFused;
    if (gpuBlocks)
      onlyFused = getOnlyFused(op);
    scf::SCFTileAndFuseOptions options;
    options.setTilingOptions(tiling);
    options.setFusionControlFn(
        [&](tensor::ExtractSliceOp slice, OpResult producer, bool isInit)
            -> std::optional<scf::SCFTileAndFuseOptions::ControlFnResult> {
          std::string reason = whyNotFused(slice, producer, rows.size(), onlyFused);
          if (reason.empty())
            return scf::SCFTileAndFuseOptions::ControlFnResult{};
          // A destination is storage, not work that could be shared.
          if (!isInit)
            reportNotFused(op, producer.getOwner(), reason);
          return std::nullopt;
        });

    rewriter.setInsertionPoint(op);
    FailureOr<scf::SCFTileAndFuseResult> result =
        scf::tileConsumerAndFuseProducersUsingSCF(rewriter, op, options);
    if (failed(result))
      return op->emitOpError("expected the op to tile over its rows");
    ++numTiled;
    for (Operation *producer : result->fusedProducers) {
      ++numFused;
      fused.insert(producer);
    }
    for (OpResult value : op->getResults())
      if (Value replacement = result->replacements.lookup(value))
        rewriter.replaceAllUsesWith(value, replacement);
    eraseDead(rewriter, op, result->fusedProducers.getArrayRef());
    return success();
  }

  /// Erases the untiled op and the producers that only it used.
  static void eraseDead(IRRewriter &rewriter, Operation *op,
                        ArrayRef<Operation *> producers) {
    if (op->use_empty())
      rewriter.eraseOp(op);
    for (Operation *producer : producers)
      if (producer->use_empty())
        rewriter.eraseOp(producer);
  }

  void reportNotFused(Operation *consumer, Operation *producer,
                      StringRef reason) {
    ++numNotFused;
    remark::missed(producer->getLoc(),
                   remark::RemarkOpts::name("TileAndFuse").category(DEBUG_TYPE))
        << ("not fused into " + consumer->getName().getStringRef()).str()
        << remark::reason("{0}", reason);
  }
};
} // namespace
