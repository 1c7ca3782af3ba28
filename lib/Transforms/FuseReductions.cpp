//===- FuseReductions.cpp - Reductions in the loop over their rows --------===//
//
// Matches an op that folds rows into a table (SplitReductionOpInterface) where
// an scf.forall computes those rows tile by tile. A table a tile would grow
// with the rows, so the loop is cut into a bounded number of parts, each with a
// table and a loop over its tiles:
//
//   %r = scf.forall (%row) = (0) to (%n) step (64)
//   %c = reduce(%r)
//
// becomes
//
//   %r, %t = scf.forall (%first) = (0) to (%n) step (%partRows) {
//     scf.for %row = %first to %end step 64 { the tile; fold it into %t[part] }
//   }
//   %c = combine(%t)
//
// The fold may be taken in any order, so bits do not change. It costs clearing
// and combining the tables, and saves reading the rows again in one thread.
//
//===----------------------------------------------------------------------===//

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Transforms/Passes.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/Dominance.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/IR/Remarks.h"
#include "mlir/Interfaces/IndexingMapOpInterface.h"
#include "mlir/Interfaces/TilingInterface.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEFUSEREDUCTIONSPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

#define DEBUG_TYPE "moe-fuse-reductions"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Rows of a loop
//===----------------------------------------------------------------------===//

/// Where the tiles of a loop put their part of result `number`.
static tensor::ParallelInsertSliceOp getInsert(scf::ForallOp loop,
                                               unsigned number) {
  BlockArgument out = loop.getRegionIterArgs()[number];
  for (Operation &op : loop.getTerminator().getYieldingOps())
    if (auto insert = dyn_cast<tensor::ParallelInsertSliceOp>(op))
      if (insert.getDest() == out)
        return insert;
  return nullptr;
}

/// The position of the dim that the loop cuts in a result, which has its other
/// dims whole.
static std::optional<unsigned> getRowPosition(scf::ForallOp loop,
                                              unsigned number) {
  tensor::ParallelInsertSliceOp insert = getInsert(loop, number);
  if (!insert ||
      insert.getSourceType().getRank() != insert.getDestType().getRank())
    return std::nullopt;
  std::optional<unsigned> rows;
  for (auto [position, offset] : llvm::enumerate(insert.getMixedOffsets())) {
    if (offset == OpFoldResult(loop.getInductionVar(0)))
      rows = position;
    else if (!isZeroInteger(offset))
      return std::nullopt;
  }
  return rows;
}

/// Whether each result of `loop` consists of whole rows, one tile after the
/// other.
static bool isLoopOverRows(scf::ForallOp loop) {
  if (loop.getRank() != 1 || loop.getMapping() ||
      !isZeroInteger(loop.getMixedLowerBound()[0]) ||
      !getConstantIntValue(loop.getMixedStep()[0]))
    return false;
  return llvm::all_of(llvm::seq(loop.getNumResults()), [&](unsigned number) {
    return getRowPosition(loop, number).has_value();
  });
}

//===----------------------------------------------------------------------===//
// Matching
//===----------------------------------------------------------------------===//

namespace {
/// A reduction of the rows of a loop, and its dim that they lie along.
struct Reduction {
  PartialReductionOpInterface op;
  unsigned dim;
  SetVector<unsigned> getDims() const {
    SetVector<unsigned> dims;
    dims.insert(dim);
    return dims;
  }
};
} // namespace

/// Whether `use` is read along the dim that is reduced.
static bool isReduced(OpOperand &use, unsigned dim) {
  return cast<IndexingMapOpInterface>(use.getOwner())
      .getMatchingIndexingMap(&use)
      .isFunctionOfDim(dim);
}

/// The first loop that computes what `reduction` reduces, if there is one.
static scf::ForallOp getLoop(Reduction reduction) {
  for (OpOperand &use : reduction.op->getOpOperands())
    if (auto loop = use.get().getDefiningOp<scf::ForallOp>())
      if (loop->getBlock() == reduction.op->getBlock() &&
          isReduced(use, reduction.dim))
        return loop;
  return nullptr;
}

/// Why the tiles of `loop` cannot fold what `reduction` reads; empty if they
/// can.
static std::string whyNotFolded(Reduction reduction, scf::ForallOp loop,
                                const DominanceInfo &dominance) {
  auto maps = cast<IndexingMapOpInterface>(reduction.op.getOperation());
  for (auto [dim, size] : llvm::enumerate(maps.getStaticLoopRanges()))
    if (dim != reduction.dim && ShapedType::isDynamic(size))
      return "its tables have no bounded size";
  for (OpOperand &use : reduction.op->getOpOperands()) {
    if (!isReduced(use, reduction.dim))
      continue;
    if (use.get().getDefiningOp() != loop) {
      if (!dominance.properlyDominates(use.get(), loop))
        return "a tile needs what is computed behind the loop";
      continue;
    }
    AffineMap map = maps.getMatchingIndexingMap(&use);
    if (!isLoopOverRows(loop) ||
        map.getResult(*getRowPosition(
            loop, cast<OpResult>(use.get()).getResultNumber())) !=
            getAffineDimExpr(reduction.dim, map.getContext()))
      return "the loop cuts other dims than the one that is reduced";
  }
  return "";
}

//===----------------------------------------------------------------------===//
// Rewriting
//===----------------------------------------------------------------------===//

namespace {
/// Replaces a loop over tiles and reductions of its rows by one loop over
/// parts.
class LoopOverParts {
public:
  LoopOverParts(RewriterBase &rewriter, scf::ForallOp loop,
                ArrayRef<Reduction> reductions, int64_t numParts)
      : rewriter(rewriter), b(loop.getLoc(), rewriter), loop(loop),
        reductions(reductions) {
    b.setInsertionPoint(loop);
    end = loop.getMixedUpperBound()[0];
    step = *getConstantIntValue(loop.getMixedStep()[0]);
    partRows = getPartRows(numParts);
    for (unsigned number = 0; number < loop.getNumResults(); ++number)
      if (isStored(number))
        stored.push_back(number);
  }

  LogicalResult build();

private:
  OpFoldResult getPartRows(int64_t maxParts);
  bool isStored(unsigned number);
  LogicalResult makeOuts();
  void openLoops();
  void cloneTile();
  LogicalResult foldTile(unsigned number);
  LogicalResult storeParts();
  LogicalResult replace();

  OpFoldResult apply(AffineExpr expr, ArrayRef<OpFoldResult> operands) {
    return affine::makeComposedFoldedAffineApply(
        b, b.getLoc(), AffineMap::get(operands.size(), 0, expr), operands);
  }
  Value toValue(OpFoldResult value) {
    return getValueOrCreateConstantIndexOp(b, b.getLoc(), value);
  }
  OpFoldResult map(OpFoldResult value) {
    auto dynamic = dyn_cast<Value>(value);
    return dynamic ? OpFoldResult(mapping.lookupOrDefault(dynamic)) : value;
  }
  SmallVector<OpFoldResult> map(ArrayRef<OpFoldResult> values) {
    return llvm::map_to_vector(values, [&](OpFoldResult v) { return map(v); });
  }
  /// Where the table of this part lies among those of a reduction.
  LogicalResult getTablePosition(Reduction reduction,
                                 SmallVector<OpFoldResult> &offsets,
                                 SmallVector<OpFoldResult> &sizes) {
    return reduction.op.getPartialResultTilePosition(
        b, 0, ReductionTilingStrategy::PartialReductionOuterParallel, {}, {},
        reduction.getDims(), {OpFoldResult(part)}, offsets, sizes);
  }
  SmallVector<OpFoldResult> ones(unsigned count) {
    return SmallVector<OpFoldResult>(count, b.getIndexAttr(1));
  }

  RewriterBase &rewriter;
  ImplicitLocOpBuilder b;
  scf::ForallOp loop;
  ArrayRef<Reduction> reductions;
  OpFoldResult end, partRows;
  int64_t step;
  /// The results of the old loop that the new one has too, before the tables.
  SmallVector<unsigned> stored;
  SmallVector<Value> outs, updated;
  scf::ForallOp parts;
  scf::ForOp tiles;
  /// The first row of the part, the row behind its last one, its number.
  Value firstRow, endRow, part;
  /// From the tile of the old loop to that of the new one.
  IRMapping mapping;
};
} // namespace

/// The rows of a part: a part a thread where their number is known when the
/// loop runs, since each has a table to clear and to combine; else as many as
/// `maxParts` allows.
OpFoldResult LoopOverParts::getPartRows(int64_t maxParts) {
  // At least one tile, also where there is no row.
  auto clamp = [&](AffineExpr tiles, OpFoldResult operand) {
    return affine::makeComposedFoldedAffineMax(
        b, b.getLoc(),
        AffineMap::get(1, 0, {tiles * step, b.getAffineConstantExpr(step)},
                       b.getContext()),
        {operand});
  };
  AffineExpr first = b.getAffineDimExpr(0);
  Value threads = buildThreadCount(b);
  if (!threads)
    return clamp(first.ceilDiv(step * maxParts), end);
  Value most = arith::ConstantIndexOp::create(b, maxParts);
  Value tiles = toValue(apply(first.ceilDiv(step), {end}));
  Value partTiles = arith::CeilDivSIOp::create(
      b, tiles, arith::MinSIOp::create(b, threads, most));
  return clamp(first, OpFoldResult(partTiles));
}

/// What nothing but the reductions reads need not be stored, if no op asks for
/// more of the destination than the tile's slice of it.
bool LoopOverParts::isStored(unsigned number) {
  auto isFolded = [&](OpOperand &use) {
    return llvm::any_of(reductions, [&](Reduction reduction) {
      return reduction.op == use.getOwner() && isReduced(use, reduction.dim);
    });
  };
  if (!llvm::all_of(loop.getResult(number).getUses(), isFolded))
    return true;
  BlockArgument out = loop.getRegionIterArgs()[number];
  return !llvm::all_of(out.getUsers(), [&](Operation *user) {
    auto slice = dyn_cast<tensor::ExtractSliceOp>(user);
    return isa<tensor::ParallelInsertSliceOp>(user) ||
           (slice &&
            slice.getType().getRank() == slice.getSourceType().getRank());
  });
}

LogicalResult LoopOverParts::makeOuts() {
  for (unsigned number : stored)
    outs.push_back(loop.getOutputs()[number]);
  Value numParts =
      b.createOrFold<arith::CeilDivSIOp>(toValue(end), toValue(partRows));
  for (Reduction reduction : reductions) {
    SmallVector<OpFoldResult> sizes(reduction.op.getLoopIteratorTypes().size(),
                                    b.getIndexAttr(0));
    sizes[reduction.dim] = getAsOpFoldResult(numParts);
    FailureOr<SmallVector<Value>> tables =
        reduction.op.generateInitialTensorForPartialReduction(
            b, b.getLoc(), sizes, reduction.getDims());
    if (failed(tables) || tables->size() != 1)
      return failure();
    outs.push_back(tables->front());
  }
  return success();
}

void LoopOverParts::openLoops() {
  parts = scf::ForallOp::create(
      b, ArrayRef<OpFoldResult>{b.getIndexAttr(0)}, ArrayRef<OpFoldResult>(end),
      ArrayRef<OpFoldResult>(partRows), outs, std::nullopt);
  b.setInsertionPoint(parts.getTerminator());
  firstRow = parts.getInductionVar(0);
  AffineExpr first = b.getAffineDimExpr(0), rows = b.getAffineDimExpr(1),
             last = b.getAffineDimExpr(2);
  endRow = toValue(affine::makeComposedFoldedAffineMin(
      b, b.getLoc(), AffineMap::get(3, 0, {first + rows, last}, b.getContext()),
      {firstRow, partRows, end}));
  part = b.createOrFold<arith::DivUIOp>(firstRow, toValue(partRows));
  tiles = scf::ForOp::create(b, firstRow, endRow,
                             arith::ConstantIndexOp::create(b, step),
                             parts.getRegionIterArgs());
  b.setInsertionPointToStart(tiles.getBody());
}

/// The tile of the old loop, which stores what is stored into the new loop's
/// results.
void LoopOverParts::cloneTile() {
  mapping.map(loop.getInductionVar(0), tiles.getInductionVar());
  for (auto [number, out] : llvm::zip(stored, tiles.getRegionIterArgs()))
    mapping.map(loop.getRegionIterArgs()[number], out);
  for (Operation &op : loop.getBody()->without_terminator()) {
    auto slice = dyn_cast<tensor::ExtractSliceOp>(op);
    auto out =
        slice ? dyn_cast<BlockArgument>(slice.getSource()) : BlockArgument();
    if (out && out.getOwner() == loop.getBody() && !mapping.contains(out)) {
      // A destination of which only the tile's slice exists.
      Value empty = tensor::EmptyOp::create(b, map(slice.getMixedSizes()),
                                            slice.getType().getElementType());
      mapping.map(slice.getResult(), empty);
      continue;
    }
    b.clone(op, mapping);
  }
  for (auto [number, out] : llvm::zip(stored, tiles.getRegionIterArgs())) {
    tensor::ParallelInsertSliceOp insert = getInsert(loop, number);
    updated.push_back(tensor::InsertSliceOp::create(
        b, mapping.lookupOrDefault(insert.getSource()), out,
        map(insert.getMixedOffsets()), map(insert.getMixedSizes()),
        insert.getMixedStrides()));
  }
}

/// Folds the rows of the tile into the part's table of reduction `number`.
LogicalResult LoopOverParts::foldTile(unsigned number) {
  Reduction reduction = reductions[number];
  auto maps = cast<IndexingMapOpInterface>(reduction.op.getOperation());
  SmallVector<OpFoldResult> offsets(reduction.op.getLoopIteratorTypes().size(),
                                    b.getIndexAttr(0)),
      sizes;
  for (int64_t size : maps.getStaticLoopRanges())
    sizes.push_back(b.getIndexAttr(ShapedType::isDynamic(size) ? 0 : size));
  for (OpOperand &use : reduction.op->getOpOperands())
    if (use.get().getDefiningOp() == loop && isReduced(use, reduction.dim)) {
      unsigned result = cast<OpResult>(use.get()).getResultNumber();
      tensor::ParallelInsertSliceOp insert = getInsert(loop, result);
      unsigned position = *getRowPosition(loop, result);
      offsets[reduction.dim] = map(insert.getMixedOffsets()[position]);
      sizes[reduction.dim] = map(insert.getMixedSizes()[position]);
    }
  Value table = tiles.getRegionIterArgs()[stored.size() + number];
  FailureOr<TilingResult> folded = reduction.op.tileToPartialReduction(
      b, b.getLoc(), ReductionTilingStrategy::PartialReductionOuterParallel,
      table, offsets, sizes, reduction.getDims(), {OpFoldResult(part)});
  SmallVector<OpFoldResult> tableOffsets, tableSizes;
  if (failed(folded) ||
      failed(getTablePosition(reduction, tableOffsets, tableSizes)))
    return failure();
  // The rows of the loop are those of the tile at hand.
  for (Operation *op : folded->generatedSlices) {
    auto slice = dyn_cast<tensor::ExtractSliceOp>(op);
    if (!slice || slice.getSource().getDefiningOp() != loop)
      continue;
    auto insert =
        getInsert(loop, cast<OpResult>(slice.getSource()).getResultNumber());
    Value rows = mapping.lookupOrDefault(insert.getSource());
    if (rows.getType() != slice.getType()) {
      OpBuilder::InsertionGuard guard(b);
      b.setInsertionPoint(slice);
      rows = tensor::CastOp::create(b, slice.getType(), rows);
    }
    rewriter.replaceOp(slice, rows);
  }
  updated.push_back(tensor::InsertSliceOp::create(
      b, folded->tiledValues[0], table, tableOffsets, tableSizes,
      ones(tableOffsets.size())));
  return success();
}

/// Hands the rows and the tables of the part to the results of the loop.
LogicalResult LoopOverParts::storeParts() {
  scf::YieldOp::create(b, updated);
  b.setInsertionPointAfter(tiles);
  for (auto [number, value] : llvm::enumerate(tiles.getResults())) {
    BlockArgument out = parts.getRegionIterArgs()[number];
    SmallVector<OpFoldResult> offsets, sizes;
    if (number < stored.size()) {
      sizes = tensor::getMixedSizes(b, b.getLoc(), out);
      offsets.assign(sizes.size(), b.getIndexAttr(0));
      unsigned position = *getRowPosition(loop, stored[number]);
      offsets[position] = firstRow;
      sizes[position] = apply(b.getAffineDimExpr(0) - b.getAffineDimExpr(1),
                              {OpFoldResult(endRow), OpFoldResult(firstRow)});
    } else if (failed(getTablePosition(reductions[number - stored.size()],
                                       offsets, sizes))) {
      return failure();
    }
    Value slice = tensor::ExtractSliceOp::create(b, value, offsets, sizes,
                                                 ones(sizes.size()));
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToEnd(parts.getTerminator().getBody());
    tensor::ParallelInsertSliceOp::create(b, slice, out, offsets, sizes,
                                          ones(sizes.size()));
  }
  return success();
}

LogicalResult LoopOverParts::replace() {
  for (auto [number, result] : llvm::zip(stored, parts.getResults()))
    rewriter.replaceAllUsesWith(loop.getResult(number), result);
  for (unsigned number = 0; number < reductions.size(); ++number) {
    Reduction reduction = reductions[number];
    b.setInsertionPoint(reduction.op);
    FailureOr<MergeResult> merged = reduction.op.mergeReductions(
        b, reduction.op.getLoc(), parts.getResult(stored.size() + number),
        reduction.getDims());
    if (failed(merged))
      return failure();
    rewriter.replaceOp(reduction.op, merged->replacements);
  }
  rewriter.eraseOp(loop);
  return success();
}

LogicalResult LoopOverParts::build() {
  if (failed(makeOuts()))
    return failure();
  openLoops();
  cloneTile();
  for (unsigned number = 0; number < reductions.size(); ++number)
    if (failed(foldTile(number)))
      return failure();
  if (failed(storeParts()))
    return failure();
  return replace();
}

//===----------------------------------------------------------------------===//
// Pass
//===----------------------------------------------------------------------===//

namespace {
struct FuseReductionsPass
    : public mlir::moe::impl::MoEFuseReductionsPassBase<FuseReductionsPass> {
  using Base::Base;

  void runOnOperation() override {
    DominanceInfo &dominance = getAnalysis<DominanceInfo>();
    llvm::MapVector<Operation *, SmallVector<Reduction>> found;
    getOperation().walk([&](SplitReductionOpInterface op) {
      Reduction reduction{cast<PartialReductionOpInterface>(op.getOperation()),
                          op.getSplitDim()};
      scf::ForallOp loop = getLoop(reduction);
      if (!loop)
        return;
      std::string reason = whyNotFolded(reduction, loop, dominance);
      if (reason.empty() && getNumParts(reduction) < kFewParts)
        reason = "its tables would take more than " + std::to_string(maxBytes) +
                 " bytes";
      if (reason.empty())
        found[loop].push_back(reduction);
      else
        reportNotFused(op, reason);
    });
    IRRewriter rewriter(&getContext());
    for (auto &[loop, reductions] : found) {
      int64_t numParts = maxParts;
      for (Reduction reduction : reductions)
        numParts = std::min(numParts, getNumParts(reduction));
      if (failed(LoopOverParts(rewriter, cast<scf::ForallOp>(loop), reductions,
                               numParts)
                     .build())) {
        loop->emitOpError("expected the reductions of its rows to be split");
        return signalPassFailure();
      }
      numFused += reductions.size();
    }
  }

private:
  /// With fewer parts, the rest of the loop would occupy too few threads.
  static constexpr int64_t kFewParts = 16;

  /// The parts whose tables `maxBytes` hold. A table has the sizes of the
  /// result, and entries of 8 bytes at most.
  int64_t getNumParts(Reduction reduction) {
    int64_t bytes = 8;
    for (int64_t size :
         cast<ShapedType>(reduction.op->getResult(0).getType()).getShape())
      bytes *= std::max<int64_t>(size, 1);
    return std::min<int64_t>(maxParts, maxBytes / bytes);
  }

  void reportNotFused(Operation *op, StringRef reason) {
    ++numNotFused;
    remark::missed(
        op->getLoc(),
        remark::RemarkOpts::name("FuseReductions").category(DEBUG_TYPE))
        << (op->getName().getStringRef() + " not fused into the loop over its "
                                           "rows")
               .str()
        << remark::reason("{0}", reason);
  }
};
} // namespace
