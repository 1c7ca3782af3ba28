//===- Dispatch.cpp - moe.dispatch as a counting sort over blocks ---------===//
//
// Assignments have numbers in the order in which they ask for a row: number
// a n + t is choice a of token t. Blocks take parts of the numbers, and a row
// is what lies before it:
//
//   loop 1   clusters count their parts by expert:
//            before[block, e], in the parts of the cluster before the block's,
//            totals[cluster, e]
//   loop 2   a block adds up totals and before, so that it knows counts,
//            offsets, and its first row of each expert, and hands out the rows
//            of its part, tile by tile
//
// Of a tile each warp numbers its assignments among those of their experts,
// with a table of its own: lanes with the same expert find each other by
// ballots, one a bit. The tables of the warps are then added up in order. All
// of this is integers in a fixed order, so that no bit depends on how blocks or
// warps take turns, and a row costs the bits of an expert's number, not a
// comparison with every other assignment.
//
// Where few assignments are one block's work, loop 1 has no block, which makes
// it no launch, and the only block of loop 2 counts for itself.
//
//===----------------------------------------------------------------------===//

#include "Assignments.h"
#include "Emit/Cluster.h"

#include "MoE/Dialect/MoE/IR/DispatchCapacity.h"
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

/// Counts of clusters whose loads are in flight together.
static constexpr int64_t kRowsAtATime = 8;

//===----------------------------------------------------------------------===//
// Loop 1: counting
//===----------------------------------------------------------------------===//

namespace {
/// What clusters have counted.
struct Counts {
  Value totals;
  /// Null where a cluster is a block.
  Value before;
};

class CountingBlock : BlockOfAssignments {
public:
  CountingBlock(ThreadBuilder &b, DispatchOp op, BlockShape block,
                const AssignmentParts &parts, Counts counts, Cluster &cluster)
      : BlockOfAssignments(b, op, block), parts(parts), counts(counts),
        cluster(cluster) {}
  void emit();

private:
  void writeCounts(Value own);

  const AssignmentParts &parts;
  Counts counts;
  Cluster &cluster;
};
} // namespace

/// The counts of the blocks of the cluster, added up in their order.
void CountingBlock::writeCounts(Value own) {
  Workers workers = cluster.getWorkers();
  Value id = cluster.getId(0);
  Value firstBlock = b.mul(id, b.index(cluster.getSize()));
  b.loop(workers.thread, b.index(experts), workers.count, [&](Value expert) {
    Value sum = b.i32(0);
    for (int64_t rank = 0; rank < cluster.getSize(); ++rank) {
      if (counts.before)
        memref::StoreOp::create(
            b, sum, counts.before,
            ValueRange{b.add(firstBlock, b.index(rank)), expert});
      sum = b.add(sum, cluster.load(own, b.toI32(expert), rank));
    }
    memref::StoreOp::create(b, sum, counts.totals, ValueRange{id, expert});
  });
}

void CountingBlock::emit() {
  Value number = b.add(b.mul(cluster.getId(0), b.index(cluster.getSize())),
                       cluster.getRank());
  Value own = alloc(experts);
  // The same for all blocks of a cluster, which meet inside.
  b.ifThen(less(number, parts.used), [&] {
    auto [begin, end] = parts.get(b, number);
    countExperts(begin, end, own);
    cluster.barrier();
    writeCounts(own);
    cluster.barrier();
  });
}

//===----------------------------------------------------------------------===//
// Loop 2: placing
//===----------------------------------------------------------------------===//

namespace {
class PlacingBlock : BlockOfAssignments {
public:
  PlacingBlock(ThreadBuilder &b, DispatchOp op, BlockShape block,
               const AssignmentParts &parts, Counts counts, Value number);
  void emit();

  /// The workgroup memory of a block for `experts`.
  static int64_t getBytes(int64_t experts, BlockShape block) {
    int64_t warps = block.numThreads / kWarpSize;
    return 4 * (2 * experts + warps * (experts + 1) + warps) + 4 * 16;
  }

private:
  Value getCapacity();
  void addUpCounts();
  void computeOffsets();
  Value scanBlock(Value value);
  Value pad(Value rows);
  void placeTile(Value first, Value end);
  void clearOwnTable();
  Value numberInWarp(const Assignment &a);
  Value findPeers(Value expert);
  void addUpTables();
  void writeSlot(const Assignment &a, Value number);

  /// The entry of this warp's table for an expert.
  Value inTable(Value expert) {
    return b.add(b.mul(warp, b.i32(experts + 1)), expert);
  }

  const AssignmentParts &parts;
  Counts counts;
  Value number, lane, warp, capacity;
  int64_t warps;
  /// Workgroup memory, by expert: the next row, and the end of the rows, before
  /// that their number; a table a warp; a sum a warp.
  Value next, ends, tables, sums;
};
} // namespace

PlacingBlock::PlacingBlock(ThreadBuilder &b, DispatchOp op, BlockShape block,
                           const AssignmentParts &parts, Counts counts,
                           Value number)
    : BlockOfAssignments(b, op, block), parts(parts), counts(counts),
      number(number), warps(block.numThreads / kWarpSize) {
  Value thread32 = b.toI32(thread);
  lane = b.op<arith::RemUIOp>(thread32, b.i32(kWarpSize));
  warp = b.op<arith::DivUIOp>(thread32, b.i32(kWarpSize));
  capacity = getCapacity();
  next = alloc(experts);
  ends = alloc(experts);
  tables = alloc(warps * (experts + 1));
  sums = alloc(warps);
}

/// The bound on rows, i32: the operand, or what follows from the factor; null
/// without one.
Value PlacingBlock::getCapacity() {
  if (Value given = op.getCapacity())
    return given;
  auto size = [&](int64_t dim) -> Value {
    return memref::DimOp::create(b, op.getIndices(), b.index(dim));
  };
  Value bound = buildCapacity(b, op, size(0), b.index(experts), size(1));
  // More rows than assignments are no bound.
  return bound ? b.toI32(b.minSigned(bound, parts.count)) : Value();
}

/// Sets `ends` to the assignments to each expert and `next` to those in the
/// parts before the block's.
void PlacingBlock::addUpCounts() {
  Value ownCluster = b.op<arith::DivUIOp>(number, b.index(parts.clusterSize));
  Value clusters = b.op<arith::DivUIOp>(parts.used, b.index(parts.clusterSize));
  Value last = b.sub(clusters, b.index(1)), zero = b.i32(0);
  forEachExpert([&](Value expert) {
    auto addRows = [&](Value first, ValueRange carried) -> SmallVector<Value> {
      SmallVector<Value> rows, found;
      for (int64_t i = 0; i < kRowsAtATime; ++i) {
        rows.push_back(b.add(first, b.index(i)));
        Value row = b.op<arith::MinUIOp>(rows.back(), last);
        found.push_back(
            memref::LoadOp::create(b, counts.totals, ValueRange{row, expert}));
      }
      Value total = carried[0], mine = carried[1];
      for (auto [row, count] : llvm::zip_equal(rows, found)) {
        total = b.add(total, b.select(less(row, clusters), count, zero));
        mine = b.add(mine, b.select(less(row, ownCluster), count, zero));
      }
      return {total, mine};
    };
    SmallVector<Value> sums = b.loop(b.index(0), clusters, kRowsAtATime,
                                     ValueRange{zero, zero}, addRows);
    Value mine = sums[1];
    if (counts.before)
      mine = b.add(mine, memref::LoadOp::create(b, counts.before,
                                                ValueRange{number, expert}));
    store(sums[0], ends, expert);
    store(mine, next, expert);
  });
}

/// `rows` rounded up to the alignment.
Value PlacingBlock::pad(Value rows) {
  int64_t alignment = op.getAlignment();
  if (alignment == 1)
    return rows;
  Value blocks =
      b.op<arith::DivUIOp>(b.add(rows, b.i32(alignment - 1)), b.i32(alignment));
  return b.mul(blocks, b.i32(alignment));
}

/// The sum of the values of the threads before this one.
Value PlacingBlock::scanBlock(Value value) {
  Value inclusive = value;
  for (int64_t distance = 1; distance < kWarpSize; distance *= 2) {
    Value isFar = b.compare(CmpIPredicate::uge, lane, b.i32(distance));
    Value source = b.select(isFar, b.sub(lane, b.i32(distance)), lane);
    Value other = b.shuffleFrom(inclusive, source);
    inclusive = b.add(inclusive, b.select(isFar, other, b.i32(0)));
  }
  b.ifThen(b.compare(CmpIPredicate::eq, lane, b.i32(kWarpSize - 1)),
           [&] { store(inclusive, sums, warp); });
  barrier();
  Value before = b.sub(inclusive, value);
  for (int64_t other = 0; other + 1 < warps; ++other) {
    Value isEarlier = less(b.i32(other), warp);
    before = b.add(before,
                   b.select(isEarlier, load(sums, b.index(other)), b.i32(0)));
  }
  return before;
}

/// From the assignments to each expert: its rows, and where they start. Each
/// thread has a run of experts.
void PlacingBlock::computeOffsets() {
  int64_t perThread = llvm::divideCeil(experts, block.numThreads);
  Value begin =
      b.op<arith::MinUIOp>(b.mul(thread, b.index(perThread)), b.index(experts));
  Value end =
      b.op<arith::MinUIOp>(b.add(begin, b.index(perThread)), b.index(experts));
  auto getRows = [&](Value expert) {
    Value rows = load(ends, expert);
    return capacity ? b.maxSigned(b.minSigned(rows, capacity), b.i32(0)) : rows;
  };
  Value sum = b.loop(begin, end, 1, ValueRange{b.i32(0)},
                     [&](Value expert, ValueRange sum) -> SmallVector<Value> {
                       return {b.add(sum[0], pad(getRows(expert)))};
                     })[0];
  Value isWriter = b.compare(CmpIPredicate::eq, number, b.index(0));
  Value start =
      b.loop(begin, end, 1, ValueRange{scanBlock(sum)},
             [&](Value expert, ValueRange start) -> SmallVector<Value> {
               Value rows = getRows(expert);
               b.ifThen(isWriter, [&] {
                 storeNumber(start[0], op.getOffsetsInit(), expert);
                 storeNumber(rows, op.getCountsInit(), expert);
               });
               store(b.add(start[0], load(next, expert)), next, expert);
               store(b.add(start[0], rows), ends, expert);
               return {b.add(start[0], pad(rows))};
             })[0];
  Value isLast =
      b.compare(CmpIPredicate::eq, thread, b.index(block.numThreads - 1));
  b.ifThen(b.both(isWriter, isLast),
           [&] { storeNumber(start, op.getOffsetsInit(), b.index(experts)); });
}

/// The lanes, a bit each, whose assignments have this expert.
Value PlacingBlock::findPeers(Value expert) {
  Value peers = b.i32(-1);
  for (unsigned bit = 0, e = llvm::Log2_64_Ceil(experts + 1); bit < e; ++bit) {
    Value isSet = b.compare(CmpIPredicate::ne,
                            b.both(expert, b.i32(int64_t(1) << bit)), b.i32(0));
    Value lanes = b.ballot(isSet);
    Value others = b.op<arith::XOrIOp>(lanes, b.i32(-1));
    peers = b.both(peers, b.select(isSet, lanes, others));
  }
  return peers;
}

/// The number of an assignment among those of its expert that the warp has in
/// the tile.
Value PlacingBlock::numberInWarp(const Assignment &a) {
  Value peers = findPeers(a.expert), place = inTable(a.expert);
  Value below = b.sub(b.op<arith::ShLIOp>(b.i32(1), lane), b.i32(1));
  Value number = b.add(load(tables, place), b.countBits(b.both(peers, below)));
  b.syncWarp();
  Value isLast =
      b.compare(CmpIPredicate::eq, b.op<arith::ShRUIOp>(peers, lane), b.i32(1));
  b.ifThen(isLast, [&] { store(b.add(number, b.i32(1)), tables, place); });
  b.syncWarp();
  return number;
}

void PlacingBlock::clearOwnTable() {
  b.syncWarp();
  b.loop(b.toIndex(lane), b.index(experts + 1), kWarpSize, [&](Value expert) {
    store(b.i32(0), tables, inTable(b.toI32(expert)));
  });
  b.syncWarp();
}

/// The tables of numbers become those of the first rows of the warps.
void PlacingBlock::addUpTables() {
  forEachExpert([&](Value expert) {
    SmallVector<Value> places, found;
    for (int64_t i = 0; i < warps; ++i) {
      places.push_back(b.add(b.index(i * (experts + 1)), expert));
      found.push_back(load(tables, places.back()));
    }
    Value row = load(next, expert);
    for (auto [place, count] : llvm::zip_equal(places, found)) {
      store(row, tables, place);
      row = b.add(row, count);
    }
    store(row, next, expert);
  });
}

void PlacingBlock::writeSlot(const Assignment &a, Value number) {
  Value slots = op.getSlotsInit();
  Value row = b.add(load(tables, inTable(a.expert)), number);
  Value isKept = a.isAsking;
  if (capacity) {
    Value expert = b.op<arith::MinUIOp>(a.expert, b.i32(experts - 1));
    isKept =
        b.both(isKept, b.compare(CmpIPredicate::slt, row, load(ends, expert)));
  }
  Value slot = b.castInt(b.select(isKept, row, b.i32(-1)),
                         getElementTypeOrSelf(slots.getType()));
  b.ifThen(a.exists, [&] {
    memref::StoreOp::create(b, slot, slots, ValueRange{a.token, a.place});
  });
}

void PlacingBlock::placeTile(Value first, Value end) {
  // A warp's assignments follow each other, those of a lane lie a warp apart.
  Value ofWarp = b.mul(warp, b.i32(kAssignmentsAtATime * kWarpSize));
  Value own = b.add(first, b.toIndex(b.add(ofWarp, lane)));
  SmallVector<Assignment> assignments = read(own, kWarpSize, end);
  clearOwnTable();
  SmallVector<Value> numbers;
  for (const Assignment &a : assignments)
    numbers.push_back(numberInWarp(a));
  barrier();
  addUpTables();
  barrier();
  for (auto [a, number] : llvm::zip_equal(assignments, numbers))
    writeSlot(a, number);
}

void PlacingBlock::emit() {
  Value isOnly = b.compare(CmpIPredicate::eq, parts.blocks, b.index(0));
  // One block more than have parts, which is the only one or has none.
  Value works = b.either(isOnly, less(number, parts.used));
  b.ifThen(works, [&] {
    auto [begin, end] = parts.get(b, number);
    auto countOwn = [&, begin = begin, end = end] {
      countExperts(begin, end, ends);
      forEachExpert([&](Value expert) { store(b.i32(0), next, expert); });
    };
    if (parts.mayBeMany())
      b.ifThenElse(isOnly, countOwn, [&] { addUpCounts(); });
    else
      countOwn();
    barrier();
    computeOffsets();
    barrier();
    b.loop(begin, end, tile,
           [&, end = end](Value first) { placeTile(first, end); });
  });
}

//===----------------------------------------------------------------------===//
// Pattern
//===----------------------------------------------------------------------===//

static bool hasGridKernel(DispatchOp op, BlockShape block) {
  bool isInOrder = op.getDrop() == DropRule::Position ||
                   (op.getDrop() == DropRule::Probs && !op.hasCapacity());
  int64_t experts = getNumExperts(op);
  return isInOrder && !ShapedType::isDynamic(experts) && experts > 0 &&
         PlacingBlock::getBytes(experts, block) <= block.sharedBytes;
}

namespace {
struct DispatchToGrid : OpRewritePattern<DispatchOp> {
  DispatchToGrid(MLIRContext *context, BlockShape block)
      : OpRewritePattern(context), block(block) {}

  LogicalResult matchAndRewrite(DispatchOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics() || !hasGridKernel(op, block))
      return rewriter.notifyMatchFailure(op, "expected buffers, and rows in "
                                             "the order of the assignments");
    ThreadBuilder b(op.getLoc(), rewriter);
    AssignmentParts parts(b, op, block);
    Counts counts;
    if (parts.mayBeMany()) {
      counts = allocateCounts(b, op, parts);
      OpBuilder::InsertionGuard guard(b);
      Cluster cluster(b, block, {parts.numClusters});
      CountingBlock(b, op, block, parts, counts, cluster).emit();
    }
    {
      OpBuilder::InsertionGuard guard(b);
      OpFoldResult numBlocks = affine::makeComposedFoldedAffineApply(
          b, b.getLoc(), b.getAffineSymbolExpr(0) + 1, {parts.numBlocks});
      Value number = createGrid(b, numBlocks);
      PlacingBlock(b, op, block, parts, counts, number).emit();
    }
    rewriter.eraseOp(op);
    return success();
  }

private:
  static Counts allocateCounts(ThreadBuilder &b, DispatchOp op,
                               const AssignmentParts &parts) {
    auto type = MemRefType::get({ShapedType::kDynamic, getNumExperts(op)},
                                b.getI32Type());
    Counts counts;
    Value clusters =
        getValueOrCreateConstantIndexOp(b, b.getLoc(), parts.numClusters);
    counts.totals = memref::AllocOp::create(b, type, clusters);
    if (parts.clusterSize > 1)
      counts.before = memref::AllocOp::create(b, type, parts.blocks);
    return counts;
  }

  BlockShape block;
};
} // namespace

void mlir::moe::addDispatchFacts(KernelFacts &facts, BlockShape block) {
  facts.addForms<DispatchOp>(
      [=](DispatchOp op) { return hasGridKernel(op, block); },
      "a static number of experts whose counts fit into a block, and rows in "
      "the order of the assignments, not by priority or by gates");
}

void mlir::moe::populateDispatchToGridPatterns(RewritePatternSet &patterns,
                                               BlockShape block) {
  patterns.add<DispatchToGrid>(patterns.getContext(), block);
}
