//===- Adjacency.cpp - adjacency_update to a grid -------------------------===//
//
// The number C[r, c] of tokens that chose both experts moves the graph:
//
//   a_new[r, c] = beta a[r, c] + (1 - beta) C[r, c] / D
//
// with D the sum of row r (`row`), of column c (`col`) or C[c, c] (`eq7`), and
// 0 where D is 0 (E16). C is symmetric, so that its lower triangle is counted,
// and counts are integers, so that no order of adding changes a bit.
//
// Where the counts fit into workgroup memory, each block of a cluster counts a
// tile of tokens there, and the cluster adds them up and blends. With more
// tokens there are more clusters; each leaves its counts to a second loop,
// which blends. That one has no block, so that it is no launch, where one
// cluster is enough. The counts of larger graphs lie in global memory: a loop
// clears them, another one adds to them, a third one blends.
//
//===----------------------------------------------------------------------===//

#include "CoSelections.h"
#include "Emit/Cluster.h"

#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
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
/// Blocks that blend what lies there, at most.
static constexpr int64_t kBlendingBlocks = 128;
/// Blocks of a cluster, at most, and the tokens of a block before there is
/// another cluster: at most a tile, and 16384 tokens are 132 blocks, one for
/// each multiprocessor of an H100. Where a cluster is a block, two tiles, since
/// each cluster hands on a table.
static constexpr int64_t kClusterBlocks = 4, kTokensOfBlock = 126;
/// Clusters that count, at most: the loop that blends reads all they found.
static constexpr int64_t kMaxParts = 64;
/// Counts of other blocks, tables of clusters and columns of a lane whose loads
/// are under way together.
static constexpr int64_t kCountsAtATime = 8, kPartsAtATime = 8,
                         kColumnsAtATime = 8;
/// Lines that a warp blends where there are two clusters.
static constexpr int64_t kLinesOfWarp = 4;

//===----------------------------------------------------------------------===//
// Blending
//===----------------------------------------------------------------------===//

/// The counts at these positions that all blocks together have found.
using GetCounts = function_ref<SmallVector<Value>(ArrayRef<Value>)>;

namespace {
/// Emits how a warp makes lines of the new graph, entries that are divided by
/// one number: rows, or columns for the norms by column.
class Blend {
public:
  Blend(ThreadBuilder &b, AdjacencyUpdateOp op, Value thread,
        GetCounts getCounts)
      : b(b), op(op), experts(getNumExperts(op)), getCounts(getCounts) {
    lane = b.toI32(b.op<arith::RemUIOp>(thread, b.index(kWarpSize)));
  }

  void emitLine(Value line);

private:
  /// The entries of the line that the lane has from `first` on.
  SmallVector<Value> getOthers(Value first);
  SmallVector<Value> getPositions(Value line, ArrayRef<Value> others);
  Value sumLanes(Value sum) {
    return b.reduceLanes(sum, kWarpSize,
                         [&](Value x, Value y) { return b.add(x, y); });
  }
  /// `sum` and the counts of those entries that exist.
  Value addUp(Value sum, ArrayRef<Value> others, ArrayRef<Value> found);
  void write(Value line, ArrayRef<Value> others, ArrayRef<Value> found);

  ThreadBuilder &b;
  AdjacencyUpdateOp op;
  int64_t experts;
  GetCounts getCounts;
  Value lane, isFrozen, divisor;
};
} // namespace

SmallVector<Value> Blend::getOthers(Value first) {
  SmallVector<Value> others;
  int64_t count =
      std::min(llvm::divideCeil(experts, kWarpSize), uint64_t(kColumnsAtATime));
  for (int64_t i = 0; i < count; ++i)
    others.push_back(b.add(b.add(first, lane), b.i32(i * kWarpSize)));
  return others;
}

SmallVector<Value> Blend::getPositions(Value line, ArrayRef<Value> others) {
  return llvm::map_to_vector(others, [&](Value other) {
    return getPairPosition(b, experts, line,
                           b.minSigned(other, b.i32(experts - 1)));
  });
}

Value Blend::addUp(Value sum, ArrayRef<Value> others, ArrayRef<Value> found) {
  for (auto [other, count] : llvm::zip(others, found)) {
    Value exists = b.compare(CmpIPredicate::slt, other, b.i32(experts));
    sum = b.add(sum, b.select(exists, count, b.i32(0)));
  }
  return sum;
}

void Blend::write(Value line, ArrayRef<Value> others, ArrayRef<Value> found) {
  auto toFloat = [&](Value count) {
    return arith::SIToFPOp::create(b, b.getF32Type(), count);
  };
  Value size = toFloat(divisor), beta = b.f32(op.getBeta().convertToDouble());
  Value rest = b.f32(1.0 - op.getBeta().convertToDouble());
  Value isUnused = b.compare(CmpIPredicate::eq, divisor, b.i32(0));
  for (auto [other, count] : llvm::zip(others, found)) {
    Value exists = b.compare(CmpIPredicate::slt, other, b.i32(experts));
    b.ifThen(exists, [&, other = other, count = count] {
      SmallVector<Value> place{b.toIndex(line), b.toIndex(other)};
      if (op.getNorm() != AdjacencyNorm::Row)
        std::swap(place[0], place[1]);
      Value weight =
          b.select(isUnused, b.f32(0.0), b.div(toFloat(count), size));
      Value old = memref::LoadOp::create(b, op.getA(), place);
      Value blended = b.fma(beta, old, b.mul(rest, weight));
      memref::StoreOp::create(b, b.select(isFrozen, old, blended),
                              op.getOuts()[0], place);
    });
  }
}

void Blend::emitLine(Value line) {
  bool isByDiagonal = op.getNorm() == AdjacencyNorm::Eq7;
  // A line that a warp reads at once is not read again.
  bool isWhole = experts <= kColumnsAtATime * kWarpSize;
  SmallVector<Value> others, positions{b.i32(getNumPairs(experts))};
  if (isByDiagonal)
    positions.push_back(getPairPosition(b, experts, line, line));
  if (isWhole) {
    others = getOthers(b.i32(0));
    llvm::append_range(positions, getPositions(line, others));
  }
  SmallVector<Value> counts = getCounts(positions);
  // E18: without a valid token the graph stays as it is.
  isFrozen = b.compare(CmpIPredicate::eq, counts[0], b.i32(0));
  auto ofLine = ArrayRef(counts).take_back(others.size());
  if (isWhole) {
    divisor =
        isByDiagonal ? counts[1] : sumLanes(addUp(b.i32(0), others, ofLine));
    write(line, others, ofLine);
    return;
  }
  auto step = kColumnsAtATime * kWarpSize;
  if (isByDiagonal)
    divisor = counts[1];
  else
    divisor = sumLanes(b.loop(
        b.index(0), b.index(experts), step, ValueRange{b.i32(0)},
        [&](Value first, ValueRange sum) -> SmallVector<Value> {
          SmallVector<Value> some = getOthers(b.toI32(first));
          return {addUp(sum[0], some, getCounts(getPositions(line, some)))};
        })[0]);
  b.loop(b.index(0), b.index(experts), step, [&](Value first) {
    SmallVector<Value> some = getOthers(b.toI32(first));
    write(line, some, getCounts(getPositions(line, some)));
  });
}

//===----------------------------------------------------------------------===//
// Pattern
//===----------------------------------------------------------------------===//

/// Whether the counts of a graph of this size fit into every block.
static bool fitsBlock(int64_t experts) {
  int64_t numCounts = getNumPairs(experts) + 1;
  return numCounts * 4 <= ::moe::kMaxStaticSharedBytes;
}

static bool hasGridKernel(AdjacencyUpdateOp op) {
  auto a = cast<ShapedType>(op.getA().getType());
  int64_t places = cast<ShapedType>(op.getIndices().getType()).getDimSize(1);
  if (!a.hasStaticShape() || places == 0)
    return false;
  // Where threads share the choices of a token, their number must be known.
  return fitsBlock(a.getDimSize(0)) ||
         (!ShapedType::isDynamic(places) && places <= 2 * kWarpSize);
}

namespace {
/// How the tokens are cut into parts, one a cluster.
struct TokenParts {
  TokenParts(ThreadBuilder &b, AdjacencyUpdateOp op, BlockShape block) {
    int64_t size = block.clusterBlocks > 1
                       ? kTokensOfBlock * block.clusterBlocks
                       : 2 * kTokensOfBlock;
    OpFoldResult numTokens =
        memref::getMixedSize(b, b.getLoc(), op.getIndices(), 0);
    auto evaluate = [&](AffineExpr expr) {
      return affine::makeComposedFoldedAffineApply(b, b.getLoc(), expr,
                                                   {numTokens});
    };
    AffineExpr more = b.getAffineSymbolExpr(0).floorDiv(size);
    int64_t warpsOfLines = llvm::divideCeil(
        getNumExperts(op), kLinesOfWarp * block.numThreads / kWarpSize);
    numParts = evaluate(more + 1);
    numBlendingBlocks = evaluate(more * warpsOfLines);
    parts = getValueOrCreateConstantIndexOp(b, b.getLoc(), numParts);
    isOnly = b.compare(CmpIPredicate::eq, parts, b.index(1));
    used = b.op<arith::MinUIOp>(parts, b.index(kMaxParts));
  }

  bool mayBeMany() const { return getConstantIntValue(numParts) != 1; }

  /// The clusters, and the blocks of the loop that blends what they found: 0
  /// where one cluster is enough.
  OpFoldResult numParts, numBlendingBlocks;
  Value parts, isOnly;
  /// Clusters from here on have no part.
  Value used;
};

struct AdjacencyUpdateToGrid : OpRewritePattern<AdjacencyUpdateOp> {
  AdjacencyUpdateToGrid(MLIRContext *context, BlockShape block)
      : OpRewritePattern(context), block(block) {
    this->block.clusterBlocks = std::min(block.clusterBlocks, kClusterBlocks);
  }

  LogicalResult matchAndRewrite(AdjacencyUpdateOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics() || !hasGridKernel(op))
      return rewriter.notifyMatchFailure(op, "expected static buffers");
    ThreadBuilder b(op.getLoc(), rewriter);
    if (fitsBlock(getNumExperts(op)))
      countInClusters(b, op);
    else
      countInPlace(b, op);
    rewriter.eraseOp(op);
    return success();
  }

private:
  void countInClusters(ThreadBuilder &b, AdjacencyUpdateOp op) const {
    TokenParts parts(b, op, block);
    Value counts;
    if (parts.mayBeMany()) {
      int64_t numCounts = getNumPairs(getNumExperts(op)) + 1;
      counts = memref::AllocOp::create(
          b, MemRefType::get({ShapedType::kDynamic, numCounts}, b.getI32Type()),
          parts.parts);
    }
    countPart(b, op, parts, counts);
    if (counts)
      blendParts(b, op, parts, counts);
  }

  /// The loop over clusters. A cluster that is the only one blends, others
  /// leave their counts.
  void countPart(ThreadBuilder &b, AdjacencyUpdateOp op,
                 const TokenParts &parts, Value counts) const {
    OpBuilder::InsertionGuard guard(b);
    Cluster cluster(b, block, {parts.numParts});
    int64_t numCounts = getNumPairs(getNumExperts(op)) + 1;
    Value own = memref::AllocOp::create(
        b, MemRefType::get({numCounts}, b.getI32Type()));
    // The same for all blocks of a cluster, which meet inside.
    Value hasPart = b.compare(CmpIPredicate::ult, cluster.getId(0), parts.used);
    b.ifThen(hasPart, [&] {
      Value size = b.index(cluster.getSize());
      Value number = b.add(b.mul(cluster.getId(0), size), cluster.getRank());
      auto [begin, end] = getPart(
          b, memref::DimOp::create(b, op.getIndices(), b.index(0)), number,
          /*numParts=*/b.mul(parts.used, size), /*multiple=*/1);
      countInBlock(b, op, block, own, begin, end);
      cluster.barrier();
      b.ifThen(parts.isOnly, [&] { blendAlone(b, op, cluster, own); });
      if (counts)
        b.ifThen(b.negate(parts.isOnly),
                 [&] { writePart(b, cluster, own, counts); });
      cluster.barrier();
    });
  }

  /// Adds up what the blocks of the cluster have counted.
  static void writePart(ThreadBuilder &b, Cluster &cluster, Value own,
                        Value counts) {
    Workers workers = cluster.getWorkers();
    int64_t numCounts = cast<MemRefType>(own.getType()).getNumElements();
    int64_t atATime = std::min<int64_t>(
        llvm::divideCeil(numCounts, workers.count), kCountsAtATime);
    b.loop(workers.thread, b.index(numCounts), atATime * workers.count,
           [&](Value first) {
             SmallVector<std::pair<Value, Value>> sums;
             for (int64_t i = 0; i < atATime; ++i) {
               Value number = b.add(first, b.index(i * workers.count));
               Value place =
                   b.op<arith::MinUIOp>(number, b.index(numCounts - 1));
               sums.emplace_back(number, cluster.sum(own, b.toI32(place)));
             }
             for (auto [number, sum] : sums) {
               Value exists =
                   b.compare(CmpIPredicate::ult, number, b.index(numCounts));
               b.ifThen(exists, [&, number = number, sum = sum] {
                 memref::StoreOp::create(b, sum, counts,
                                         ValueRange{cluster.getId(0), number});
               });
             }
           });
  }

  static void blendAlone(ThreadBuilder &b, AdjacencyUpdateOp op,
                         Cluster &cluster, Value own) {
    Workers workers = cluster.getWorkers();
    auto getCounts = [&](ArrayRef<Value> positions) {
      return llvm::map_to_vector(positions, [&](Value position) {
        return cluster.sum(own, position);
      });
    };
    emitLines(b, op, workers.thread, b.index(workers.count / kWarpSize),
              getCounts);
  }

  /// The warps of `thread`, `numWarps` together, take the lines in turns.
  static void emitLines(ThreadBuilder &b, AdjacencyUpdateOp op, Value thread,
                        Value numWarps, GetCounts getCounts) {
    Blend blend(b, op, thread, getCounts);
    Value warp = b.op<arith::DivUIOp>(thread, b.index(kWarpSize));
    auto lines =
        scf::ForOp::create(b, warp, b.index(getNumExperts(op)), numWarps);
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(lines.getBody());
    blend.emitLine(b.toI32(lines.getInductionVar()));
  }

  /// The loop that adds up what clusters have found, and blends.
  void blendParts(ThreadBuilder &b, AdjacencyUpdateOp op,
                  const TokenParts &parts, Value counts) const {
    OpBuilder::InsertionGuard guard(b);
    Value id = createGrid(b, parts.numBlendingBlocks);
    Workers workers = Workers::ofGrid(b, block, id, /*numBlocks=*/1);
    Value blocks =
        getValueOrCreateConstantIndexOp(b, b.getLoc(), parts.numBlendingBlocks);
    Value numWarps = b.mul(blocks, b.index(block.numThreads / kWarpSize));
    Value last = b.sub(parts.used, b.index(1));
    auto getCounts = [&](ArrayRef<Value> positions) -> SmallVector<Value> {
      SmallVector<Value> zeros(positions.size(), b.i32(0));
      return b.loop(b.index(0), parts.used, kPartsAtATime, zeros,
                    [&](Value first, ValueRange sums) {
                      return addParts(b, op, counts, first, last, positions,
                                      sums);
                    });
    };
    emitLines(b, op, workers.thread, numWarps, getCounts);
  }

  /// `sums` and what `kPartsAtATime` clusters from `first` on found.
  static SmallVector<Value> addParts(ThreadBuilder &b, AdjacencyUpdateOp op,
                                     Value counts, Value first, Value last,
                                     ArrayRef<Value> positions,
                                     ValueRange sums) {
    SmallVector<Value> totals(sums);
    for (int64_t i = 0; i < kPartsAtATime; ++i) {
      Value part = b.add(first, b.index(i));
      Value exists = b.compare(CmpIPredicate::ule, part, last);
      Value row = b.op<arith::MinUIOp>(part, last);
      for (auto [total, position] : llvm::zip_equal(totals, positions)) {
        Value count = memref::LoadOp::create(
            b, counts, ValueRange{row, b.toIndex(position)});
        total = b.add(total, b.select(exists, count, b.i32(0)));
      }
    }
    return totals;
  }

  void countInPlace(ThreadBuilder &b, AdjacencyUpdateOp op) const {
    int64_t experts = getNumExperts(op);
    int64_t numCounts = getNumPairs(experts) + 1;
    Value counts = memref::AllocOp::create(
        b, MemRefType::get({numCounts}, b.getI32Type()));
    auto grid = [&](int64_t numBlocks, function_ref<void(Workers)> body) {
      OpBuilder::InsertionGuard guard(b);
      Value id = createGrid(b, b.getIndexAttr(numBlocks));
      body(Workers::ofGrid(b, block, id, numBlocks));
    };
    grid(kCountingBlocks, [&](Workers workers) {
      b.loop(workers.thread, b.index(numCounts), workers.count,
             [&](Value i) { memref::StoreOp::create(b, b.i32(0), counts, i); });
    });
    grid(kCountingBlocks,
         [&](Workers workers) { countByAtomics(b, op, workers, counts); });
    int64_t numBlocks = std::min<int64_t>(
        llvm::divideCeil(experts * kWarpSize, block.numThreads),
        kBlendingBlocks);
    grid(numBlocks, [&](Workers workers) {
      auto getCounts = [&](ArrayRef<Value> positions) {
        return llvm::map_to_vector(positions, [&](Value position) -> Value {
          return memref::LoadOp::create(b, counts, b.toIndex(position));
        });
      };
      emitLines(b, op, workers.thread, b.index(workers.count / kWarpSize),
                getCounts);
    });
  }

  BlockShape block;
};
} // namespace

void mlir::moe::addAdjacencyFacts(KernelFacts &facts) {
  facts.addForms<AdjacencyUpdateOp>(
      hasGridKernel,
      "a graph of a static size; if its counts do not fit into a block also a "
      "static number of choices, at most 64");
}

void mlir::moe::populateAdjacencyToGridPatterns(RewritePatternSet &patterns,
                                                BlockShape block) {
  patterns.add<AdjacencyUpdateToGrid>(patterns.getContext(), block);
}
