//===- DispersionSums.cpp - The sums that a block adds up -----------------===//

#include "DispersionSums.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// Rows whose loads are under way together, while those before are added.
static constexpr int64_t kRowsAtATime = 16;
/// Bits of an entry of the list that say where its cluster has its row.
static constexpr int64_t kPlaceBits = 16;

//===----------------------------------------------------------------------===//
// Where a block stands
//===----------------------------------------------------------------------===//

DispersionBlock::DispersionBlock(ThreadBuilder &b, MadDispersionOp op,
                                 const DispersionPlan &plan,
                                 OpFoldResult numParts)
    : b(b), op(op), plan(plan), numThreads(plan.block.numThreads),
      cluster(b, plan.block,
              {affine::makeComposedFoldedAffineApply(
                   b, b.getLoc(),
                   b.getAffineSymbolExpr(0) * b.getAffineSymbolExpr(1),
                   {plan.numRanges, plan.numSlabs}),
               numParts}) {
  setBlockThreads(b, numThreads);
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
}

void DispersionBlock::forEachOwn(function_ref<void(Value, Value, Value)> body) {
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

//===----------------------------------------------------------------------===//
// The list
//===----------------------------------------------------------------------===//

TokenCounts::TokenCounts(DispersionBlock &block)
    : own(block.alloc(block.plan.range, block.b.getI32Type())),
      total(block.alloc(block.plan.range, block.b.getI32Type())) {}

TokenList::TokenList(DispersionBlock &block)
    : block(block), b(block.b),
      listed(block.alloc(block.plan.maxTokens + kRowsAtATime, b.getI32Type())),
      found(block.alloc(block.numThreads / kWarpSize, b.getI32Type())) {}

Value TokenList::getEntry(Value offset, Value place) {
  return b.either(b.op<arith::ShLIOp>(offset, b.i32(kPlaceBits)), place);
}

/// Appends the tokens of the range among those of the threads from `first` on.
void TokenList::listSome(Value first, const TokenCounts &counts) {
  Value token = b.add(first, block.thread);
  Value isMember = block.less(token, block.end);
  token = block.minimum(token, b.sub(block.end, b.index(1)));
  Value assigned = block.load(block.op.getAssign(), token);
  // Compared as given, for an i64 may be far out of range.
  Type type = assigned.getType();
  Value inRange = b.sub(assigned, b.castInt(block.firstCluster, type));
  Value limit =
      arith::ConstantOp::create(b, b.getIntegerAttr(type, block.plan.range));
  isMember = b.both(isMember,
                    block.less(assigned, b.castInt(block.numClusters, type)));
  isMember = b.both(isMember, block.less(inRange, limit));
  if (Value mask = block.op.getMask())
    isMember = b.both(isMember, block.load(mask, token));
  if (!type.isInteger(32))
    inRange = arith::TruncIOp::create(b, b.getI32Type(), inRange);

  Value lane = b.toI32(b.op<arith::RemUIOp>(block.thread, b.index(kWarpSize)));
  Value warp = b.op<arith::DivUIOp>(block.thread, b.index(kWarpSize));
  Value members = b.ballot(isMember);
  b.ifThen(b.compare(CmpIPredicate::eq, lane, b.i32(0)),
           [&] { block.store(b.countBits(members), found, warp); });
  gpu::BarrierOp::create(b);
  Value below = b.sub(b.op<arith::ShLIOp>(b.i32(1), lane), b.i32(1));
  Value position = b.add(length, b.countBits(b.both(members, below)));
  for (int64_t other = 0; other < block.numThreads / kWarpSize; ++other) {
    Value count = block.load(found, b.index(other));
    Value isEarlier = block.less(b.index(other), warp);
    position = b.add(position, b.select(isEarlier, count, b.i32(0)));
    length = b.add(length, count);
  }
  b.ifThen(isMember, [&] {
    Value offset = b.toI32(b.sub(token, block.begin));
    block.store(getEntry(offset, b.mul(inRange, b.i32(block.plan.slab))),
                listed, b.toIndex(position));
    b.atomicAdd(counts.own, inRange, b.i32(1));
  });
  // Before the next ones write what they found.
  gpu::BarrierOp::create(b);
}

void TokenList::listTokens(const TokenCounts &counts, Value means) {
  b.loop(block.thread, b.index(block.plan.range), block.numThreads,
         [&](Value i) { block.store(b.i32(0), counts.own, i); });
  gpu::BarrierOp::create(b);
  length = b.toIndex(
      b.loop(block.begin, block.end, block.numThreads, ValueRange{b.i32(0)},
             [&](Value first, ValueRange carried) -> SmallVector<Value> {
               length = carried[0];
               listSome(first, counts);
               return {length};
             })[0]);
  pad(means);
}

/// Behind the list follows a group of the first token, as if it were of a
/// cluster behind the range, whose row of the tables nobody reads, so that each
/// group is whole.
void TokenList::pad(Value means) {
  Value place = b.i32(block.plan.range * block.plan.slab);
  b.ifThen(block.less(block.thread, b.index(kRowsAtATime)), [&] {
    block.store(getEntry(b.i32(0), place), listed, b.add(length, block.thread));
  });
  b.ifThen(block.less(block.thread, b.index(block.plan.slab)), [&] {
    block.store(b.f32(0.0), means, b.add(b.toIndex(place), block.thread));
  });
  gpu::BarrierOp::create(b);
}

//===----------------------------------------------------------------------===//
// The tables
//===----------------------------------------------------------------------===//

SlabTables::SlabTables(DispersionBlock &block)
    : block(block), b(block.b),
      table(block.alloc(block.plan.subparts * (block.plan.range + 1) *
                            block.plan.slab,
                        b.getF32Type())),
      means(block.alloc((block.plan.range + 1) * block.plan.slab,
                        b.getF32Type())) {}

Value SlabTables::inTable(Value cluster) {
  Value row =
      b.add(b.mul(block.subpart, b.index(block.plan.range + 1)), cluster);
  return b.add(b.mul(row, b.index(block.plan.slab)), block.columnInSlab);
}

void SlabTables::clear() {
  b.loop(b.index(0), b.index(block.plan.range + 1), 1,
         [&](Value i) { block.store(b.f32(0.0), table, inTable(i)); });
}

Value SlabTables::getDeviation(Value element, Value slot) {
  Value deviation = b.sub(element, block.load(means, slot));
  return block.op.getMeasure() == DispersionMeasure::Variance
             ? b.mul(deviation, deviation)
             : b.abs(deviation);
}

/// Of each row of a group its element, whose load may still be under way, and
/// where its cluster has its row in a table, i32.
SmallVector<Value> SlabTables::loadGroup(const TokenList &list, Value first) {
  SmallVector<Value> elements, places;
  Value begin32 = b.toI32(block.begin);
  SmallVector<Value> entries;
  auto type = VectorType::get({4}, b.getI32Type());
  for (int64_t i = 0; i < kRowsAtATime; i += 4) {
    Value some = vector::LoadOp::create(
        b, type, list.getListed(), b.add(first, b.index(i)),
        /*nontemporal=*/false, llvm::MaybeAlign(4 * sizeof(int32_t)));
    for (int64_t j = 0; j < 4; ++j)
      entries.push_back(vector::ExtractOp::create(b, some, j));
  }
  for (Value entry : entries) {
    Value offset = b.op<arith::ShRUIOp>(entry, b.i32(kPlaceBits));
    Value row = b.toIndex(b.add(begin32, offset));
    elements.push_back(b.loadF32(block.op.getH(), {row, block.column}));
    places.push_back(b.both(entry, b.i32((1 << kPlaceBits) - 1)));
  }
  llvm::append_range(elements, places);
  return elements;
}

void SlabTables::addGroup(ValueRange group, bool areDeviations) {
  Value column32 = b.toI32(b.sub(block.column, block.firstColumn));
  Value ownTable = b.toI32(inTable(b.index(0)));
  for (int64_t i = 0; i < kRowsAtATime; ++i) {
    Value place = group[kRowsAtATime + i], term = group[i];
    if (areDeviations)
      term = getDeviation(term, b.toIndex(b.add(place, column32)));
    place = b.toIndex(b.add(place, ownTable));
    block.store(b.add(block.load(table, place), term), table, place);
  }
}

/// A group that begins behind the list is the one at hand, not loaded again.
SmallVector<Value> SlabTables::loadNextGroup(const TokenList &list, Value first,
                                             ValueRange group) {
  auto next = scf::IfOp::create(
      b, block.less(first, list.getLength()),
      [&](OpBuilder &builder, Location loc) {
        OpBuilder::InsertionGuard guard(b);
        b.setInsertionPointToEnd(builder.getBlock());
        scf::YieldOp::create(b, loadGroup(list, first));
      },
      [&](OpBuilder &builder, Location loc) {
        scf::YieldOp::create(builder, loc, group);
      });
  return llvm::to_vector_of<Value>(next.getResults());
}

/// The subparts take groups of the list in turns. The next one is loaded while
/// one is added.
void SlabTables::addRows(const TokenList &list, bool areDeviations) {
  Value first = b.mul(block.subpart, b.index(kRowsAtATime));
  int64_t step = block.plan.subparts * kRowsAtATime;
  b.ifThen(block.less(first, list.getLength()), [&] {
    b.loop(first, list.getLength(), step, loadGroup(list, first),
           [&](Value first, ValueRange group) {
             SmallVector<Value> next =
                 loadNextGroup(list, b.add(first, b.index(step)), group);
             addGroup(group, areDeviations);
             return next;
           });
  });
}

/// The tables of the block become one; all blocks may read it.
void SlabTables::addSubparts() {
  if (block.plan.subparts > 1) {
    gpu::BarrierOp::create(b);
    int64_t size = block.plan.range * block.plan.slab;
    int64_t tableSize = size + block.plan.slab;
    b.loop(block.thread, b.index(size), block.numThreads, [&](Value slot) {
      Value sum = block.load(table, slot);
      for (int64_t part = 1; part < block.plan.subparts; ++part)
        sum = b.add(sum,
                    block.load(table, b.add(slot, b.index(part * tableSize))));
      block.store(sum, table, slot);
    });
  }
  block.cluster.barrier();
}

//===----------------------------------------------------------------------===//
// Results
//===----------------------------------------------------------------------===//

BlockSums::BlockSums(ThreadBuilder &b, MadDispersionOp op,
                     const DispersionPlan &plan, OpFoldResult numParts)
    : b(b), op(op), plan(plan), block(b, op, plan, numParts), tables(block),
      counts(block), list(block) {}

Value BlockSums::getQuotient(Value slot, Value row) {
  Value count = block.load(counts.total, b.sub(row, block.firstCluster));
  Value isEmpty = b.compare(CmpIPredicate::eq, count, b.i32(0));
  Value size = arith::SIToFPOp::create(b, b.getF32Type(), count);
  Value total = block.cluster.sum(tables.getTable(), b.toI32(slot));
  return b.select(isEmpty, b.f32(0.0), b.div(total, size));
}

/// Means, deviations from them and dispersions: the totals of the cluster are
/// those of all tokens.
void BlockSums::finishAlone() {
  Value isFirstSlab =
      b.compare(CmpIPredicate::eq, block.firstColumn, b.index(0));
  Value isFirstBlock =
      b.compare(CmpIPredicate::eq, block.cluster.getRank(), b.index(0));
  b.loop(block.thread, b.index(plan.range), block.numThreads, [&](Value i) {
    Value count = block.cluster.sum(counts.own, b.toI32(i));
    block.store(count, counts.total, i);
    Value row = b.add(block.firstCluster, i);
    b.ifThen(b.both(block.less(row, block.numClusters),
                    b.both(isFirstSlab, isFirstBlock)),
             [&] { block.store(count, op.getOuts()[2], row); });
  });
  gpu::BarrierOp::create(b);
  block.forEachOwn([&](Value slot, Value row, Value own) {
    Value mean = getQuotient(slot, row);
    block.store(mean, op.getOuts()[1], {row, own});
    block.cluster.storeToAll(mean, tables.getMeans(), b.toI32(slot));
  });
  block.cluster.barrier();
  tables.clear();
  tables.addRows(list, /*areDeviations=*/true);
  tables.addSubparts();
  block.forEachOwn([&](Value slot, Value row, Value own) {
    block.store(getQuotient(slot, row), op.getOuts()[0], {row, own});
  });
}

void BlockSums::writePart(Value sums, Value partCounts) {
  Value part = block.cluster.getId(1);
  block.forEachOwn([&](Value slot, Value row, Value own) {
    block.store(block.cluster.sum(tables.getTable(), b.toI32(slot)), sums,
                {part, row, own});
    if (!partCounts)
      return;
    b.ifThen(b.compare(CmpIPredicate::eq, own, b.index(0)), [&] {
      Value inRange = b.toI32(b.sub(row, block.firstCluster));
      block.store(block.cluster.sum(counts.own, inRange), partCounts,
                  {part, row});
    });
  });
}

void BlockSums::emitSums(Value sums, Value partCounts) {
  list.listTokens(counts, tables.getMeans());
  tables.clear();
  tables.addRows(list, /*areDeviations=*/false);
  tables.addSubparts();
  b.ifThen(plan.isOnePart(b), [&] { finishAlone(); });
  if (sums)
    b.ifThen(b.negate(plan.isOnePart(b)), [&] { writePart(sums, partCounts); });
  block.cluster.barrier();
}

void BlockSums::emitDeviations(Value sums) {
  // The same for all blocks of a cluster, which meet inside.
  b.ifThen(block.less(block.cluster.getId(1), plan.parts), [&] {
    list.listTokens(counts, tables.getMeans());
    tables.clear();
    // A block reads its share of the means for all, which must have started.
    block.cluster.barrier();
    block.forEachOwn([&](Value slot, Value row, Value own) {
      Value mean =
          memref::LoadOp::create(b, op.getOuts()[1], ValueRange{row, own});
      block.cluster.storeToAll(mean, tables.getMeans(), b.toI32(slot));
    });
    block.cluster.barrier();
    tables.addRows(list, /*areDeviations=*/true);
    tables.addSubparts();
    writePart(sums, /*partCounts=*/Value());
    block.cluster.barrier();
  });
}
