//===- MapLoopsToBlocks.cpp - Parallel loops of the program to blocks -----===//
//
// A program may bring loops that run in parallel, such as one over the experts
// of a layer, each of which works on its run of rows. Their iterations become
// blocks. A run has an unknown number of rows, so it is cut into chunks, each
// a block: as many for every run as the longest run could have, most of which
// find nothing to do.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/Passes.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEMAPLOOPSTOBLOCKSPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

/// Rows of a run that one block computes: those of one tile of a product on
/// tensor cores.
static constexpr int64_t kChunkRows = 64;

namespace {
/// Rows [begin, begin + length) of what a loop writes, known inside of it only.
struct Run {
  Value begin, length;
};
} // namespace

/// The run that the loop writes; none if it writes something else.
static std::optional<Run> getRun(scf::ForallOp loop) {
  auto inserts = llvm::to_vector(
      loop.getTerminator().getOps<tensor::ParallelInsertSliceOp>());
  if (inserts.size() != 1 || inserts[0].getMixedSizes().size() < 2)
    return std::nullopt;
  auto begin = dyn_cast<Value>(inserts[0].getMixedOffsets()[0]);
  auto length = dyn_cast<Value>(inserts[0].getMixedSizes()[0]);
  auto isInside = [&](Value value) {
    return value && value.getDefiningOp() &&
           value.getDefiningOp()->getBlock() == loop.getBody();
  };
  if (!isInside(begin) || !isInside(length))
    return std::nullopt;
  return Run{begin, length};
}

/// The slices that are cut along the run.
static SmallVector<Operation *> getSlices(scf::ForallOp loop, Run run) {
  SmallVector<Operation *> slices;
  loop.walk([&](OffsetSizeAndStrideOpInterface slice) {
    if (llvm::is_contained(slice.getMixedSizes(), OpFoldResult(run.length)))
      slices.push_back(slice);
  });
  return slices;
}

/// Whether each row of the run is computed from the same row of its operands.
static bool hasIndependentRows(scf::ForallOp loop, Run run) {
  for (Operation *slice : getSlices(loop, run)) {
    auto cut = cast<OffsetSizeAndStrideOpInterface>(slice);
    if (cut.getMixedOffsets()[0] != OpFoldResult(run.begin) ||
        cut.getMixedSizes()[0] != OpFoldResult(run.length) ||
        llvm::is_contained(ArrayRef(cut.getMixedSizes()).drop_front(),
                           OpFoldResult(run.length)))
      return false;
  }
  for (Operation &op : loop.getBody()->without_terminator()) {
    if (isa<tensor::ExtractSliceOp>(op))
      continue;
    auto linalgOp = dyn_cast<linalg::LinalgOp>(op);
    if (!linalgOp) {
      // Scalars: where the run is.
      if (!llvm::all_of(op.getResultTypes(),
                        [](Type type) { return type.isIntOrIndexOrFloat(); }))
        return false;
      continue;
    }
    for (auto [size, iterator] : llvm::zip_equal(
             linalgOp.getStaticLoopRanges(), linalgOp.getIteratorTypesArray()))
      if (ShapedType::isDynamic(size) &&
          iterator != utils::IteratorType::parallel)
        return false;
  }
  return true;
}

/// Puts the bounds of chunk `number` in place of the run's in its slices.
static void useChunk(scf::ForallOp loop, Run run, Value number) {
  SmallVector<Operation *> slices = getSlices(loop, run);
  Operation *last = run.begin.getDefiningOp();
  if (last->isBeforeInBlock(run.length.getDefiningOp()))
    last = run.length.getDefiningOp();
  ImplicitLocOpBuilder b(loop.getLoc(), loop.getContext());
  b.setInsertionPointAfter(last);
  Value rows = arith::ConstantIndexOp::create(b, kChunkRows);
  Value before = arith::MinSIOp::create(
      b, arith::MulIOp::create(b, number, rows), run.length);
  Value begin = arith::AddIOp::create(b, run.begin, before);
  AffineExpr rest = getAffineSymbolExpr(0, b.getContext());
  auto atMost = AffineMap::get(
      0, 1, {rest, getAffineConstantExpr(kChunkRows, b.getContext())},
      b.getContext());
  Value length = affine::AffineMinOp::create(
      b, atMost,
      ValueRange(arith::SubIOp::create(b, run.length, before).getResult()));
  for (Operation *slice : slices) {
    slice->replaceUsesOfWith(run.begin, begin);
    slice->replaceUsesOfWith(run.length, length);
  }
}

/// Makes the iterations of `loop` blocks, those of runs several.
static void mapToBlocks(IRRewriter &rewriter, scf::ForallOp loop) {
  static constexpr gpu::MappingId ids[] = {
      gpu::MappingId::DimX, gpu::MappingId::DimY, gpu::MappingId::DimZ};
  std::optional<Run> run = getRun(loop);
  if (run && !hasIndependentRows(loop, *run))
    run = std::nullopt;
  if (loop.getRank() + (run ? 1 : 0) > static_cast<int64_t>(std::size(ids)))
    return;

  ImplicitLocOpBuilder b(loop.getLoc(), rewriter);
  b.setInsertionPoint(loop);
  SmallVector<OpFoldResult> lower = loop.getMixedLowerBound();
  SmallVector<OpFoldResult> upper = loop.getMixedUpperBound();
  SmallVector<OpFoldResult> step = loop.getMixedStep();
  if (run) {
    lower.push_back(b.getIndexAttr(0));
    step.push_back(b.getIndexAttr(1));
    Value rows = loop.getOutputs()[0];
    OpFoldResult size = tensor::getMixedSize(b, loop.getLoc(), rows, 0);
    AffineExpr symbol = getAffineSymbolExpr(0, b.getContext());
    upper.push_back(affine::makeComposedFoldedAffineApply(
        b, loop.getLoc(), symbol.ceilDiv(kChunkRows), {size}));
  }
  SmallVector<Attribute> mapping;
  for (size_t dim = 0; dim < upper.size(); ++dim)
    mapping.push_back(gpu::GPUBlockMappingAttr::get(
        b.getContext(), ids[upper.size() - 1 - dim]));
  auto blocks = scf::ForallOp::create(b, lower, upper, step, loop.getOutputs(),
                                      b.getArrayAttr(mapping));
  rewriter.eraseOp(blocks.getTerminator());
  SmallVector<Value> arguments(
      ArrayRef(blocks.getInductionVars()).take_front(loop.getRank()));
  llvm::append_range(arguments, blocks.getRegionIterArgs());
  rewriter.mergeBlocks(loop.getBody(), blocks.getBody(), arguments);
  rewriter.replaceOp(loop, blocks.getResults());
  if (run)
    useChunk(blocks, *run, blocks.getInductionVars().back());
}

namespace {
struct MapLoopsToBlocksPass
    : public mlir::moe::impl::MoEMapLoopsToBlocksPassBase<
          MapLoopsToBlocksPass> {
  using Base::Base;

  void runOnOperation() override {
    SmallVector<scf::ForallOp> loops;
    for (auto loop : getOperation().getOps<scf::ForallOp>())
      if (!loop.getMapping() || loop.getMapping()->empty())
        loops.push_back(loop);
    IRRewriter rewriter(&getContext());
    for (scf::ForallOp loop : loops)
      mapToBlocks(rewriter, loop);
  }
};
} // namespace
