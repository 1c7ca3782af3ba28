//===- Dispersion.cpp - mad_dispersion to a grid --------------------------===//
//
// A cluster of blocks takes a slab of columns, a range of the clusters of
// tokens and a part of the tokens, of which each block takes its share. A block
// lists its tokens of the range, in order, and its warps add their rows to
// tables of one row a cluster in workgroup memory, whose elements no other
// thread touches:
//
//   list = (token, cluster) of each token of the range       (ballots)
//   for each of the list, 16 at a time, a warp of each subpart in turn:
//     table[subpart, cluster, column] += h[token, column]
//   table[0] = sum over the subparts,  total = sum over the blocks
//
// where all sums have a fixed order, and the next 16 rows are loaded while 16
// are added. With the means that follow from the totals the list is gone
// through again, and the table adds up deviations. Only rows of the range are
// read, once a pass, but for the first one of a block, which fills up the last
// 16. Nothing but operands and results crosses global memory,
// as long as one part is enough. With more tokens there are more parts. Then
// each pass is a loop of its own that leaves the totals of the parts in global
// memory, and is followed by one that combines them; with one part these loops
// have no blocks.
//
//===----------------------------------------------------------------------===//

#include "DispersionSums.h"

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

//===----------------------------------------------------------------------===//
// Combination of the parts
//===----------------------------------------------------------------------===//

/// out = sum / count, 0 for an empty cluster (E14). `partCounts` is null if
/// the counts have been combined before. A warp takes 32 columns of a cluster,
/// so that its lanes read the counts together.
static void emitQuotients(ThreadBuilder &b, MadDispersionOp op, Value thread,
                          Value numWarps, Value parts, Value sums,
                          Value partCounts, Value out) {
  Value width = b.index(kWarpSize), columns, units, groups;
  columns = memref::DimOp::create(b, out, b.index(1));
  groups = b.op<arith::DivUIOp>(b.add(columns, b.index(kWarpSize - 1)), width);
  units = b.mul(memref::DimOp::create(b, out, b.index(0)), groups);
  Value lane = b.op<arith::RemUIOp>(thread, width);
  Value warp = b.op<arith::DivUIOp>(thread, width);
  Value isFirst = b.compare(CmpIPredicate::eq, lane, b.index(0));
  auto loop = scf::ForOp::create(b, warp, units, numWarps);
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPointToStart(loop.getBody());
  Value unit = loop.getInductionVar();
  Value cluster = b.op<arith::DivUIOp>(unit, groups);
  Value group = b.op<arith::RemUIOp>(unit, groups);
  Value column = b.add(b.mul(group, width), lane);
  Value count = b.loop(
      lane, partCounts ? parts : b.index(1), kWarpSize, ValueRange{b.i32(0)},
      [&](Value part, ValueRange sum) -> SmallVector<Value> {
        SmallVector<Value> place{cluster};
        if (partCounts)
          place.insert(place.begin(), part);
        Value buffer = partCounts ? partCounts : op.getOuts()[2];
        return {b.add(sum[0], memref::LoadOp::create(b, buffer, place))};
      })[0];
  count = b.reduceLanes(count, kWarpSize,
                        [&](Value x, Value y) { return b.add(x, y); });
  if (partCounts) {
    Value isLeader =
        b.both(isFirst, b.compare(CmpIPredicate::eq, group, b.index(0)));
    b.ifThen(isLeader, [&] {
      memref::StoreOp::create(b, count, op.getOuts()[2], cluster);
    });
  }
  b.ifThen(b.compare(CmpIPredicate::ult, column, columns), [&] {
    Value sum = b.loop(b.index(0), parts, 1, ValueRange{b.f32(0.0)},
                       [&](Value part, ValueRange sum) -> SmallVector<Value> {
                         Value term = memref::LoadOp::create(
                             b, sums, ValueRange{part, cluster, column});
                         return {b.add(sum[0], term)};
                       })[0];
    Value isEmpty = b.compare(CmpIPredicate::eq, count, b.i32(0));
    Value size = arith::SIToFPOp::create(b, b.getF32Type(), count);
    Value quotient = b.select(isEmpty, b.f32(0.0), b.div(sum, size));
    memref::StoreOp::create(b, quotient, out, ValueRange{cluster, column});
  });
}

//===----------------------------------------------------------------------===//
// Pattern
//===----------------------------------------------------------------------===//

static bool hasGridKernel(MadDispersionOp op) {
  return op.getMeasure() != DispersionMeasure::Pairwise;
}

namespace {
struct MadDispersionToGrid : OpRewritePattern<MadDispersionOp> {
  MadDispersionToGrid(MLIRContext *context, BlockShape block)
      : OpRewritePattern(context), block(block) {}

  LogicalResult matchAndRewrite(MadDispersionOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics() || !hasGridKernel(op))
      return rewriter.notifyMatchFailure(op, "expected buffers, and a measure "
                                             "that needs no pairs");
    ThreadBuilder b(op.getLoc(), rewriter);
    DispersionPlan plan(b, op, block);
    Value spread = op.getOuts()[0], mean = op.getOuts()[1], sums, counts;
    if (plan.mayHaveParts()) {
      sums = allocateParts(b, plan, spread, b.getF32Type());
      counts = allocateParts(b, plan, op.getOuts()[2], b.getI32Type());
    }
    emitGrid(b, [&] {
      BlockSums(b, op, plan, plan.numParts).emitSums(sums, counts);
    });
    if (plan.mayHaveParts()) {
      emitCombination(b, op, plan, sums, counts, mean);
      emitGrid(b, [&] {
        BlockSums(b, op, plan, plan.numDeviating).emitDeviations(sums);
      });
      emitCombination(b, op, plan, sums, Value(), spread);
    }
    rewriter.eraseOp(op);
    return success();
  }

private:
  /// Emits a loop, after which `b` goes on.
  static void emitGrid(ThreadBuilder &b, function_ref<void()> emit) {
    OpBuilder::InsertionGuard guard(b);
    emit();
  }

  /// A buffer of the shape of `whole` for each part.
  static Value allocateParts(ThreadBuilder &b, const DispersionPlan &plan,
                             Value whole, Type element) {
    auto type = cast<MemRefType>(whole.getType());
    SmallVector<int64_t> shape{ShapedType::kDynamic};
    llvm::append_range(shape, type.getShape());
    SmallVector<Value> sizes{plan.parts};
    for (int64_t dim = 0; dim < type.getRank(); ++dim)
      if (type.isDynamicDim(dim))
        sizes.push_back(memref::DimOp::create(b, whole, dim));
    return memref::AllocOp::create(b, MemRefType::get(shape, element), sizes);
  }

  void emitCombination(ThreadBuilder &b, MadDispersionOp op,
                       const DispersionPlan &plan, Value sums, Value counts,
                       Value out) const {
    emitGrid(b, [&] {
      Value id = createGrid(b, plan.numCombining);
      Workers workers = Workers::ofGrid(b, block, id, /*numBlocks=*/1);
      Value numWarps =
          b.mul(plan.combining, b.index(block.numThreads / kWarpSize));
      emitQuotients(b, op, workers.thread, numWarps, plan.parts, sums, counts,
                    out);
    });
  }

  BlockShape block;
};
} // namespace

void mlir::moe::addDispersionFacts(KernelFacts &facts) {
  facts.addForms<MadDispersionOp>(
      hasGridKernel,
      "a measure that needs no pairs of tokens: mad or variance");
}

void mlir::moe::populateDispersionToGridPatterns(RewritePatternSet &patterns,
                                                 BlockShape block) {
  patterns.add<MadDispersionToGrid>(patterns.getContext(), block);
}
