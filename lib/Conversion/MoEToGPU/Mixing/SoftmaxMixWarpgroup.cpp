//===- SoftmaxMixWarpgroup.cpp - softmax_mix on warpgroups of sm_90a ------===//
//
// Serves what the kernel of SoftmaxMixTensor.cpp does, with products of whole
// warpgroups (wgmma), as long as the queries of a tile fit into shared memory.
// One or two warpgroups consume, 64 queries each; the last one produces: it
// copies what they multiply. The two sides meet at rings (Emit/Ring.h):
//
//   ring      slots    what                                     one a
//   queries   1        64 or 128 queries                        query tile
//   keys      2 to 8   64 features of 64 keys                   chunk
//   values    2        values and biases of 64 keys             key tile
//
// The arithmetic is that of the other kernel: a chunk is summed from 0 and then
// added, because tensor cores truncate, while the next one is multiplied (with
// precision tf32 they add all chunks themselves); weights are sums of bf16 and
// stay in registers as left operands. While one warpgroup is at its
// exponentials, the other one multiplies.
//
//===----------------------------------------------------------------------===//

#include "Emit/Ring.h"
#include "MixEmitter.h"
#include "SoftmaxMix.h"
#include "SoftmaxMixCopies.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using Matrix = WarpgroupBuilder::Matrix;
using Product = WarpgroupBuilder::Product;

static constexpr int64_t kTileKeys = 64;
static constexpr int64_t kValueSlots = 2, kMaxKeySlots = 8;
static constexpr int64_t kKeySlotBytes = kTileKeys * kChunkBytes;
/// The most columns of the values that registers can accumulate beside the
/// logits of two consuming warpgroups.
static constexpr int64_t kMaxColumnsOfTwo = 64;
/// Registers of a thread with which a block of three warpgroups starts, the
/// most that an SM has for it, and how these divide them. Of two warpgroups a
/// thread may have all 255.
static constexpr int64_t kRegistersOfThree = 168, kProducerRegisters = 88,
                         kConsumerRegisters = 208;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <=
                  3 * kRegistersOfThree,
              "consumers would wait forever for registers");
/// The most chunks that are straight code; of more, a loop takes a few at a
/// time.
static constexpr int64_t kMaxUnrolledChunks = 8, kLoopedChunks = 4;

//===----------------------------------------------------------------------===//
// Plan
//===----------------------------------------------------------------------===//

namespace {
/// Sizes of the tiles, and where they lie in shared memory.
struct WarpgroupPlan {
  int64_t consumers, tileRows;
  int64_t numFeatures, numChunks;
  int64_t weightTerms;
  ValueTile values;
  int64_t keySlots;
  int64_t queryBytes, biasBytes;

  /// Barriers come first.
  int64_t getBarrierBytes() const {
    return Ring::getBarrierBytes(1 + keySlots + kValueSlots);
  }
  int64_t getQueryPlace() const {
    return llvm::alignTo(getBarrierBytes(), kWgmmaAlignment);
  }
  int64_t getKeyPlace() const { return getQueryPlace() + queryBytes; }
  int64_t getValuePlace() const {
    return getKeyPlace() + keySlots * kKeySlotBytes;
  }
  int64_t getBiasPlace() const {
    return getValuePlace() + kValueSlots * values.getBytes();
  }
  int64_t getBytes() const { return getBiasPlace() + kValueSlots * biasBytes; }
  /// Columns that the products accumulate.
  int64_t getProductColumns() const {
    return llvm::alignTo(values.numColumns, 8);
  }
};
} // namespace

static WarpgroupPlan makePlan(SoftmaxMixOp op, int64_t consumers,
                              int64_t keySlots) {
  WarpgroupPlan plan;
  plan.consumers = consumers;
  plan.tileRows = kWgmmaRows * consumers;
  plan.numFeatures = getShaped(op.getQ()).getDimSize(3);
  plan.numChunks = llvm::divideCeil(plan.numFeatures, kChunk);
  plan.weightTerms = getWeightTerms(op);
  plan.values = ValueTile(op, getNumColumns(op), kTileKeys, plan.weightTerms,
                          /*maxBlockColumns=*/kChunkBytes / 2);
  plan.keySlots = keySlots;
  plan.queryBytes = plan.numChunks * plan.tileRows * kChunkBytes;
  plan.biasBytes = MixEmitter::getBiasBytes(op, kTileKeys);
  return plan;
}

/// The plans that fit into `sharedBytes`, best first: one a number of
/// consumers.
static SmallVector<WarpgroupPlan> getPlans(SoftmaxMixOp op,
                                           int64_t sharedBytes) {
  SmallVector<WarpgroupPlan> plans;
  if (!hasTensorTypes(op) || !canCopyRows(op.getQ()) ||
      !canCopyRows(op.getK()) || getShaped(op.getQ()).getDimSize(3) == 0)
    return plans;
  for (int64_t consumers : {2, 1})
    for (int64_t keySlots = kMaxKeySlots; keySlots >= 2; keySlots /= 2) {
      WarpgroupPlan plan = makePlan(op, consumers, keySlots);
      int64_t maxColumns = consumers > 1 ? kMaxColumnsOfTwo : kMaxMixColumns;
      if (plan.values.numColumns <= maxColumns &&
          plan.getBytes() <= sharedBytes) {
        plans.push_back(plan);
        break;
      }
    }
  return plans;
}

//===----------------------------------------------------------------------===//
// Parts of the emitter
//===----------------------------------------------------------------------===//

namespace {
/// What producers and consumers know: where a thread stands, the tile, and the
/// rings at which they meet.
struct WarpgroupTile {
  WarpgroupTile(WarpgroupBuilder &b, SoftmaxMixOp op,
                const WarpgroupPlan &plan);

  void initBarriers();

  WarpgroupBuilder &b;
  SoftmaxMixOp op;
  const WarpgroupPlan &plan;
  Value thread, lane, warp;
  MixEmitter mix;
  Ring queries, keys, values;
  Value biases;
};

/// The warpgroup that copies.
class Producer {
public:
  explicit Producer(WarpgroupTile &tile);

  void emit();

private:
  SmallVector<Value> produceTile(ValueRange uses);
  Value produceKeys(Value firstKey, Value use);
  void produceExtras(Value firstKey, Value use);

  WarpgroupTile &tile;
  WarpgroupBuilder &b;
  const WarpgroupPlan &plan;
  MixCopies copies;
};

/// The products of a tile of keys, chunk by chunk.
class KeyProducts {
public:
  explicit KeyProducts(WarpgroupTile &tile)
      : tile(tile), b(tile.b), plan(tile.plan) {}

  /// q.k of the thread's queries and keys of a tile; `use` moves on.
  Fragment multiply(Matrix queries, Value &use);

private:
  SmallVector<Product> getProducts(Matrix queries, Value use, int64_t chunk);
  SmallVector<Value> multiplyChunks(Matrix queries, Value use, int64_t first,
                                    int64_t count, ValueRange totals);

  WarpgroupTile &tile;
  WarpgroupBuilder &b;
  const WarpgroupPlan &plan;
};

/// A warpgroup that multiplies.
class Consumer {
public:
  explicit Consumer(WarpgroupTile &tile)
      : tile(tile), b(tile.b), plan(tile.plan), keyProducts(tile) {}

  void emit();

private:
  SmallVector<Value> consumeTile(ValueRange uses);
  void mixValues(Value place, const Fragment &p, ArrayRef<Value> decays,
                 MutableArrayRef<Value> sums);

  WarpgroupTile &tile;
  WarpgroupBuilder &b;
  const WarpgroupPlan &plan;
  KeyProducts keyProducts;
};
} // namespace

WarpgroupTile::WarpgroupTile(WarpgroupBuilder &b, SoftmaxMixOp op,
                             const WarpgroupPlan &plan)
    : b(b), op(op), plan(plan), thread(b.thread()),
      lane(b.rem(thread, kWarpSize)),
      // From a lane, so that it is known to be the same in all of them.
      warp(b.shuffleFrom(b.div(thread, kWarpSize), b.i32(0))),
      mix(b, op,
          getFragmentLayout(b, warp, /*rowFragments=*/1, plan.tileRows,
                            kTileKeys)) {
  Value base = b.reserveShared(plan.getBytes(), kWgmmaAlignment);
  Value barriers = base;
  auto makeRing = [&](int64_t slots, int64_t slotBytes, int64_t place,
                      int64_t arrivals) {
    Ring ring{slots, slotBytes, barriers, b.at(base, place), arrivals};
    barriers = b.at(barriers, Ring::getBarrierBytes(slots));
    return ring;
  };
  queries = makeRing(1, plan.queryBytes, plan.getQueryPlace(), kWarpgroupSize);
  keys = makeRing(plan.keySlots, kKeySlotBytes, plan.getKeyPlace(),
                  kWarpgroupSize);
  // Values may be copied or stored, and a thread arrives for both.
  values = makeRing(kValueSlots, plan.values.getBytes(), plan.getValuePlace(),
                    2 * kWarpgroupSize);
  biases = b.at(base, plan.getBiasPlace());
}

void WarpgroupTile::initBarriers() {
  Value isFirst = b.compare(arith::CmpIPredicate::eq, thread, b.i32(0));
  b.ifThen(isFirst, [&] {
    for (const Ring &ring : {queries, keys, values})
      ring.initBarriers(b, kWarpgroupWarps * plan.consumers);
  });
  b.barrier();
}

//===----------------------------------------------------------------------===//
// Producers
//===----------------------------------------------------------------------===//

Producer::Producer(WarpgroupTile &tile)
    : tile(tile), b(tile.b), plan(tile.plan),
      copies(tile.mix,
             b.sub(tile.thread, b.i32(kWarpgroupSize * plan.consumers)),
             kWarpgroupSize) {}

void Producer::emit() {
  Value zero = b.i32(0);
  tile.mix.forEachTile({zero, zero, zero},
                       [&](ValueRange uses) { return produceTile(uses); });
}

/// `uses` are those of the rings so far: of queries, keys and values.
SmallVector<Value> Producer::produceTile(ValueRange uses) {
  tile.queries.waitForEmpty(b, uses[0]);
  b.loop(b.index(0), b.index(plan.numChunks), 1, [&](Value index) {
    Value chunk = b.toI32(index);
    Value place = b.mul(chunk, b.i32(plan.tileRows * kChunkBytes));
    copies.copyChunk(tile.op.getQ(), b.at(tile.queries.memory, place),
                     plan.tileRows, tile.mix.firstRow, chunk,
                     /*areKeys=*/false);
  });
  b.arriveAfterCopies(tile.queries.getFull(b, uses[0]));

  auto [begin, end] = tile.mix.getKeyRange();
  SmallVector<Value> last =
      b.loop(begin, end, kTileKeys, uses.drop_front(),
             [&](Value firstKey, ValueRange old) -> SmallVector<Value> {
               Value use = produceKeys(firstKey, old[0]);
               produceExtras(firstKey, old[1]);
               return {use, b.add(old[1], b.i32(1))};
             });
  return {b.add(uses[0], b.i32(1)), last[0], last[1]};
}

/// The chunks of a key tile; returns the number of the next use.
Value Producer::produceKeys(Value firstKey, Value use) {
  return b.loop(b.index(0), b.index(plan.numChunks), 1, use,
                [&](Value chunk, ValueRange old) -> SmallVector<Value> {
                  tile.keys.waitForEmpty(b, old[0]);
                  copies.copyChunk(tile.op.getK(),
                                   tile.keys.getPlace(b, old[0]), kTileKeys,
                                   firstKey, b.toI32(chunk),
                                   /*areKeys=*/true);
                  b.arriveAfterCopies(tile.keys.getFull(b, old[0]));
                  return {b.add(old[0], b.i32(1))};
                })[0];
}

void Producer::produceExtras(Value firstKey, Value use) {
  tile.values.waitForEmpty(b, use);
  Value slot = tile.values.getSlot(b, use);
  tile.mix.writeBiases(copies.thread, firstKey,
                       b.at(tile.biases, b.mul(slot, b.i32(plan.biasBytes))));
  if (tile.op.getV())
    copies.copyValues(plan.values, firstKey, tile.values.getPlace(b, use));
  Value full = tile.values.getFull(b, use);
  b.arriveAfterCopies(full);
  b.arrive(full, b.boolean(true));
}

//===----------------------------------------------------------------------===//
// Products of keys
//===----------------------------------------------------------------------===//

/// The products of one chunk, whose keys use `use` brings. Chunks behind the
/// first ones of a loop are whole, but for the last.
SmallVector<Product> KeyProducts::getProducts(Matrix queries, Value use,
                                              int64_t chunk) {
  Matrix right = b.describe(tile.keys.getPlace(b, use), kChunkBytes,
                            /*isTransposed=*/false);
  int64_t features = std::min(plan.numFeatures - chunk * kChunk, kChunk);
  SmallVector<Product> products;
  for (int64_t place = 0; place < features; place += kWgmmaTerms)
    products.push_back(
        {b.offset(queries, 2 * place), {}, b.offset(right, 2 * place)});
  return products;
}

/// Adds the products of `count` chunks from `first` on, whose keys use `use`
/// and the next ones bring, to `totals`.
SmallVector<Value> KeyProducts::multiplyChunks(Matrix queries, Value use,
                                               int64_t first, int64_t count,
                                               ValueRange totals) {
  RingProducts products{b,
                        tile.keys,
                        tile.lane,
                        kTileKeys,
                        getShaped(tile.op.getQ()).getElementType(),
                        tile.op.getPrecision() == Precision::IEEE};
  return products.multiply(use, count, totals, [&](Value own, int64_t i) {
    Matrix rows = b.offset(queries, i * plan.tileRows * kChunkBytes);
    return getProducts(rows, own, first + i);
  });
}

Fragment KeyProducts::multiply(Matrix queries, Value &use) {
  // ptxas puts additions off. In a loop it cannot, which matters where the sums
  // of the values leave few registers.
  bool isWide = plan.values.numColumns > kMaxColumnsOfTwo;
  int64_t atATime = isWide ? 1 : kLoopedChunks;
  int64_t looped = plan.numChunks <= (isWide ? 1 : kMaxUnrolledChunks)
                       ? 0
                       : (plan.numChunks - 1) / atATime;
  SmallVector<Value> sums;
  if (looped > 0) {
    sums.assign(kTileKeys / 2, b.f32(0.0));
    sums = b.loop(
        b.index(0), b.index(looped), 1, sums,
        [&](Value group, ValueRange old) -> SmallVector<Value> {
          Value chunk = b.mul(b.toI32(group), b.i32(atATime));
          Value offset = b.mul(chunk, b.i32(plan.tileRows * kChunkBytes));
          return multiplyChunks(b.offset(queries, offset), b.add(use, chunk),
                                /*first=*/0, atATime, old);
        });
    keepRolled(sums);
  }
  int64_t done = looped * atATime;
  sums = multiplyChunks(b.offset(queries, done * plan.tileRows * kChunkBytes),
                        b.add(use, b.i32(done)), done, plan.numChunks - done,
                        sums);
  use = b.add(use, b.i32(plan.numChunks));
  Fragment products(2);
  for (auto [number, sum] : llvm::enumerate(sums))
    products[number % 4 / 2].push_back(sum);
  return products;
}

//===----------------------------------------------------------------------===//
// Consumers
//===----------------------------------------------------------------------===//

void Consumer::emit() {
  Value zero = b.i32(0);
  tile.mix.forEachTile({zero, zero, zero},
                       [&](ValueRange uses) { return consumeTile(uses); });
}

SmallVector<Value> Consumer::consumeTile(ValueRange uses) {
  tile.queries.waitForFull(b, uses[0]);
  Value warpgroup = b.div(tile.warp, kWarpgroupWarps);
  Matrix rows =
      b.describe(b.at(tile.queries.memory,
                      b.mul(warpgroup, b.i32(kWgmmaRows * kChunkBytes))),
                 kChunkBytes, /*isTransposed=*/false);
  auto [begin, end] = tile.mix.getKeyRange();
  SmallVector<Value> carried(uses.drop_front());
  int64_t stateBegin = carried.size();
  carried.append(tile.mix.getInitialState());
  int64_t sumsBegin = carried.size();
  carried.append(plan.getProductColumns() / 2, b.f32(0.0));
  SmallVector<Value> last =
      b.loop(begin, end, kTileKeys, carried,
             [&](Value firstKey, ValueRange old) -> SmallVector<Value> {
               SmallVector<Value> next(old);
               Fragment p = keyProducts.multiply(rows, next[0]);
               tile.values.waitForFull(b, old[1]);
               SmallVector<Value> state(next.begin() + stateBegin,
                                        next.begin() + sumsBegin);
               Value offset =
                   b.mul(tile.values.getSlot(b, old[1]), b.i32(plan.biasBytes));
               SmallVector<Value> decays = tile.mix.update(
                   state, p, firstKey, b.at(tile.biases, offset));
               llvm::copy(state, next.begin() + stateBegin);
               if (tile.op.getV())
                 mixValues(tile.values.getPlace(b, old[1]), p, decays,
                           MutableArrayRef(next).drop_front(sumsBegin));
               tile.values.release(b, old[1], tile.lane);
               next[1] = b.add(old[1], b.i32(1));
               return next;
             });
  tile.queries.release(b, uses[0], tile.lane);
  finishFragments(tile.mix,
                  ValueRange(last).slice(stateBegin, tile.mix.getStateSize()),
                  ValueRange(last).drop_front(sumsBegin));
  return {b.add(uses[0], b.i32(1)), last[0], last[1]};
}

/// sums = a sums + p v; by fragments of 8 columns.
void Consumer::mixValues(Value place, const Fragment &p, ArrayRef<Value> decays,
                         MutableArrayRef<Value> sums) {
  for (auto [number, sum] : llvm::enumerate(sums))
    sum = b.mul(sum, decays[number % 4 / 2]);
  const ValueTile &values = plan.values;
  SmallVector<Matrix> terms;
  for (int64_t term = 0; term < values.terms; ++term)
    terms.push_back(b.describe(b.at(place, term * values.getTermBytes()),
                               values.getRowBytes(), /*isTransposed=*/true,
                               values.getBlockBytes()));
  SmallVector<Product> products;
  for (int64_t step = 0; step < kTileKeys / kWgmmaTerms; ++step) {
    Fragment left = splitWeights(b, p, step, plan.weightTerms);
    for (auto [number, term] : llvm::enumerate(terms))
      for (int64_t part = plan.weightTerms - number - 1; part >= 0; --part)
        products.push_back(
            {{},
             left[part],
             b.offset(term, step * kWgmmaTerms * values.getRowBytes())});
  }
  SmallVector<Value> started =
      b.startProducts(products, ArrayRef<Value>(sums), plan.getProductColumns(),
                      b.getBF16Type());
  llvm::copy(b.waitForProducts(started, /*pending=*/0), sums.begin());
}

//===----------------------------------------------------------------------===//
// Interface
//===----------------------------------------------------------------------===//

/// Emits what the block does, and divides its registers.
static void emitWarpgroups(WarpgroupBuilder &b, SoftmaxMixOp op,
                           const WarpgroupPlan &plan) {
  WarpgroupTile tile(b, op, plan);
  tile.initBarriers();
  Value isProducer = b.compare(arith::CmpIPredicate::sge, tile.warp,
                               b.i32(kWarpgroupWarps * plan.consumers));
  bool sharesUnevenly = plan.consumers > 1;
  auto produceWithFew = [&] {
    if (sharesUnevenly)
      b.giveRegisters(kProducerRegisters);
    Producer(tile).emit();
  };
  auto consumeWithMany = [&] {
    if (sharesUnevenly)
      b.takeRegisters(kConsumerRegisters);
    Consumer(tile).emit();
  };
  b.ifThenElse(isProducer, produceWithFew, consumeWithMany);
  b.barrier();
  // What follows on this op finds the registers as they were. The warps of a
  // warpgroup have to meet between two changes, as they just have.
  if (sharesUnevenly)
    b.ifThenElse(
        isProducer, [&] { b.takeRegisters(kRegistersOfThree); },
        [&] { b.giveRegisters(kRegistersOfThree); });
}

SmallVector<MixPlan> mlir::moe::planMixOnWarpgroups(SoftmaxMixOp op,
                                                    int64_t sharedBytes) {
  return llvm::map_to_vector(
      getPlans(op, sharedBytes), [](const WarpgroupPlan &plan) {
        MixShape shape{kWarpgroupSize * (plan.consumers + 1), plan.tileRows,
                       plan.getBytes()};
        return MixPlan{shape, [=](WarpBuilder &builder, SoftmaxMixOp op) {
                         WarpgroupBuilder b(op.getLoc(), builder);
                         emitWarpgroups(b, op, plan);
                       }};
      });
}
