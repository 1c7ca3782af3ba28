//===- Adjacency.cpp - adjacency_update to a grid -------------------------===//
//
// Two loops over blocks. The first counts: a group of G >= k lanes takes a
// token, lane a holds its a-th expert, and every pair of lanes (a, b) adds 1 to
// C[expert a, expert b]. Counts are integers, so that no order of the atomics
// changes a bit. A graph that fits into workgroup memory is counted there, and
// each block leaves its own counts; a larger one is counted in place, after a
// loop that clears it.
//
// The second loop adds up the blocks' counts and blends, entry by entry:
//
//   a_new[r, c] = beta a[r, c] + (1 - beta) C[r, c] / D
//
// with D the sum of row r (`row`), of column c (`col`) or C[c, c] (`eq7`), and
// 0 where D is 0 (E16). C is symmetric, so sums of rows are sums of columns; a
// token adds to the sum of row r the number of its experts if r is one of them,
// so that the sums are counted like C. All counts of a block lie in one buffer:
//
//   C, E x E | sums of rows, E | tokens that selected an expert, 1
//
//===----------------------------------------------------------------------===//

#include "KernelFacts.h"
#include "ThreadBuilder.h"
#include "ThreadLowerings.h"

#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// Blocks that count.
static constexpr int64_t kCountingBlocks = 64;
/// Blocks that blend, at most.
static constexpr int64_t kBlendingBlocks = 128;

//===----------------------------------------------------------------------===//
// Counting
//===----------------------------------------------------------------------===//

namespace {
/// Emits what one lane does for the tokens of its group.
class CoSelections {
public:
  CoSelections(ThreadBuilder &b, AdjacencyUpdateOp op, Value counts,
               Workers workers)
      : b(b), op(op), counts(counts),
        numSelected(cast<MemRefType>(op.getIndices().getType()).getDimSize(1)),
        lanes(std::min<int64_t>(llvm::PowerOf2Ceil(numSelected), kWarpSize)),
        workers(workers) {
    numExperts = memref::DimOp::create(b, op.getA(), b.index(0));
  }

  void emit();

private:
  void readExperts(Value token, Value isToken);
  void dropRepeated();
  void addPairs();
  /// The value of lane `place % lanes` of the group in slot `place / lanes`.
  Value fromPlace(ArrayRef<Value> slots, int64_t place) {
    Value source = b.add(firstLane, b.i32(place % lanes));
    return b.shuffleFrom(slots[place / lanes], source);
  }
  void addOne(Value condition, Value position, Value amount) {
    auto ifCounts = scf::IfOp::create(b, condition, /*withElseRegion=*/false);
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(ifCounts.thenBlock());
    b.atomicAdd(counts, position, amount);
  }
  Value isNone(Value expert) {
    return b.compare(CmpIPredicate::slt, expert, b.i32(0));
  }

  ThreadBuilder &b;
  AdjacencyUpdateOp op;
  Value counts;
  int64_t numSelected, lanes;
  Workers workers;
  Value numExperts;
  /// The lane in its group and the group's first lane in the warp.
  Value lane, firstLane;
  /// The experts of the places lane, lane + lanes, ... of the token; -1 for
  /// none.
  SmallVector<Value> experts;
};
} // namespace

void CoSelections::readExperts(Value token, Value isToken) {
  experts.clear();
  Value indices = op.getIndices();
  Type type = getElementTypeOrSelf(indices.getType());
  Value limit = b.toInteger(numExperts, type);
  if (Value mask = op.getMask())
    isToken = b.both(isToken, memref::LoadOp::create(b, mask, token));
  for (int64_t first = 0; first < numSelected; first += lanes) {
    Value place = b.add(lane, b.i32(first));
    Value exists = isToken;
    if (first + lanes > numSelected) {
      exists = b.both(exists,
                      b.compare(CmpIPredicate::slt, place, b.i32(numSelected)));
      place = b.op<arith::MinSIOp>(place, b.i32(numSelected - 1));
    }
    Value expert =
        memref::LoadOp::create(b, indices, ValueRange{token, b.toIndex(place)});
    Value isExpert = b.compare(CmpIPredicate::ult, expert, limit);
    if (!type.isInteger(32))
      expert = arith::TruncIOp::create(b, b.getI32Type(), expert);
    experts.push_back(b.select(b.both(exists, isExpert), expert, b.i32(-1)));
  }
}

/// An expert that the token selected at an earlier place is no further element
/// of the set.
void CoSelections::dropRepeated() {
  SmallVector<Value> distinct(experts);
  for (int64_t place = 0; place + 1 < numSelected; ++place) {
    Value earlier = fromPlace(experts, place);
    for (int64_t slot = place / lanes; slot < int64_t(experts.size()); ++slot) {
      Value isLater = b.compare(CmpIPredicate::sgt,
                                b.add(lane, b.i32(slot * lanes)), b.i32(place));
      Value isSame = b.compare(CmpIPredicate::eq, experts[slot], earlier);
      distinct[slot] =
          b.select(b.both(isLater, isSame), b.i32(-1), distinct[slot]);
    }
  }
  experts = distinct;
}

void CoSelections::addPairs() {
  Value one = b.i32(1), numDistinct = b.i32(0);
  Value columns = b.toI32(numExperts);
  for (int64_t place = 0; place < numSelected; ++place) {
    Value other = fromPlace(experts, place);
    Value isOther = b.no(isNone(other));
    numDistinct =
        b.add(numDistinct, arith::ExtUIOp::create(b, b.getI32Type(), isOther));
    for (Value expert : experts) {
      Value counted = b.both(isOther, b.no(isNone(expert)));
      if (!op.getDiagonal())
        counted = b.both(counted, b.compare(CmpIPredicate::ne, expert, other));
      addOne(counted, b.add(b.mul(expert, columns), other), one);
    }
  }
  Value sums = b.mul(columns, columns);
  Value perRow =
      op.getDiagonal() ? numDistinct : b.op<arith::SubIOp>(numDistinct, one);
  for (Value expert : experts)
    addOne(b.no(isNone(expert)), b.add(sums, expert), perRow);
  Value isFirst = b.compare(CmpIPredicate::eq, lane, b.i32(0));
  Value selected = b.compare(CmpIPredicate::ne, numDistinct, b.i32(0));
  addOne(b.both(isFirst, selected), b.add(sums, columns), one);
}

/// for base in 0..tokens step groups:
///   token = base + group      (all lanes stay in the loop: shuffles)
void CoSelections::emit() {
  Value numTokens = memref::DimOp::create(b, op.getIndices(), b.index(0));
  Value laneInWarp =
      b.toI32(b.op<arith::RemUIOp>(workers.thread, b.index(kWarpSize)));
  lane = b.op<arith::RemUIOp>(laneInWarp, b.i32(lanes));
  firstLane = b.op<arith::SubIOp>(laneInWarp, lane);
  Value group = b.op<arith::DivUIOp>(workers.thread, b.index(lanes));
  auto loop = scf::ForOp::create(b, b.index(0), numTokens,
                                 b.index(workers.count / lanes));
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPointToStart(loop.getBody());
  Value token = b.add(loop.getInductionVar(), group);
  Value isToken = b.compare(CmpIPredicate::ult, token, numTokens);
  Value last = b.op<arith::SubIOp>(numTokens, b.index(1));
  readExperts(b.op<arith::MinUIOp>(token, last), isToken);
  dropRepeated();
  addPairs();
}

//===----------------------------------------------------------------------===//
// Blending
//===----------------------------------------------------------------------===//

namespace {
/// Emits the new entries of the graph.
class Blend {
public:
  Blend(ThreadBuilder &b, AdjacencyUpdateOp op, Value counts, int64_t numParts)
      : b(b), op(op), counts(counts), numParts(numParts) {}

  void emit(Workers workers);

private:
  /// The sum of counts[part, position] over the parts.
  Value total(Value position) {
    auto loop = scf::ForOp::create(
        b, b.index(0), b.index(numParts), b.index(1), ValueRange{b.i32(0)},
        [&](OpBuilder &builder, Location loc, Value part, ValueRange acc) {
          ThreadBuilder body(loc, builder);
          Value count =
              memref::LoadOp::create(body, counts, ValueRange{part, position});
          scf::YieldOp::create(body, body.add(acc[0], count));
        });
    return loop.getResult(0);
  }

  ThreadBuilder &b;
  AdjacencyUpdateOp op;
  Value counts;
  int64_t numParts;
};
} // namespace

void Blend::emit(Workers workers) {
  Value size = memref::DimOp::create(b, op.getA(), b.index(0));
  Value entries = b.mul(size, size);
  auto loop =
      scf::ForOp::create(b, workers.thread, entries, b.index(workers.count));
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPointToStart(loop.getBody());
  Value entry = loop.getInductionVar();
  Value row = b.op<arith::DivUIOp>(entry, size);
  Value column = b.op<arith::RemUIOp>(entry, size);
  Value divisorAt =
      op.getNorm() == AdjacencyNorm::Eq7
          ? b.add(b.mul(column, size), column)
          : b.add(entries, op.getNorm() == AdjacencyNorm::Row ? row : column);
  auto toFloat = [&](Value count) {
    return arith::SIToFPOp::create(b, b.getF32Type(), count);
  };
  Value count = toFloat(total(entry)), divisor = toFloat(total(divisorAt));
  Value isUnused = b.compare(arith::CmpFPredicate::OEQ, divisor, b.f32(0.0));
  Value weight =
      b.select(isUnused, b.f32(0.0), b.op<arith::DivFOp>(count, divisor));
  double beta = op.getBeta().convertToDouble();
  Value old = memref::LoadOp::create(b, op.getA(), ValueRange{row, column});
  Value blended = b.fma(b.f32(beta), old, b.mul(b.f32(1.0 - beta), weight));
  // E18: without a valid token the graph stays as it is.
  Value isFrozen =
      b.compare(CmpIPredicate::eq, total(b.add(entries, size)), b.i32(0));
  memref::StoreOp::create(b, b.select(isFrozen, old, blended), op.getOuts()[0],
                          ValueRange{row, column});
}

//===----------------------------------------------------------------------===//
// Pattern
//===----------------------------------------------------------------------===//

static bool hasGridKernel(AdjacencyUpdateOp op) {
  auto a = cast<ShapedType>(op.getA().getType());
  auto indices = cast<ShapedType>(op.getIndices().getType());
  return a.hasStaticShape() && !indices.isDynamicDim(1) &&
         indices.getDimSize(1) <= 2 * kWarpSize;
}

namespace {
struct AdjacencyUpdateToGrid : OpRewritePattern<AdjacencyUpdateOp> {
  AdjacencyUpdateToGrid(MLIRContext *context, BlockShape block)
      : OpRewritePattern(context), block(block) {}

  LogicalResult matchAndRewrite(AdjacencyUpdateOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics() || !hasGridKernel(op))
      return rewriter.notifyMatchFailure(op, "expected static buffers");
    int64_t experts = cast<MemRefType>(op.getA().getType()).getDimSize(0);
    int64_t numCounts = experts * experts + experts + 1;
    bool isPrivate = numCounts * 4 <= kMaxStaticWorkgroupBytes;
    int64_t numParts = isPrivate ? kCountingBlocks : 1;

    ThreadBuilder b(op.getLoc(), rewriter);
    auto type = MemRefType::get({numParts, numCounts}, b.getI32Type());
    Value counts = memref::AllocOp::create(b, type);
    if (isPrivate)
      countPrivately(b, op, counts);
    else
      countInPlace(b, op, counts);
    int64_t numBlocks = std::min<int64_t>(
        llvm::divideCeil(experts * experts, block.numThreads), kBlendingBlocks);
    {
      OpBuilder::InsertionGuard guard(b);
      Value id = createGrid(b, b.getIndexAttr(numBlocks));
      Blend(b, op, counts, numParts)
          .emit(Workers::ofGrid(b, block, id, numBlocks));
    }
    rewriter.eraseOp(op);
    return success();
  }

private:
  /// for i in thread..size step workers: body(i)
  static void forEach(ThreadBuilder &b, Workers workers, int64_t size,
                      function_ref<void(ThreadBuilder &, Value)> body) {
    auto loop = scf::ForOp::create(b, workers.thread, b.index(size),
                                   b.index(workers.count));
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(loop.getBody());
    body(b, loop.getInductionVar());
  }

  /// Clears the counts of the block, counts, and leaves them in its part.
  void countPrivately(ThreadBuilder &b, AdjacencyUpdateOp op,
                      Value counts) const {
    OpBuilder::InsertionGuard guard(b);
    int64_t size = cast<MemRefType>(counts.getType()).getDimSize(1);
    Value part = createGrid(b, b.getIndexAttr(kCountingBlocks));
    Value own =
        memref::AllocOp::create(b, MemRefType::get({size}, b.getI32Type()));
    Workers ofBlock = Workers::ofBlock(b, block);
    forEach(b, ofBlock, size, [&](ThreadBuilder &b, Value i) {
      memref::StoreOp::create(b, b.i32(0), own, i);
    });
    gpu::BarrierOp::create(b);
    CoSelections(b, op, own, Workers::ofGrid(b, block, part, kCountingBlocks))
        .emit();
    gpu::BarrierOp::create(b);
    forEach(b, ofBlock, size, [&](ThreadBuilder &b, Value i) {
      Value count = memref::LoadOp::create(b, own, i);
      memref::StoreOp::create(b, count, counts, ValueRange{part, i});
    });
  }

  void countInPlace(ThreadBuilder &b, AdjacencyUpdateOp op,
                    Value counts) const {
    int64_t size = cast<MemRefType>(counts.getType()).getDimSize(1);
    OpBuilder::InsertionGuard guard(b);
    auto grid = [&](function_ref<void(ThreadBuilder &, Workers)> body) {
      OpBuilder::InsertionGuard guard(b);
      Value id = createGrid(b, b.getIndexAttr(kCountingBlocks));
      body(b, Workers::ofGrid(b, block, id, kCountingBlocks));
    };
    grid([&](ThreadBuilder &b, Workers workers) {
      forEach(b, workers, size, [&](ThreadBuilder &b, Value i) {
        memref::StoreOp::create(b, b.i32(0), counts, ValueRange{b.index(0), i});
      });
    });
    grid([&](ThreadBuilder &b, Workers workers) {
      CoSelections(b, op, counts, workers).emit();
    });
  }

  BlockShape block;
};
} // namespace

void mlir::moe::addAdjacencyFacts(KernelFacts &facts) {
  facts.addForms(hasGridKernel);
}

void mlir::moe::populateAdjacencyToGridPatterns(RewritePatternSet &patterns,
                                                BlockShape block) {
  patterns.add<AdjacencyUpdateToGrid>(patterns.getContext(), block);
}
