//===- GroupedLinearWarpgroup.cpp - moe.grouped_linear on warpgroups ------===//
//
// Where experts have many rows, products take the time. A block of sm_90a takes
// tiles of 128 rows of one expert by 256 rows of its weight, one after the
// other. Two warpgroups consume, 64 rows each; a third one produces: it copies
// chunks of 64 features of both, the rows of x from wherever `rows` says. The
// two sides meet at rings (Emit/Ring.h):
//
//   ring      slots    what                                     one a
//   tiles     2        which rows, of which expert              tile
//   chunks    4        64 features of the rows and weights      chunk
//
// Tiles are numbered by groups of rows (RowGroups.h), and within a group by
// columns: the blocks that run together share the rows of x and the weights of
// few experts in L2.
//
// Results of 16 bits are sums that the tensor cores add up themselves. They
// truncate each of the d / 16 additions, by 2^-23 of the sum at most, which is
// far below the rounding of the result. For results of f32 a chunk is summed
// from 0 and then added, and a tile has half as many columns, for the registers
// that this takes.
//
// With a gate, half of a tile's weight rows are gates and the other half their
// factors, so that both meet in one lane. Those that lie interleaved are sorted
// on their way to shared memory; where the weights lie transposed, they are
// neighbours in a lane.
//
//===----------------------------------------------------------------------===//

#include "GroupedLinearWarpgroup.h"

#include "Emit/Cluster.h"
#include "Emit/Ring.h"
#include "GroupedLinear.h"
#include "GroupedLinearResults.h"
#include "Product/FeatureChunks.h"
#include "RowGroups.h"
#include "ThreadLowerings.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;
using Matrix = WarpgroupBuilder::Matrix;
using Product = WarpgroupBuilder::Product;

/// Registers of a thread: a block starts with 168, the most that an SM has for
/// three warpgroups, of which the producers give away what they do not need.
static constexpr int64_t kProducerRegisters = 88, kConsumerRegisters = 208;
/// Chunks of one iteration of the loop over them.
static constexpr int64_t kChunksAtATime = 4;
/// The most blocks: some for each multiprocessor, so that those which end first
/// get another one, whatever their number.
static constexpr int64_t kMaxBlocks = 528;
/// Columns of a block of transposed weights.
static constexpr int64_t kBlockColumns = kChunkBytes / 2;

//===----------------------------------------------------------------------===//
// Parts of the emitter
//===----------------------------------------------------------------------===//

static ShapedType getShaped(Value value) {
  return cast<ShapedType>(value.getType());
}

namespace {
/// What producers and consumers know.
struct GroupedBlock {
  GroupedBlock(WarpgroupBuilder &b, GroupedLinearOp op, const TilePlan &plan,
               Value memory);

  void initBarriers();
  /// Runs `body` with the number of the tile among those of the block and among
  /// all, and with what it yielded for the tile before, at first 0.
  void
  forEachTile(function_ref<Value(Value use, Value number, Value carried)> body);

  WarpgroupBuilder &b;
  GroupedLinearOp op;
  const TilePlan &plan;
  Value thread, lane, warp;
  RowGroups groups;
  Value numTiles;
  Ring chunks, tiles;
};

/// The warpgroup that copies.
class Producer {
public:
  explicit Producer(GroupedBlock &block)
      : block(block), b(block.b), op(block.op), plan(block.plan),
        thread(b.sub(block.thread, b.i32(kConsumers * kWarpgroupSize))) {}

  void emit();

private:
  void announce(Value use, const TileOfRows &tile);
  Value produceChunks(const TileOfRows &tile, Value use);
  SmallVector<ChunkCopies::Row> getRows(ChunkCopies &copies,
                                        const TileOfRows &tile);
  SmallVector<ChunkCopies::Row> getWeightRows(ChunkCopies &copies,
                                              const TileOfRows &tile);
  void copyColumns(const TileOfRows &tile, Value shared, Value chunk);

  GroupedBlock &block;
  WarpgroupBuilder &b;
  GroupedLinearOp op;
  const TilePlan &plan;
  Value thread;
};

/// A warpgroup that multiplies.
class Consumer {
public:
  explicit Consumer(GroupedBlock &block)
      : block(block), b(block.b), op(block.op), plan(block.plan),
        warpgroup(b.div(block.warp, kWarpgroupWarps)) {}

  void emit();

private:
  TileOfRows takeTile(Value use);
  Value getFirstRow(const TileOfRows &tile);
  SmallVector<Value> multiply(Value use);

  GroupedBlock &block;
  WarpgroupBuilder &b;
  GroupedLinearOp op;
  const TilePlan &plan;
  Value warpgroup;
};

} // namespace

//===----------------------------------------------------------------------===//
// Block
//===----------------------------------------------------------------------===//

GroupedBlock::GroupedBlock(WarpgroupBuilder &b, GroupedLinearOp op,
                           const TilePlan &plan, Value memory)
    : b(b), op(op), plan(plan), thread(b.thread()), lane(b.lane()),
      // From a lane, so that it is known to be the same in all of them.
      warp(b.shuffleFrom(b.div(thread, kWarpSize), b.i32(0))),
      groups(b, op, kTileRows),
      numTiles(b.mul(groups.count(), b.i32(plan.getNumColumnTiles()))) {
  Value barriers = b.at(memory, plan.getBarrierPlace());
  chunks = {kChunkSlots, plan.getSlotBytes(), barriers, memory, kWarpgroupSize};
  tiles = {kTileSlots, kTileSlotBytes,
           b.at(barriers, Ring::getBarrierBytes(kChunkSlots)),
           b.at(memory, plan.getTilePlace()), kWarpgroupSize};
}

void GroupedBlock::initBarriers() {
  b.ifThen(b.compare(CmpIPredicate::eq, thread, b.i32(0)), [&] {
    for (const Ring &ring : {chunks, tiles})
      ring.initBarriers(b, kWarpgroupWarps * kConsumers);
  });
  b.barrier();
}

void GroupedBlock::forEachTile(
    function_ref<Value(Value use, Value number, Value carried)> body) {
  Value own = b.toI32(gpu::BlockIdOp::create(b, gpu::Dimension::x));
  Value numBlocks = b.toI32(gpu::GridDimOp::create(b, gpu::Dimension::x));
  Value count = b.add(b.sub(numTiles, own), b.sub(numBlocks, b.i32(1)));
  count = b.op<arith::DivUIOp>(b.maxSigned(count, b.i32(0)), numBlocks);
  b.loop(b.index(0), b.toIndex(count), 1, b.i32(0),
         [&](Value i, ValueRange carried) -> SmallVector<Value> {
           Value use = b.toI32(i);
           Value number = b.add(own, b.mul(use, numBlocks));
           return {body(use, number, carried[0])};
         });
}

/// What `body` yields where the condition holds, else `otherwise`.
static Value yieldIf(WarpBuilder &b, Value condition, Value otherwise,
                     function_ref<Value()> body,
                     function_ref<void()> elseBody) {
  auto branch = scf::IfOp::create(b, otherwise.getType(), condition,
                                  /*addThenBlock=*/true, /*addElseBlock=*/true);
  OpBuilder::InsertionGuard guard(b);
  b.setInsertionPointToStart(branch.thenBlock());
  scf::YieldOp::create(b, body());
  b.setInsertionPointToStart(branch.elseBlock());
  elseBody();
  scf::YieldOp::create(b, otherwise);
  return branch.getResult(0);
}

//===----------------------------------------------------------------------===//
// Producers
//===----------------------------------------------------------------------===//

void Producer::emit() {
  block.forEachTile([&](Value use, Value number, Value chunkUse) {
    Value columnTiles = b.i32(plan.getNumColumnTiles());
    RowGroup rows =
        block.groups.find(b.op<arith::DivUIOp>(number, columnTiles));
    TileOfRows tile{rows.expert, rows.begin, rows.end, rows.isOfExpert,
                    b.op<arith::RemUIOp>(number, columnTiles)};
    announce(use, tile);
    return yieldIf(
        b, tile.isOfExpert, chunkUse,
        [&] { return produceChunks(tile, chunkUse); }, [] {});
  });
  // A thread must not end before its copies have landed.
  b.commitCopies();
  b.waitForCopies(/*pending=*/0);
}

/// Tells the consumers what the tile is. All threads arrive, lest one that is
/// late waits for a slot that has been emptied twice.
void Producer::announce(Value use, const TileOfRows &tile) {
  block.tiles.waitForEmpty(b, use);
  Value isFirst = b.compare(CmpIPredicate::eq, thread, b.i32(0));
  b.ifThen(isFirst, [&] {
    Value place = block.tiles.getPlace(b, use);
    Value flag = arith::ExtUIOp::create(b, b.getI32Type(), tile.isOfExpert);
    const Value said[] = {tile.expert, tile.begin, tile.end, flag,
                          tile.columnTile};
    for (auto [i, value] : llvm::enumerate(said))
      b.store(value, b.at(place, 4 * static_cast<int64_t>(i)), 4);
  });
  b.arrive(block.tiles.getFull(b, use), b.boolean(true));
}

/// Those of x for the tile. Past its end, and for a row that x does not have,
/// there are zeros.
SmallVector<ChunkCopies::Row> Producer::getRows(ChunkCopies &copies,
                                                const TileOfRows &tile) {
  Value base = b.addressOf(op.getX(), {b.index(0), b.index(0)});
  Value numTokens = memref::DimOp::create(b, op.getX(), b.index(0));
  return copies.getRows(kTileRows, [&](Value number) -> ChunkCopies::Row {
    Value row = b.add(tile.begin, number);
    Value isReal = b.less(row, tile.end);
    Value token = b.toIndex(b.minSigned(row, b.sub(tile.end, b.i32(1))));
    if (op.getRows()) {
      token = b.toIndex(memref::LoadOp::create(b, op.getRows(), token));
      Value exists = b.compare(CmpIPredicate::ult, token, numTokens);
      token = b.select(exists, token, b.index(0));
      isReal = b.both(isReal, exists);
    }
    return {b.at(base, copies.offsetOf(token)), {}, isReal};
  });
}

/// Those of the weight: behind the first one of the thread at distances that
/// are known.
SmallVector<ChunkCopies::Row> Producer::getWeightRows(ChunkCopies &copies,
                                                      const TileOfRows &tile) {
  int64_t rowBytes = 2 * plan.numFeatures;
  int64_t rowsAtOnce = copies.rowsAtOnce(), width = plan.getWidth();
  bool isInterleaved = op.getGate() == GateLayout::Interleaved;
  Value first = b.add(b.mul(tile.columnTile, b.i32(width)),
                      b.div(thread, kChunkBytes / kUnitBytes));
  Value row = isInterleaved ? b.mul(first, b.i32(2)) : first;
  Value base = b.addressOf(
      op.getW(), {b.toIndex(tile.expert), b.toIndex(row), b.index(0)});
  SmallVector<ChunkCopies::Row> rows;
  for (int64_t i = 0; i < plan.columns; i += rowsAtOnce) {
    int64_t column = i % width, half = i / width;
    int64_t distance =
        isInterleaved ? 2 * column + half : column + half * plan.numOfY;
    Value offset = b.constantInt(b.getI64Type(), distance * rowBytes);
    Value isReal = b.boolean(true);
    if (plan.hasRest())
      isReal = b.less(b.add(first, b.i32(column)), b.i32(plan.numOfY));
    rows.push_back({base, offset, isReal});
  }
  return rows;
}

/// Copies chunk `chunk` of weights [experts, in, out]: rows of 64 columns.
void Producer::copyColumns(const TileOfRows &tile, Value shared, Value chunk) {
  constexpr int64_t units = kChunkBytes / kUnitBytes;
  constexpr int64_t rowsAtOnce = kWarpgroupSize / units;
  constexpr int64_t elements = kUnitBytes / 2;
  int64_t numColumns = getShaped(op.getW()).getDimSize(2);
  bool isHalved = plan.isGated && !plan.hasPairs;
  int64_t blocksOfHalf = plan.columns / kBlockColumns / (isHalved ? 2 : 1);
  int64_t columnsOfTile = blocksOfHalf * kBlockColumns;
  int64_t columnsOfHalf = isHalved ? plan.numOfY : numColumns;
  Value unit = b.rem(thread, units), chunkRow = b.div(thread, units);
  Value first = b.add(b.mul(tile.columnTile, b.i32(columnsOfTile)),
                      b.mul(unit, b.i32(elements)));
  Value feature = b.add(b.mul(chunk, b.i32(kChunk)), chunkRow);
  Value place = b.at(shared, b.swizzle(chunkRow, unit, kChunkBytes));
  Value from = b.addressOf(op.getW(), {b.toIndex(tile.expert),
                                       b.toIndex(feature), b.toIndex(first)});
  for (int64_t number = 0; number < plan.columns / kBlockColumns; ++number) {
    int64_t column = number % blocksOfHalf * kBlockColumns;
    int64_t half = number / blocksOfHalf;
    Value exists = b.boolean(true);
    if (columnsOfHalf % columnsOfTile != 0)
      exists = b.less(b.add(first, b.i32(column)), b.i32(columnsOfHalf));
    for (int64_t row = 0; row < kChunk; row += rowsAtOnce) {
      Value isReal = exists;
      if (plan.numFeatures % kChunk != 0)
        isReal = b.both(isReal, b.less(b.add(feature, b.i32(row)),
                                       b.i32(plan.numFeatures)));
      int64_t offset = row * numColumns + half * columnsOfHalf + column;
      int64_t to = number * kChunk * kChunkBytes + row * kChunkBytes;
      b.copyAsync(b.at(place, to),
                  b.at(from, b.constantInt(b.getI64Type(), 2 * offset)),
                  isReal);
    }
  }
}

/// Returns the number of the next use.
Value Producer::produceChunks(const TileOfRows &tile, Value use) {
  ChunkCopies copies{b, plan.numFeatures, thread, kWarpgroupSize};
  SmallVector<ChunkCopies::Row> rows = getRows(copies, tile), weightRows;
  if (!plan.isTransposed)
    weightRows = getWeightRows(copies, tile);
  return b.loop(b.index(0), b.index(plan.getNumChunks()), 1, use,
                [&](Value index, ValueRange old) -> SmallVector<Value> {
                  Value chunk = b.toI32(index);
                  block.chunks.waitForEmpty(b, old[0]);
                  Value left = block.chunks.getPlace(b, old[0]);
                  Value right = b.at(left, plan.getLeftBytes());
                  copies.copy(rows, left, chunk);
                  if (plan.isTransposed)
                    copyColumns(tile, right, chunk);
                  else
                    copies.copy(weightRows, right, chunk);
                  b.arriveAfterCopies(block.chunks.getFull(b, old[0]));
                  return {b.add(old[0], b.i32(1))};
                })[0];
}

//===----------------------------------------------------------------------===//
// Consumers
//===----------------------------------------------------------------------===//

void Consumer::emit() {
  block.forEachTile([&](Value use, Value, Value chunkUse) {
    TileOfRows tile = takeTile(use);
    TileResults results(b, op, plan, getFirstRow(tile), block.lane, tile);
    return yieldIf(
        b, tile.isOfExpert, chunkUse,
        [&] {
          results.store(multiply(chunkUse));
          return b.add(chunkUse, b.i32(plan.getNumChunks()));
        },
        [&] { results.store({}); });
  });
}

TileOfRows Consumer::takeTile(Value use) {
  block.tiles.waitForFull(b, use);
  Value place = block.tiles.getPlace(b, use);
  SmallVector<Value> said;
  for (int64_t i = 0; i < 5; ++i)
    said.push_back(b.load(b.getI32Type(), b.at(place, 4 * i), 4));
  block.tiles.release(b, use, block.lane);
  Value isOfExpert = b.compare(CmpIPredicate::ne, said[3], b.i32(0));
  return {said[0], said[1], said[2], isOfExpert, said[4]};
}

/// The first of the 16 rows of which the warp has sums.
Value Consumer::getFirstRow(const TileOfRows &tile) {
  Value row = b.add(b.mul(warpgroup, b.i32(kWgmmaRows)),
                    b.mul(b.rem(block.warp, kWarpgroupWarps), b.i32(16)));
  return b.add(tile.begin, row);
}

/// The sums of the warpgroup's rows; the first chunk is that of `use`.
SmallVector<Value> Consumer::multiply(Value use) {
  Type element = getShaped(op.getX()).getElementType();
  RingProducts products{b,       block.chunks, block.lane, plan.columns,
                        element, plan.isExact};
  auto getProducts = [&](Value own, int64_t) {
    Value place = block.chunks.getPlace(b, own);
    Value rows = b.mul(warpgroup, b.i32(kWgmmaRows * kChunkBytes));
    Matrix left = b.describe(b.at(place, rows), kChunkBytes,
                             /*isTransposed=*/false);
    Matrix right = b.describe(b.at(place, plan.getLeftBytes()), kChunkBytes,
                              plan.isTransposed,
                              plan.isTransposed ? kChunk * kChunkBytes : 0);
    int64_t step =
        plan.isTransposed ? kWgmmaTerms * kChunkBytes : 2 * kWgmmaTerms;
    SmallVector<Product> group;
    for (int64_t i = 0; i < kChunk / kWgmmaTerms; ++i)
      group.push_back(
          {b.offset(left, i * 2 * kWgmmaTerms), {}, b.offset(right, i * step)});
    return group;
  };
  // What is left over comes first: those chunks begin the sums.
  int64_t numChunks = plan.getNumChunks();
  int64_t first = (numChunks - 1) % kChunksAtATime + 1;
  SmallVector<Value> sums = products.multiply(use, first, {}, getProducts);
  if (first == numChunks)
    return sums;
  sums = b.loop(b.index(first), b.index(numChunks), kChunksAtATime, sums,
                [&](Value chunk, ValueRange old) {
                  return products.multiply(b.add(use, b.toI32(chunk)),
                                           kChunksAtATime, old, getProducts);
                });
  keepRolled(sums);
  return sums;
}

//===----------------------------------------------------------------------===//
// Interface
//===----------------------------------------------------------------------===//

static bool hasStatic(Value value, int64_t dim, int64_t multiple) {
  int64_t size = getShaped(value).getDimSize(dim);
  return !ShapedType::isDynamic(size) && size > 0 && size % multiple == 0;
}

bool mlir::moe::hasKernelOfManyRows(GroupedLinearOp op) {
  constexpr int64_t unit = kUnitBytes / 2;
  Type element = getShaped(op.getX()).getElementType();
  return !op.isQuantized() && !op.getPacked() &&
         (element.isBF16() || element.isF16()) &&
         getShaped(op.getW()).getElementType() == element &&
         getShaped(op.getW()).getRank() == 3 && hasStatic(op.getX(), 1, unit) &&
         hasStatic(op.getW(), 2, unit) &&
         hasStatic(op.getOuts()[0], 1, op.getTransposed() ? unit : 1) &&
         canCopyRows(op.getX()) && canCopyRows(op.getW()) &&
         hasWholeRows(op.getOuts()[0]);
}

/// Workgroup memory whose first byte is aligned for products.
static Value reserveMemory(WarpBuilder &b, int64_t bytes) {
  auto type = MemRefType::get({bytes + kWgmmaAlignment}, b.getI8Type());
  Value buffer = memref::AllocOp::create(b, type);
  Value address = memref::ExtractAlignedPointerAsIndexOp::create(b, buffer);
  Value generic =
      LLVM::IntToPtrOp::create(b, LLVM::LLVMPointerType::get(b.getContext()),
                               b.castInt(address, b.getI64Type()));
  auto shared = LLVM::LLVMPointerType::get(b.getContext(), 3);
  Value pointer = LLVM::AddrSpaceCastOp::create(b, shared, generic);
  Value place = LLVM::PtrToIntOp::create(b, b.getI32Type(), pointer);
  Value missing = b.both(b.sub(b.i32(0), place), b.i32(kWgmmaAlignment - 1));
  return b.at(pointer, missing);
}

/// The blocks of the grid: as many as tiles there may be, up to kMaxBlocks.
static Value getNumBlocks(WarpBuilder &b, GroupedLinearOp op,
                          const TilePlan &plan) {
  Value tiles = b.mul(RowGroups::getBound(b, op, kTileRows),
                      b.index(plan.getNumColumnTiles()));
  AffineExpr all = b.getAffineDimExpr(0);
  AffineExpr isMany = isMore(all, b.getAffineConstantExpr(kMaxBlocks));
  auto apply = [&](AffineExpr expr) -> Value {
    return affine::AffineApplyOp::create(b, AffineMap::get(1, 0, expr), tiles);
  };
  Value few = b.mul(apply(1 - isMany), tiles);
  return b.add(few, apply(isMany * kMaxBlocks));
}

void mlir::moe::emitGroupedLinearOnWarpgroups(WarpBuilder &builder,
                                              GroupedLinearOp op) {
  WarpgroupBuilder b(op.getLoc(), builder);
  TilePlan plan(op);
  createGrid(b, OpFoldResult(getNumBlocks(b, op, plan)));
  setBlockThreads(b, kThreads);
  Value memory = reserveMemory(b, plan.getBytes());
  GroupedBlock block(b, op, plan, memory);
  block.initBarriers();
  Value isProducer = b.compare(CmpIPredicate::sge, block.warp,
                               b.i32(kWarpgroupWarps * kConsumers));
  b.ifThenElse(
      isProducer,
      [&] {
        b.giveRegisters(kProducerRegisters);
        Producer(block).emit();
      },
      [&] {
        b.takeRegisters(kConsumerRegisters);
        Consumer(block).emit();
      });
}
