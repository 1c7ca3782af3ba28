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

#include "Emit/Cluster.h"
#include "Emit/ThreadBuilder.h"
#include "ThreadLowerings.h"

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Support/ElementBytes.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/Utils/Utils.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// Clusters of a range: the tables of a block of 16 warps take 128 KiB.
static constexpr int64_t kMaxRange = 64;
/// Bytes of a row that a slab has: a line of the cache.
static constexpr int64_t kSlabBytes = 128;
/// Warps of a block, and where its tables would not fit.
static constexpr int64_t kWarps = 16, kFewWarps = 8;
/// Rows whose loads are under way together, while those before are added.
static constexpr int64_t kRowsAtATime = 16;
/// Bits of an entry of the list that say where its cluster has its row.
static constexpr int64_t kPlaceBits = 16;
/// Tokens of a block before there is another part, at most and at least.
static constexpr int64_t kMaxTokens = 2048, kMinTokens = 128;
/// Blocks that combine parts, for each part but one.
static constexpr int64_t kCombiningBlocks = 16;

//===----------------------------------------------------------------------===//
// Plan
//===----------------------------------------------------------------------===//

namespace {
/// How the work is cut.
struct Plan {
  Plan(ThreadBuilder &b, MadDispersionOp op, BlockShape block);

  /// Whether the first loop does everything.
  Value isOnePart(ThreadBuilder &b) const {
    return b.compare(CmpIPredicate::eq, parts, b.index(1));
  }
  bool mayHaveParts() const { return getConstantIntValue(numParts) != 1; }

  /// Clusters of a range, columns of a slab, parts of a block that have tables
  /// of their own, and the tokens that a block may have.
  int64_t range, slab, subparts, maxTokens;
  /// The blocks of the loops over the rows.
  BlockShape block;
  OpFoldResult numRanges, numSlabs, numParts;
  /// Clusters that the loop over the deviations has along the parts, and blocks
  /// of those that combine parts: 0 with one part, so that they are no
  /// launches.
  OpFoldResult numDeviating, numCombining;
  /// numSlabs, numParts and numCombining.
  Value slabs, parts, combining;

private:
  int64_t getMinTokens(MadDispersionOp op, int64_t clusters) const;
};
} // namespace

/// A part moves five tables: its totals out and in twice, the means in. With
/// blocks of so many tokens in a cluster of 8 they are 2 % of the rows, which
/// are read twice.
int64_t Plan::getMinTokens(MadDispersionOp op, int64_t clusters) const {
  int64_t rowBytes = getElementBytes(getElementTypeOrSelf(op.getH().getType()));
  int64_t tokens =
      llvm::divideCeil(60 * 5 * clusters * sizeof(float), 2 * rowBytes * 8);
  return std::clamp(tokens, kMinTokens, kMaxTokens);
}

Plan::Plan(ThreadBuilder &b, MadDispersionOp op, BlockShape given)
    : block(given) {
  auto h = cast<MemRefType>(op.getH().getType());
  auto table = cast<MemRefType>(op.getOuts()[0].getType());
  int64_t clusters = table.isDynamicDim(0)
                         ? kMaxRange
                         : std::max<int64_t>(table.getDimSize(0), 1);
  range = std::min(clusters, kMaxRange);
  slab = std::max(kSlabBytes / getElementBytes(h.getElementType()), kWarpSize);
  // Tables, means, the list, and what else there is.
  auto getBytes = [&](int64_t warps) {
    return 4 * ((warps * kWarpSize + slab) * (range + 1) + kMaxTokens) + 4096;
  };
  int64_t warps = getBytes(kWarps) <= block.sharedBytes ? kWarps : kFewWarps;
  block.numThreads = warps * kWarpSize;
  subparts = block.numThreads / slab;
  // With few slabs, parts make up for them.
  int64_t columns = h.getDimSize(1);
  int64_t perBlock = kMaxTokens;
  if (!ShapedType::isDynamic(columns))
    perBlock = std::clamp(256 * int64_t(llvm::divideCeil(columns, slab)),
                          getMinTokens(op, clusters), kMaxTokens);
  maxTokens = perBlock + 1;

  auto evaluate = [&](AffineExpr expr, Value buffer, int64_t dim) {
    return affine::makeComposedFoldedAffineApply(
        b, b.getLoc(), expr,
        {memref::getMixedSize(b, b.getLoc(), buffer, dim)});
  };
  AffineExpr size = b.getAffineSymbolExpr(0);
  AffineExpr more = size.floorDiv(perBlock * block.clusterBlocks + 1);
  numRanges = evaluate(size.ceilDiv(range), op.getOuts()[0], 0);
  numSlabs = evaluate(size.ceilDiv(slab), op.getOuts()[0], 1);
  numParts = evaluate(more + 1, op.getH(), 0);
  numDeviating = evaluate(more * 2, op.getH(), 0);
  numCombining = evaluate(more * kCombiningBlocks, op.getH(), 0);
  auto getValue = [&](OpFoldResult size) {
    return getValueOrCreateConstantIndexOp(b, b.getLoc(), size);
  };
  slabs = getValue(numSlabs);
  parts = getValue(numParts);
  combining = getValue(numCombining);
}

//===----------------------------------------------------------------------===//
// One loop over the rows
//===----------------------------------------------------------------------===//

namespace {
/// Emits what a block does for its slab, range and part.
class BlockSums {
public:
  BlockSums(ThreadBuilder &b, MadDispersionOp op, const Plan &plan,
            OpFoldResult numParts);

  /// The sums of the rows; with one part everything that follows from them,
  /// else sums[part, cluster, column] and counts[part, cluster].
  void emitSums(Value sums, Value counts);
  /// The sums of the deviations from the means of all parts.
  void emitDeviations(Value sums);

private:
  void listTokens();
  void padList();
  Value getEntry(Value offset, Value place) {
    return b.either(b.op<arith::ShLIOp>(offset, b.i32(kPlaceBits)), place);
  }
  void listSome(Value first);
  void clear();
  void addRows(bool areDeviations);
  SmallVector<Value> loadGroup(Value first);
  SmallVector<Value> loadNextGroup(Value first, ValueRange group);
  void addGroup(ValueRange group, bool areDeviations);
  Value getDeviation(Value element, Value slot);
  void addSubparts();
  void finishAlone();
  void writePart(Value sums, Value counts);

  /// Calls `body` for the elements of the block's part of the result, shared by
  /// the threads of the cluster.
  void
  forEachOwn(function_ref<void(Value slot, Value cluster, Value column)> body);
  /// out[cluster, column] = total / count, 0 for an empty cluster (E14).
  Value getQuotient(Value slot, Value cluster);

  Value alloc(int64_t size, Type type) {
    return memref::AllocOp::create(b, MemRefType::get({size}, type));
  }
  Value load(Value buffer, Value index) {
    return memref::LoadOp::create(b, buffer, index);
  }
  void store(Value value, Value buffer, ValueRange place) {
    memref::StoreOp::create(b, value, buffer, place);
  }
  Value minimum(Value lhs, Value rhs) { return b.op<arith::MinUIOp>(lhs, rhs); }
  Value less(Value lhs, Value rhs) {
    return b.compare(CmpIPredicate::ult, lhs, rhs);
  }
  /// The place in the thread's table of a cluster of the range, as an index.
  Value inTable(Value cluster) {
    Value row = b.add(b.mul(subpart, b.index(plan.range + 1)), cluster);
    return b.add(b.mul(row, b.index(plan.slab)), columnInSlab);
  }

  ThreadBuilder &b;
  MadDispersionOp op;
  BlockShape block;
  const Plan &plan;
  Cluster cluster;
  Value thread, subpart, columnInSlab, numColumns, numClusters;
  Value firstColumn, firstCluster, begin, end;
  /// The thread's column, or the last one if it has none.
  Value column;
  /// Workgroup memory: the tables, the means, the numbers of tokens of the
  /// clusters in this block and in all, the list as `token << 16 | place of the
  /// cluster in a table`, and how many tokens each warp found.
  Value table, means, ownCounts, totalCounts, listed, found;
  /// The length of the list.
  Value numListed;
};
} // namespace

BlockSums::BlockSums(ThreadBuilder &b, MadDispersionOp op, const Plan &plan,
                     OpFoldResult numParts)
    : b(b), op(op), block(plan.block), plan(plan),
      cluster(b, block,
              {affine::makeComposedFoldedAffineApply(
                   b, b.getLoc(),
                   b.getAffineSymbolExpr(0) * b.getAffineSymbolExpr(1),
                   {plan.numRanges, plan.numSlabs}),
               numParts}) {
  setBlockThreads(b, block.numThreads);
  thread = gpu::ThreadIdOp::create(b, gpu::Dimension::x);
  subpart = b.op<arith::DivUIOp>(thread, b.index(plan.slab));
  columnInSlab = b.op<arith::RemUIOp>(thread, b.index(plan.slab));
  numColumns = memref::DimOp::create(b, op.getH(), b.index(1));
  numClusters = memref::DimOp::create(b, op.getOuts()[0], b.index(0));
  Value number = cluster.getId(0);
  firstColumn =
      b.mul(b.op<arith::RemUIOp>(number, plan.slabs), b.index(plan.slab));
  firstCluster =
      b.mul(b.op<arith::DivUIOp>(number, plan.slabs), b.index(plan.range));
  column =
      minimum(b.add(firstColumn, columnInSlab), b.sub(numColumns, b.index(1)));
  Value numTokens = memref::DimOp::create(b, op.getH(), b.index(0));
  std::tie(begin, end) = cluster.getPart(numTokens, /*dim=*/1, plan.parts);

  Type i32 = b.getI32Type();
  table = alloc(plan.subparts * (plan.range + 1) * plan.slab, b.getF32Type());
  means = alloc((plan.range + 1) * plan.slab, b.getF32Type());
  ownCounts = alloc(plan.range, i32);
  totalCounts = alloc(plan.range, i32);
  listed = alloc(plan.maxTokens + kRowsAtATime, i32);
  found = alloc(block.numThreads / kWarpSize, i32);
}

//===----------------------------------------------------------------------===//
// The list
//===----------------------------------------------------------------------===//

/// Appends the tokens of the range among those of the threads from `first` on.
void BlockSums::listSome(Value first) {
  Value token = b.add(first, thread);
  Value isMember = less(token, end);
  token = minimum(token, b.sub(end, b.index(1)));
  Value assigned = load(op.getAssign(), token);
  // Compared as given, for an i64 may be far out of range.
  Type type = assigned.getType();
  Value inRange = b.sub(assigned, b.castInt(firstCluster, type));
  Value limit =
      arith::ConstantOp::create(b, b.getIntegerAttr(type, plan.range));
  isMember = b.both(isMember, less(assigned, b.castInt(numClusters, type)));
  isMember = b.both(isMember, less(inRange, limit));
  if (Value mask = op.getMask())
    isMember = b.both(isMember, load(mask, token));
  if (!type.isInteger(32))
    inRange = arith::TruncIOp::create(b, b.getI32Type(), inRange);

  Value lane = b.toI32(b.op<arith::RemUIOp>(thread, b.index(kWarpSize)));
  Value warp = b.op<arith::DivUIOp>(thread, b.index(kWarpSize));
  Value members = b.ballot(isMember);
  b.ifThen(b.compare(CmpIPredicate::eq, lane, b.i32(0)),
           [&] { store(b.countBits(members), found, warp); });
  gpu::BarrierOp::create(b);
  Value below = b.sub(b.op<arith::ShLIOp>(b.i32(1), lane), b.i32(1));
  Value position = b.add(numListed, b.countBits(b.both(members, below)));
  for (int64_t other = 0; other < block.numThreads / kWarpSize; ++other) {
    Value count = load(found, b.index(other));
    Value isEarlier = less(b.index(other), warp);
    position = b.add(position, b.select(isEarlier, count, b.i32(0)));
    numListed = b.add(numListed, count);
  }
  b.ifThen(isMember, [&] {
    Value offset = b.toI32(b.sub(token, begin));
    store(getEntry(offset, b.mul(inRange, b.i32(plan.slab))), listed,
          b.toIndex(position));
    b.atomicAdd(ownCounts, inRange, b.i32(1));
  });
  // Before the next ones write what they found.
  gpu::BarrierOp::create(b);
}

void BlockSums::listTokens() {
  b.loop(thread, b.index(plan.range), block.numThreads,
         [&](Value i) { store(b.i32(0), ownCounts, i); });
  gpu::BarrierOp::create(b);
  numListed = b.toIndex(
      b.loop(begin, end, block.numThreads, ValueRange{b.i32(0)},
             [&](Value first, ValueRange carried) -> SmallVector<Value> {
               numListed = carried[0];
               listSome(first);
               return {numListed};
             })[0]);
  padList();
}

/// Behind the list follows a group of the first token, as if it were of a
/// cluster behind the range, whose row of the tables nobody reads, so that each
/// group is whole.
void BlockSums::padList() {
  Value place = b.i32(plan.range * plan.slab);
  b.ifThen(less(thread, b.index(kRowsAtATime)), [&] {
    store(getEntry(b.i32(0), place), listed, b.add(numListed, thread));
  });
  b.ifThen(less(thread, b.index(plan.slab)),
           [&] { store(b.f32(0.0), means, b.add(b.toIndex(place), thread)); });
  gpu::BarrierOp::create(b);
}

//===----------------------------------------------------------------------===//
// The table
//===----------------------------------------------------------------------===//

void BlockSums::clear() {
  b.loop(b.index(0), b.index(plan.range + 1), 1,
         [&](Value i) { store(b.f32(0.0), table, inTable(i)); });
}

Value BlockSums::getDeviation(Value element, Value slot) {
  Value deviation = b.sub(element, load(means, slot));
  return op.getMeasure() == DispersionMeasure::Variance
             ? b.mul(deviation, deviation)
             : b.abs(deviation);
}

/// Of each row of a group its element, whose load may still be under way, and
/// where its cluster has its row in a table, i32.
SmallVector<Value> BlockSums::loadGroup(Value first) {
  SmallVector<Value> elements, places;
  Value begin32 = b.toI32(begin);
  SmallVector<Value> entries;
  auto type = VectorType::get({4}, b.getI32Type());
  for (int64_t i = 0; i < kRowsAtATime; i += 4) {
    Value some = vector::LoadOp::create(
        b, type, listed, b.add(first, b.index(i)),
        /*nontemporal=*/false, llvm::MaybeAlign(4 * sizeof(int32_t)));
    for (int64_t j = 0; j < 4; ++j)
      entries.push_back(vector::ExtractOp::create(b, some, j));
  }
  for (Value entry : entries) {
    Value offset = b.op<arith::ShRUIOp>(entry, b.i32(kPlaceBits));
    Value row = b.toIndex(b.add(begin32, offset));
    elements.push_back(b.loadF32(op.getH(), {row, column}));
    places.push_back(b.both(entry, b.i32((1 << kPlaceBits) - 1)));
  }
  llvm::append_range(elements, places);
  return elements;
}

void BlockSums::addGroup(ValueRange group, bool areDeviations) {
  Value column32 = b.toI32(b.sub(column, firstColumn));
  Value ownTable = b.toI32(inTable(b.index(0)));
  for (int64_t i = 0; i < kRowsAtATime; ++i) {
    Value place = group[kRowsAtATime + i], term = group[i];
    if (areDeviations)
      term = getDeviation(term, b.toIndex(b.add(place, column32)));
    place = b.toIndex(b.add(place, ownTable));
    store(b.add(load(table, place), term), table, place);
  }
}

/// A group that begins behind the list is the one at hand, not loaded again.
SmallVector<Value> BlockSums::loadNextGroup(Value first, ValueRange group) {
  auto next = scf::IfOp::create(
      b, less(first, numListed),
      [&](OpBuilder &builder, Location loc) {
        OpBuilder::InsertionGuard guard(b);
        b.setInsertionPointToEnd(builder.getBlock());
        scf::YieldOp::create(b, loadGroup(first));
      },
      [&](OpBuilder &builder, Location loc) {
        scf::YieldOp::create(builder, loc, group);
      });
  return llvm::to_vector_of<Value>(next.getResults());
}

/// The subparts take groups of the list in turns. The next one is loaded while
/// one is added.
void BlockSums::addRows(bool areDeviations) {
  Value first = b.mul(subpart, b.index(kRowsAtATime));
  int64_t step = plan.subparts * kRowsAtATime;
  b.ifThen(less(first, numListed), [&] {
    b.loop(first, numListed, step, loadGroup(first),
           [&](Value first, ValueRange group) {
             SmallVector<Value> next =
                 loadNextGroup(b.add(first, b.index(step)), group);
             addGroup(group, areDeviations);
             return next;
           });
  });
}

/// The tables of the block become one; all blocks may read it.
void BlockSums::addSubparts() {
  if (plan.subparts > 1) {
    gpu::BarrierOp::create(b);
    int64_t size = plan.range * plan.slab;
    int64_t tableSize = size + plan.slab;
    b.loop(thread, b.index(size), block.numThreads, [&](Value slot) {
      Value sum = load(table, slot);
      for (int64_t part = 1; part < plan.subparts; ++part)
        sum = b.add(sum, load(table, b.add(slot, b.index(part * tableSize))));
      store(sum, table, slot);
    });
  }
  cluster.barrier();
}

//===----------------------------------------------------------------------===//
// Results
//===----------------------------------------------------------------------===//

void BlockSums::forEachOwn(function_ref<void(Value, Value, Value)> body) {
  Workers workers = cluster.getWorkers();
  b.loop(workers.thread, b.index(plan.range * plan.slab), workers.count,
         [&](Value slot) {
           Value width = b.index(plan.slab);
           Value row = b.add(firstCluster, b.op<arith::DivUIOp>(slot, width));
           Value own = b.add(firstColumn, b.op<arith::RemUIOp>(slot, width));
           Value exists = b.both(less(row, numClusters), less(own, numColumns));
           b.ifThen(exists, [&] { body(slot, row, own); });
         });
}

Value BlockSums::getQuotient(Value slot, Value row) {
  Value count = load(totalCounts, b.sub(row, firstCluster));
  Value isEmpty = b.compare(CmpIPredicate::eq, count, b.i32(0));
  Value size = arith::SIToFPOp::create(b, b.getF32Type(), count);
  Value total = cluster.sum(table, b.toI32(slot));
  return b.select(isEmpty, b.f32(0.0), b.div(total, size));
}

/// Means, deviations from them and dispersions: the totals of the cluster are
/// those of all tokens.
void BlockSums::finishAlone() {
  Value isFirstSlab = b.compare(CmpIPredicate::eq, firstColumn, b.index(0));
  Value isFirstBlock =
      b.compare(CmpIPredicate::eq, cluster.getRank(), b.index(0));
  b.loop(thread, b.index(plan.range), block.numThreads, [&](Value i) {
    Value count = cluster.sum(ownCounts, b.toI32(i));
    store(count, totalCounts, i);
    Value row = b.add(firstCluster, i);
    b.ifThen(b.both(less(row, numClusters), b.both(isFirstSlab, isFirstBlock)),
             [&] { store(count, op.getOuts()[2], row); });
  });
  gpu::BarrierOp::create(b);
  forEachOwn([&](Value slot, Value row, Value own) {
    Value mean = getQuotient(slot, row);
    store(mean, op.getOuts()[1], {row, own});
    cluster.storeToAll(mean, means, b.toI32(slot));
  });
  cluster.barrier();
  clear();
  addRows(/*areDeviations=*/true);
  addSubparts();
  forEachOwn([&](Value slot, Value row, Value own) {
    store(getQuotient(slot, row), op.getOuts()[0], {row, own});
  });
}

void BlockSums::writePart(Value sums, Value counts) {
  Value part = cluster.getId(1);
  forEachOwn([&](Value slot, Value row, Value own) {
    store(cluster.sum(table, b.toI32(slot)), sums, {part, row, own});
    if (!counts)
      return;
    b.ifThen(b.compare(CmpIPredicate::eq, own, b.index(0)), [&] {
      Value inRange = b.toI32(b.sub(row, firstCluster));
      store(cluster.sum(ownCounts, inRange), counts, {part, row});
    });
  });
}

void BlockSums::emitSums(Value sums, Value counts) {
  listTokens();
  clear();
  addRows(/*areDeviations=*/false);
  addSubparts();
  b.ifThen(plan.isOnePart(b), [&] { finishAlone(); });
  if (sums)
    b.ifThen(b.negate(plan.isOnePart(b)), [&] { writePart(sums, counts); });
  cluster.barrier();
}

void BlockSums::emitDeviations(Value sums) {
  // The same for all blocks of a cluster, which meet inside.
  b.ifThen(less(cluster.getId(1), plan.parts), [&] {
    listTokens();
    clear();
    // A block reads its share of the means for all, which must have started.
    cluster.barrier();
    forEachOwn([&](Value slot, Value row, Value own) {
      Value mean =
          memref::LoadOp::create(b, op.getOuts()[1], ValueRange{row, own});
      cluster.storeToAll(mean, means, b.toI32(slot));
    });
    cluster.barrier();
    addRows(/*areDeviations=*/true);
    addSubparts();
    writePart(sums, /*counts=*/Value());
    cluster.barrier();
  });
}

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
    Plan plan(b, op, block);
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
  static Value allocateParts(ThreadBuilder &b, const Plan &plan, Value whole,
                             Type element) {
    auto type = cast<MemRefType>(whole.getType());
    SmallVector<int64_t> shape{ShapedType::kDynamic};
    llvm::append_range(shape, type.getShape());
    SmallVector<Value> sizes{plan.parts};
    for (int64_t dim = 0; dim < type.getRank(); ++dim)
      if (type.isDynamicDim(dim))
        sizes.push_back(memref::DimOp::create(b, whole, dim));
    return memref::AllocOp::create(b, MemRefType::get(shape, element), sizes);
  }

  void emitCombination(ThreadBuilder &b, MadDispersionOp op, const Plan &plan,
                       Value sums, Value counts, Value out) const {
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
