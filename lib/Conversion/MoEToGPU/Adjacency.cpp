//===- Adjacency.cpp - adjacency_update to a grid -------------------------===//
//
// A group of G >= k lanes takes a token, lane a holds its a-th expert, and
// every pair of experts adds 1 to C[row, column], row >= column: C is
// symmetric. Counts are integers, so that no order of the atomics changes a
// bit. A graph that fits into workgroup memory is counted there by the blocks
// of a cluster, which then add up their counts entry by entry and blend
//
//   a_new[r, c] = beta a[r, c] + (1 - beta) C[r, c] / D
//
// with D the sum of row r (`row`), of column c (`col`) or C[c, c] (`eq7`), and
// 0 where D is 0 (E16). Nothing but the operands and the result crosses global
// memory, as long as one cluster suffices. With more tokens there are more
// clusters; each leaves its sums to a second loop, which blends. A larger graph
// is counted in global memory, after a loop that clears it.
//
// A token adds to the sum of row r the number of its experts if r is one of
// them, so that the sums are counted like C. All counts lie in one buffer:
//
//   C, E (E + 1) / 2 | sums of rows, E | tokens that selected an expert, 1
//
//===----------------------------------------------------------------------===//

#include "Cluster.h"
#include "ThreadBuilder.h"
#include "ThreadLowerings.h"

#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Support/ElementBytes.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// Blocks that count in global memory.
static constexpr int64_t kCountingBlocks = 64;
/// Blocks that blend, at most.
static constexpr int64_t kBlendingBlocks = 128;

/// Where the counts of the pair of experts `row` and `column` lie.
static Value getPairPosition(ThreadBuilder &b, Value row, Value column) {
  Value larger = b.op<arith::MaxUIOp>(row, column);
  Value smaller = b.op<arith::MinUIOp>(row, column);
  Value before =
      b.op<arith::ShRUIOp>(b.mul(larger, b.add(larger, b.i32(1))), b.i32(1));
  return b.add(before, smaller);
}

static int64_t getNumPairs(int64_t experts) {
  return experts * (experts + 1) / 2;
}

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

  /// Counts the tokens begin .. end.
  void emit(Value begin, Value end);

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
  Value limit = b.castInt(numExperts, type);
  if (Value mask = op.getMask())
    isToken = b.both(isToken, memref::LoadOp::create(b, mask, token));
  for (int64_t first = 0; first < numSelected; first += lanes) {
    Value place = b.add(lane, b.i32(first));
    Value exists = isToken;
    if (first + lanes > numSelected) {
      exists = b.both(exists,
                      b.compare(CmpIPredicate::slt, place, b.i32(numSelected)));
      place = b.minSigned(place, b.i32(numSelected - 1));
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
  for (int64_t place = 0; place < numSelected; ++place) {
    Value other = fromPlace(experts, place);
    Value isOther = b.negate(isNone(other));
    numDistinct =
        b.add(numDistinct, arith::ExtUIOp::create(b, b.getI32Type(), isOther));
    for (Value expert : experts) {
      // Each pair once: by the lane of its larger expert.
      CmpIPredicate isLarger =
          op.getDiagonal() ? CmpIPredicate::sge : CmpIPredicate::sgt;
      Value counted = b.both(isOther, b.compare(isLarger, expert, other));
      addOne(counted, getPairPosition(b, expert, other), one);
    }
  }
  Value experts32 = b.toI32(numExperts);
  Value sums =
      b.op<arith::ShRUIOp>(b.mul(experts32, b.add(experts32, one)), one);
  Value perRow = op.getDiagonal() ? numDistinct : b.sub(numDistinct, one);
  for (Value expert : experts)
    addOne(b.negate(isNone(expert)), b.add(sums, expert), perRow);
  Value isFirst = b.compare(CmpIPredicate::eq, lane, b.i32(0));
  Value selected = b.compare(CmpIPredicate::ne, numDistinct, b.i32(0));
  addOne(b.both(isFirst, selected), b.add(sums, experts32), one);
}

/// for base in begin..end step groups:
///   token = base + group      (all lanes stay in the loop: shuffles)
void CoSelections::emit(Value begin, Value end) {
  Value laneInWarp =
      b.toI32(b.op<arith::RemUIOp>(workers.thread, b.index(kWarpSize)));
  lane = b.op<arith::RemUIOp>(laneInWarp, b.i32(lanes));
  firstLane = b.sub(laneInWarp, lane);
  Value group = b.op<arith::DivUIOp>(workers.thread, b.index(lanes));
  b.loop(begin, end, workers.count / lanes, [&](Value base) {
    Value token = b.add(base, group);
    Value isToken = b.compare(CmpIPredicate::ult, token, end);
    token = b.op<arith::MinUIOp>(token, b.sub(end, b.index(1)));
    readExperts(token, isToken);
    dropRepeated();
    addPairs();
  });
}

//===----------------------------------------------------------------------===//
// Blending
//===----------------------------------------------------------------------===//

/// A count that all blocks together have found.
using GetCount = function_ref<Value(Value)>;

/// Emits the new entries of the graph. `getPair` gives the counts of the pairs
/// by their position, `getRest` what follows them: the sum of a row by its
/// number, and the tokens as number E.
static void emitBlend(ThreadBuilder &b, AdjacencyUpdateOp op, Workers workers,
                      GetCount getPair, GetCount getRest) {
  int64_t experts = cast<MemRefType>(op.getA().getType()).getDimSize(0);
  Value size = b.i32(experts);
  double beta = op.getBeta().convertToDouble();
  auto toFloat = [&](Value count) {
    return arith::SIToFPOp::create(b, b.getF32Type(), count);
  };
  // E18: without a valid token the graph stays as it is.
  Value isFrozen = b.compare(CmpIPredicate::eq, getRest(size), b.i32(0));
  auto emitEntry = [&](Value entry) {
    Value number = b.toI32(entry);
    Value row = b.op<arith::DivUIOp>(number, size);
    Value column = b.op<arith::RemUIOp>(number, size);
    Value count = toFloat(getPair(getPairPosition(b, row, column)));
    Value divisor = toFloat(
        op.getNorm() == AdjacencyNorm::Eq7
            ? getPair(getPairPosition(b, column, column))
            : getRest(op.getNorm() == AdjacencyNorm::Row ? row : column));
    Value isUnused = b.compare(arith::CmpFPredicate::OEQ, divisor, b.f32(0.0));
    Value weight = b.select(isUnused, b.f32(0.0), b.div(count, divisor));
    SmallVector<Value> place{b.toIndex(row), b.toIndex(column)};
    Value old = memref::LoadOp::create(b, op.getA(), place);
    Value blended = b.fma(b.f32(beta), old, b.mul(b.f32(1.0 - beta), weight));
    memref::StoreOp::create(b, b.select(isFrozen, old, blended),
                            op.getOuts()[0], place);
  };
  b.loop(workers.thread, b.index(experts * experts), workers.count, emitEntry);
}

//===----------------------------------------------------------------------===//
// Pattern
//===----------------------------------------------------------------------===//

static bool hasGridKernel(AdjacencyUpdateOp op) {
  auto a = cast<ShapedType>(op.getA().getType());
  auto indices = cast<ShapedType>(op.getIndices().getType());
  // Threads share the choices of a token: there must be some.
  return a.hasStaticShape() && !indices.isDynamicDim(1) &&
         indices.getDimSize(1) > 0 && indices.getDimSize(1) <= 2 * kWarpSize;
}

/// The tokens of a block so that what its cluster of 8 hands on is 5 % of what
/// it reads: the counts are written once, and each entry that is blended reads
/// its own, its divisor and the tokens'.
static int64_t getTokensPerBlock(AdjacencyUpdateOp op, int64_t numCounts) {
  auto indices = cast<MemRefType>(op.getIndices().getType());
  int64_t tokenBytes =
      indices.getDimSize(1) * getElementBytes(indices.getElementType());
  int64_t numEntries = cast<MemRefType>(op.getA().getType()).getNumElements();
  int64_t partBytes = (numCounts + 3 * numEntries) * sizeof(int32_t);
  return llvm::divideCeil(20 * partBytes, 8 * tokenBytes);
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
    int64_t numCounts = getNumPairs(experts) + experts + 1;
    ThreadBuilder b(op.getLoc(), rewriter);
    if (numCounts * 4 <= ::moe::kMaxStaticSharedBytes)
      countInClusters(b, op, numCounts);
    else
      countInPlace(b, op, numCounts);
    rewriter.eraseOp(op);
    return success();
  }

private:
  using Body = function_ref<void(Value)>;
  /// for i in thread..size step workers: body(i as i32)
  static void forEach(ThreadBuilder &b, Workers workers, int64_t size,
                      Body body) {
    b.loop(workers.thread, b.index(size), workers.count,
           [&](Value i) { body(b.toI32(i)); });
  }
  static Value load(ThreadBuilder &b, Value buffer, Value position) {
    return memref::LoadOp::create(b, buffer, b.toIndex(position));
  }
  static void store(ThreadBuilder &b, Value value, Value buffer,
                    Value position) {
    memref::StoreOp::create(b, value, buffer, b.toIndex(position));
  }

  void countInClusters(ThreadBuilder &b, AdjacencyUpdateOp op,
                       int64_t numCounts) const {
    int64_t perCluster = getTokensPerBlock(op, numCounts) * block.clusterBlocks;
    OpFoldResult numTokens =
        memref::getMixedSize(b, b.getLoc(), op.getIndices(), 0);
    OpFoldResult numParts = affine::makeComposedFoldedAffineApply(
        b, b.getLoc(), b.getAffineSymbolExpr(0).floorDiv(perCluster) + 1,
        {numTokens});
    Value parts = getValueOrCreateConstantIndexOp(b, b.getLoc(), numParts);
    Value isOnly = b.compare(CmpIPredicate::eq, parts, b.index(1));
    Value counts;
    if (getConstantIntValue(numParts) != 1)
      counts = memref::AllocOp::create(
          b, MemRefType::get({ShapedType::kDynamic, numCounts}, b.getI32Type()),
          parts);
    countPart(b, op, numParts, parts, isOnly, counts);
    if (counts)
      emitBlendLoop(b, op, counts, parts, /*isNeeded=*/b.negate(isOnly));
  }

  /// The loop over clusters. A cluster that is the only one blends, others
  /// leave their counts.
  void countPart(ThreadBuilder &b, AdjacencyUpdateOp op, OpFoldResult numParts,
                 Value parts, Value isOnly, Value counts) const {
    OpBuilder::InsertionGuard guard(b);
    int64_t experts = cast<MemRefType>(op.getA().getType()).getDimSize(0);
    int64_t numPairs = getNumPairs(experts), numCounts = numPairs + experts + 1;
    Cluster cluster(b, block, {numParts});
    auto type = MemRefType::get({numCounts}, b.getI32Type());
    Value own = memref::AllocOp::create(b, type);
    Workers ofBlock = Workers::ofBlock(b, block);
    forEach(b, ofBlock, numCounts,
            [&](Value i) { store(b, b.i32(0), own, i); });
    gpu::BarrierOp::create(b);
    auto [begin, end] = cluster.getPart(
        memref::DimOp::create(b, op.getIndices(), b.index(0)), 0, parts);
    CoSelections(b, op, own, ofBlock).emit(begin, end);
    cluster.barrier();
    // Every block needs all that follows the pairs.
    auto sumType = MemRefType::get({experts + 1}, b.getI32Type());
    Value sums = memref::AllocOp::create(b, sumType);
    b.ifThen(isOnly, [&] {
      forEach(b, ofBlock, experts + 1, [&](Value i) {
        store(b, cluster.sum(own, b.add(i, b.i32(numPairs))), sums, i);
      });
      gpu::BarrierOp::create(b);
      emitBlend(
          b, op, cluster.getWorkers(),
          [&](Value position) { return cluster.sum(own, position); },
          [&](Value number) { return load(b, sums, number); });
    });
    if (counts)
      b.ifThen(b.negate(isOnly), [&] {
        forEach(b, cluster.getWorkers(), numCounts, [&](Value i) {
          memref::StoreOp::create(b, cluster.sum(own, i), counts,
                                  ValueRange{cluster.getId(0), b.toIndex(i)});
        });
      });
    cluster.barrier();
  }

  void countInPlace(ThreadBuilder &b, AdjacencyUpdateOp op,
                    int64_t numCounts) const {
    Value counts = memref::AllocOp::create(
        b, MemRefType::get({1, numCounts}, b.getI32Type()));
    auto grid = [&](function_ref<void(Workers)> body) {
      OpBuilder::InsertionGuard guard(b);
      Value id = createGrid(b, b.getIndexAttr(kCountingBlocks));
      body(Workers::ofGrid(b, block, id, kCountingBlocks));
    };
    grid([&](Workers workers) {
      forEach(b, workers, numCounts, [&](Value i) {
        memref::StoreOp::create(b, b.i32(0), counts,
                                ValueRange{b.index(0), b.toIndex(i)});
      });
    });
    grid([&](Workers workers) {
      Value end = memref::DimOp::create(b, op.getIndices(), b.index(0));
      CoSelections(b, op, counts, workers).emit(b.index(0), end);
    });
    emitBlendLoop(b, op, counts, b.index(1), b.boolean(true));
  }

  /// The loop that adds up the parts of the counts and blends, unless
  /// `isNeeded` does not hold.
  void emitBlendLoop(ThreadBuilder &b, AdjacencyUpdateOp op, Value counts,
                     Value parts, Value isNeeded) const {
    OpBuilder::InsertionGuard guard(b);
    int64_t experts = cast<MemRefType>(op.getA().getType()).getDimSize(0);
    int64_t numBlocks = std::min<int64_t>(
        llvm::divideCeil(experts * experts, block.numThreads), kBlendingBlocks);
    Value id = createGrid(b, b.getIndexAttr(numBlocks));
    auto getTotal = [&](Value position) -> Value {
      Value place = b.toIndex(position);
      return b.loop(b.index(0), parts, 1, ValueRange{b.i32(0)},
                    [&](Value part, ValueRange sum) -> SmallVector<Value> {
                      Value count = memref::LoadOp::create(
                          b, counts, ValueRange{part, place});
                      return {b.add(sum[0], count)};
                    })[0];
    };
    b.ifThen(isNeeded, [&] {
      emitBlend(b, op, Workers::ofGrid(b, block, id, numBlocks), getTotal,
                [&](Value number) {
                  return getTotal(b.add(number, b.i32(getNumPairs(experts))));
                });
    });
  }

  BlockShape block;
};
} // namespace

void mlir::moe::addAdjacencyFacts(KernelFacts &facts) {
  facts.addForms<AdjacencyUpdateOp>(
      hasGridKernel,
      "a graph of a static size and a static number of choices, at most 64");
}

void mlir::moe::populateAdjacencyToGridPatterns(RewritePatternSet &patterns,
                                                BlockShape block) {
  patterns.add<AdjacencyUpdateToGrid>(patterns.getContext(), block);
}
