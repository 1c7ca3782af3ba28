//===- Dispersion.cpp - mad_dispersion to a grid --------------------------===//
//
// Four loops over blocks: sums of the rows of each cluster, means; sums of the
// deviations from them, dispersions. A block of the first and third takes a
// slab of columns, a part of the tokens and a range of clusters; a thread owns
// a column and adds the rows of the part, in their order, to a table of one row
// a cluster in workgroup memory, which no other thread touches:
//
//   for each 128 tokens of the part:
//     the threads list those that are in the range          (ballots)
//     for each of the list, 8 at a time:
//       table[cluster, column] += h[token, column]
//   partials[part, cluster, column] = table
//
// Only rows of the range are read, so that h is read once a pass however many
// ranges there are. The second and fourth loops add up the parts in order. The
// number of parts is fixed, hence the order of every sum.
//
//===----------------------------------------------------------------------===//

#include "KernelFacts.h"
#include "ThreadBuilder.h"
#include "ThreadLowerings.h"

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

/// Parts of the tokens.
static constexpr int64_t kTokenParts = 64;
/// Clusters of a range: their table of 128 columns is 32 KiB.
static constexpr int64_t kMaxRange = 64;
/// Rows whose loads are under way together.
static constexpr int64_t kRowsAtATime = 8;
/// Blocks that combine parts.
static constexpr int64_t kCombiningBlocks = 128;

//===----------------------------------------------------------------------===//
// One sweep over the rows
//===----------------------------------------------------------------------===//

namespace {
/// Emits what a block does for its slab, part and range.
class Sweep {
public:
  /// `mean` is null in the pass that sums the rows.
  Sweep(ThreadBuilder &b, MadDispersionOp op, BlockShape block, int64_t range,
        Value mean)
      : b(b), op(op), block(block), range(range), mean(mean) {}

  /// `ids` are the numbers of the range, the part and the slab.
  void emit(ArrayRef<Value> ids, Value sums, Value counts);

private:
  void allocate();
  void clear();
  void listTokens(Value first, Value end);
  void addList();
  Value getTerm(Value row, Value cluster);
  void writeParts(Value part, Value sums, Value counts);

  Value alloc(int64_t size, Type type) {
    return memref::AllocOp::create(b, MemRefType::get({size}, type));
  }
  Value load(Value buffer, Value index) {
    return memref::LoadOp::create(b, buffer, index);
  }
  void store(Value value, Value buffer, ValueRange place) {
    memref::StoreOp::create(b, value, buffer, place);
  }
  void ifThen(Value condition, function_ref<void()> body) {
    auto branch = scf::IfOp::create(b, condition, /*withElseRegion=*/false);
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(branch.thenBlock());
    body();
  }
  void loop(Value begin, Value end, int64_t step,
            function_ref<void(Value)> body) {
    auto loop = scf::ForOp::create(b, begin, end, b.index(step));
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(loop.getBody());
    body(loop.getInductionVar());
  }
  Value minimum(Value lhs, Value rhs) { return b.op<arith::MinUIOp>(lhs, rhs); }
  /// The place in the table of a cluster of the range, for this thread.
  Value inTable(Value cluster) {
    return b.add(b.mul(cluster, b.index(block.numThreads)), thread);
  }

  ThreadBuilder &b;
  MadDispersionOp op;
  BlockShape block;
  int64_t range;
  Value mean;
  Value thread, numTokens, numColumns, numClusters;
  /// The thread's column, and the one it reads: the last if it has none.
  Value column, readColumn;
  Value firstCluster;
  /// The table has one row more than the range, for rows that do not count.
  Value table, ownCounts;
  /// The list: tokens from the first of the 128 on, their clusters in the
  /// range, and how many each warp found.
  Value listedTokens, listedClusters, found, numListed, firstListed;
};
} // namespace

void Sweep::allocate() {
  Type i32 = b.getI32Type();
  table = alloc((range + 1) * block.numThreads, b.getF32Type());
  ownCounts = alloc(range, i32);
  listedTokens = alloc(block.numThreads + kRowsAtATime, i32);
  listedClusters = alloc(block.numThreads + kRowsAtATime, i32);
  found = alloc(block.numThreads / kWarpSize, i32);
}

void Sweep::clear() {
  loop(b.index(0), b.index(range + 1), 1,
       [&](Value cluster) { store(b.f32(0.0), table, inTable(cluster)); });
  loop(thread, b.index(range), block.numThreads,
       [&](Value cluster) { store(b.i32(0), ownCounts, cluster); });
  gpu::BarrierOp::create(b);
}

/// Lists the tokens of the range among first .. min(first + 128, end), in
/// order. The list is filled up with `kRowsAtATime` entries that do not count.
void Sweep::listTokens(Value first, Value end) {
  firstListed = first;
  Value token = b.add(first, thread);
  Value isMember = b.compare(CmpIPredicate::ult, token, end);
  token = minimum(token, b.op<arith::SubIOp>(end, b.index(1)));
  Value assigned = load(op.getAssign(), token);
  // Compared as given, for an i64 may be far out of range.
  Type type = assigned.getType();
  Value inRange =
      b.op<arith::SubIOp>(assigned, b.toInteger(firstCluster, type));
  Value isCluster =
      b.compare(CmpIPredicate::ult, assigned, b.toInteger(numClusters, type));
  Value limit = arith::ConstantOp::create(b, b.getIntegerAttr(type, range));
  isCluster = b.both(isCluster, b.compare(CmpIPredicate::ult, inRange, limit));
  isMember = b.both(isMember, isCluster);
  if (Value mask = op.getMask())
    isMember = b.both(isMember, load(mask, token));
  if (!type.isInteger(32))
    inRange = arith::TruncIOp::create(b, b.getI32Type(), inRange);

  Value lane = b.toI32(b.op<arith::RemUIOp>(thread, b.index(kWarpSize)));
  Value warp = b.op<arith::DivUIOp>(thread, b.index(kWarpSize));
  Value members = b.ballot(isMember);
  ifThen(b.compare(CmpIPredicate::eq, lane, b.i32(0)),
         [&] { store(b.countBits(members), found, warp); });
  gpu::BarrierOp::create(b);
  Value position = b.countBits(
      b.both(members, b.op<arith::SubIOp>(b.op<arith::ShLIOp>(b.i32(1), lane),
                                          b.i32(1))));
  numListed = b.i32(0);
  for (int64_t other = 0; other < block.numThreads / kWarpSize; ++other) {
    Value count = load(found, b.index(other));
    Value isEarlier = b.compare(CmpIPredicate::ult, b.index(other), warp);
    position = b.add(position, b.select(isEarlier, count, b.i32(0)));
    numListed = b.add(numListed, count);
  }
  ifThen(isMember, [&] {
    store(b.toI32(thread), listedTokens, b.toIndex(position));
    store(inRange, listedClusters, b.toIndex(position));
    b.atomicAdd(ownCounts, inRange, b.i32(1));
  });
  numListed = b.toIndex(numListed);
  ifThen(b.compare(CmpIPredicate::ult, thread, b.index(kRowsAtATime)), [&] {
    Value filler = b.add(numListed, thread);
    store(b.i32(0), listedTokens, filler);
    store(b.i32(range), listedClusters, filler);
  });
  gpu::BarrierOp::create(b);
}

/// h, or its deviation from the mean of a cluster of the range.
Value Sweep::getTerm(Value row, Value cluster) {
  Value term = b.loadF32(op.getH(), {row, readColumn});
  if (!mean)
    return term;
  // A row that does not count may name a cluster past the last.
  Value last = b.op<arith::SubIOp>(numClusters, b.index(1));
  Value place = minimum(b.add(firstCluster, cluster), last);
  Value centre = memref::LoadOp::create(b, mean, ValueRange{place, readColumn});
  Value deviation = b.op<arith::SubFOp>(term, centre);
  return op.getMeasure() == DispersionMeasure::Variance
             ? b.mul(deviation, deviation)
             : b.absolute(deviation);
}

void Sweep::addList() {
  loop(b.index(0), numListed, kRowsAtATime, [&](Value first) {
    SmallVector<Value> places, terms;
    for (int64_t i = 0; i < kRowsAtATime; ++i) {
      Value entry = b.add(first, b.index(i));
      Value cluster = b.toIndex(load(listedClusters, entry));
      Value row = b.add(firstListed, b.toIndex(load(listedTokens, entry)));
      places.push_back(inTable(cluster));
      terms.push_back(getTerm(row, cluster));
    }
    for (auto [place, term] : llvm::zip_equal(places, terms))
      store(b.add(load(table, place), term), table, place);
  });
  gpu::BarrierOp::create(b);
}

void Sweep::writeParts(Value part, Value sums, Value counts) {
  Value rest = b.op<arith::SubIOp>(numClusters, firstCluster);
  Value size = minimum(rest, b.index(range));
  ifThen(b.compare(CmpIPredicate::ult, column, numColumns), [&] {
    loop(b.index(0), size, 1, [&](Value cluster) {
      store(load(table, inTable(cluster)), sums,
            {part, b.add(firstCluster, cluster), column});
    });
  });
  if (counts)
    loop(thread, size, block.numThreads, [&](Value cluster) {
      store(load(ownCounts, cluster), counts,
            {part, b.add(firstCluster, cluster)});
    });
}

void Sweep::emit(ArrayRef<Value> ids, Value sums, Value counts) {
  thread = gpu::ThreadIdOp::create(b, gpu::Dimension::x);
  numTokens = memref::DimOp::create(b, op.getH(), b.index(0));
  numColumns = memref::DimOp::create(b, op.getH(), b.index(1));
  numClusters = memref::DimOp::create(b, op.getOuts()[0], b.index(0));
  firstCluster = b.mul(ids[0], b.index(range));
  column = b.add(b.mul(ids[2], b.index(block.numThreads)), thread);
  readColumn = minimum(column, b.op<arith::SubIOp>(numColumns, b.index(1)));
  Value length = b.op<arith::DivUIOp>(
      b.add(numTokens, b.index(kTokenParts - 1)), b.index(kTokenParts));
  Value begin = minimum(b.mul(ids[1], length), numTokens);
  Value end = minimum(b.add(begin, length), numTokens);
  allocate();
  clear();
  loop(begin, end, block.numThreads, [&](Value first) {
    listTokens(first, end);
    addList();
  });
  writeParts(ids[1], sums, counts);
}

//===----------------------------------------------------------------------===//
// Combination of the parts
//===----------------------------------------------------------------------===//

/// The sum of buffer[part, place...] over the parts, in their order.
static Value addParts(ThreadBuilder &b, Value buffer, ValueRange place) {
  Type type = getElementTypeOrSelf(buffer.getType());
  Value zero = arith::ConstantOp::create(b, b.getZeroAttr(type));
  auto loop = scf::ForOp::create(
      b, b.index(0), b.index(kTokenParts), b.index(1), zero,
      [&](OpBuilder &builder, Location loc, Value part, ValueRange acc) {
        ThreadBuilder body(loc, builder);
        SmallVector<Value> indices{part};
        llvm::append_range(indices, place);
        Value value = memref::LoadOp::create(body, buffer, indices);
        scf::YieldOp::create(body, body.add(acc[0], value));
      });
  return loop.getResult(0);
}

/// out = sum / count, 0 for an empty cluster (E14). `partCounts` is null if
/// the counts have been combined before.
static void emitQuotients(ThreadBuilder &b, MadDispersionOp op, Workers workers,
                          Value sums, Value partCounts, Value out) {
  Value clusters = memref::DimOp::create(b, out, b.index(0));
  Value columns = memref::DimOp::create(b, out, b.index(1));
  auto loop = scf::ForOp::create(b, workers.thread, b.mul(clusters, columns),
                                 b.index(workers.count));
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPointToStart(loop.getBody());
  Value cluster = b.op<arith::DivUIOp>(loop.getInductionVar(), columns);
  Value column = b.op<arith::RemUIOp>(loop.getInductionVar(), columns);
  Value countBuffer = op.getOuts()[2], count;
  if (partCounts) {
    count = addParts(b, partCounts, cluster);
    auto ifFirst =
        scf::IfOp::create(b, b.compare(CmpIPredicate::eq, column, b.index(0)),
                          /*withElseRegion=*/false);
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(ifFirst.thenBlock());
    memref::StoreOp::create(b, count, countBuffer, cluster);
  } else {
    count = memref::LoadOp::create(b, countBuffer, cluster);
  }
  Value sum = addParts(b, sums, {cluster, column});
  Value isEmpty = b.compare(CmpIPredicate::eq, count, b.i32(0));
  Value size = arith::SIToFPOp::create(b, b.getF32Type(), count);
  memref::StoreOp::create(
      b, b.select(isEmpty, b.f32(0.0), b.op<arith::DivFOp>(sum, size)), out,
      ValueRange{cluster, column});
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
    auto type = cast<MemRefType>(op.getOuts()[0].getType());
    SmallVector<Value> sizes;
    for (int64_t dim = 0; dim < 2; ++dim)
      if (type.isDynamicDim(dim))
        sizes.push_back(memref::DimOp::create(b, op.getOuts()[0], dim));
    auto allocate = [&](ArrayRef<int64_t> shape, Type element,
                        ValueRange sizes) -> Value {
      SmallVector<int64_t> partShape{kTokenParts};
      llvm::append_range(partShape, shape);
      return memref::AllocOp::create(b, MemRefType::get(partShape, element),
                                     sizes);
    };
    Value sums = allocate(type.getShape(), b.getF32Type(), sizes);
    Value counts =
        allocate(type.getShape().take_front(), b.getI32Type(),
                 ValueRange(sizes).take_front(type.isDynamicDim(0) ? 1 : 0));

    Value spread = op.getOuts()[0], mean = op.getOuts()[1];
    emitSweep(b, op, Value(), sums, counts);
    emitCombination(b, op, sums, counts, mean);
    emitSweep(b, op, mean, sums, Value());
    emitCombination(b, op, sums, Value(), spread);
    rewriter.eraseOp(op);
    return success();
  }

private:
  void emitSweep(ThreadBuilder &b, MadDispersionOp op, Value mean, Value sums,
                 Value counts) const {
    OpBuilder::InsertionGuard guard(b);
    auto type = cast<MemRefType>(op.getOuts()[0].getType());
    int64_t range = type.isDynamicDim(0)
                        ? kMaxRange
                        : std::clamp<int64_t>(type.getDimSize(0), 1, kMaxRange);
    auto divided = [&](int64_t dim, int64_t by) {
      AffineExpr size = b.getAffineSymbolExpr(0);
      return affine::makeComposedFoldedAffineApply(
          b, b.getLoc(), size.ceilDiv(by),
          {memref::getMixedSize(b, b.getLoc(), op.getOuts()[0], dim)});
    };
    SmallVector<Value> ids =
        createGrid(b, {divided(0, range), b.getIndexAttr(kTokenParts),
                       divided(1, block.numThreads)});
    Sweep(b, op, block, range, mean).emit(ids, sums, counts);
  }

  void emitCombination(ThreadBuilder &b, MadDispersionOp op, Value sums,
                       Value counts, Value out) const {
    OpBuilder::InsertionGuard guard(b);
    Value id = createGrid(b, b.getIndexAttr(kCombiningBlocks));
    emitQuotients(b, op, Workers::ofGrid(b, block, id, kCombiningBlocks), sums,
                  counts, out);
  }

  BlockShape block;
};
} // namespace

void mlir::moe::addDispersionFacts(KernelFacts &facts) {
  facts.addForms(hasGridKernel);
}

void mlir::moe::populateDispersionToGridPatterns(RewritePatternSet &patterns,
                                                 BlockShape block) {
  patterns.add<MadDispersionToGrid>(patterns.getContext(), block);
}
