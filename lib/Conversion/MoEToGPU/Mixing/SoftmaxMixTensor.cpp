//===- SoftmaxMixTensor.cpp - softmax_mix on tensor cores -----------------===//
//
// Serves queries and keys of one 16-bit type whose rows are whole units of 16
// bytes. Four warps take 16 or 32 queries each. Features go through shared
// memory in chunks of 64: while one chunk of the keys is multiplied, the next
// is on its way (cp.async, two stages), and with the first chunk of a key tile
// the values and biases of the next tile. The queries stay in shared memory
// where they fit and travel with the keys where they do not.
//
// The weights become the left operand of the second product without leaving
// their lanes. That product is as exact as one in f32: a weight is the sum of
// three bf16, a value of one to three (terms), and of the products of their
// parts those below 2^-24 are left out.
//
//===----------------------------------------------------------------------===//

#include "MixEmitter.h"
#include "SoftmaxMix.h"
#include "SoftmaxMixCopies.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

static constexpr int64_t kWarps = kMixThreads / kWarpSize;
static constexpr int64_t kStages = 2;

//===----------------------------------------------------------------------===//
// Plan
//===----------------------------------------------------------------------===//

namespace {
/// Sizes of the tiles, and where they lie in shared memory.
struct TensorPlan {
  int64_t numFeatures, numColumns;
  /// Fragments of 16 queries that a warp has; queries and keys of a tile.
  int64_t rowFragments, tileRows, tileKeys;
  int64_t numChunks;
  /// Terms that a weight is split into.
  int64_t weightTerms;
  ValueTile values;
  bool keepsQueries;
  int64_t queryBytes, stageBytes, biasBytes;

  int64_t getBytes() const {
    return queryBytes + kStages * (stageBytes + values.getBytes() + biasBytes);
  }
  /// Fragments of 8 columns that a warp accumulates.
  int64_t getColumnFragments() const {
    return 2 * llvm::divideCeil(numColumns, 16);
  }
};
} // namespace

static TensorPlan makePlan(SoftmaxMixOp op, int64_t numColumns,
                           int64_t rowFragments, bool keepsQueries) {
  TensorPlan plan;
  plan.numFeatures = getShaped(op.getQ()).getDimSize(3);
  plan.numColumns = numColumns;
  plan.rowFragments = rowFragments;
  plan.tileRows = 16 * kWarps * rowFragments;
  // Registers: a lane holds the logits of all its queries and keys twice, as a
  // sum and as the part that is being added.
  plan.tileKeys = rowFragments > 1 || plan.numColumns > 64 ? 32 : 64;
  // And sums of values, whose addresses take more.
  if (plan.numColumns > 128)
    plan.tileKeys = 16;
  plan.numChunks = llvm::divideCeil(plan.numFeatures, kChunk);
  plan.weightTerms = getWeightTerms(op);
  plan.values = ValueTile(op, numColumns, plan.tileKeys, plan.weightTerms,
                          /*maxBlockColumns=*/kMaxMixColumns);
  plan.keepsQueries = keepsQueries;
  int64_t queryChunk = plan.tileRows * kChunkBytes;
  plan.queryBytes = keepsQueries ? plan.numChunks * queryChunk : 0;
  plan.stageBytes =
      plan.tileKeys * kChunkBytes + (keepsQueries ? 0 : queryChunk);
  plan.biasBytes = MixEmitter::getBiasBytes(op, plan.tileKeys);
  return plan;
}

/// The plans that fit into `sharedBytes`, best first.
static SmallVector<TensorPlan> getPlans(SoftmaxMixOp op, int64_t numColumns,
                                        int64_t sharedBytes) {
  SmallVector<TensorPlan> plans;
  if (!hasTensorTypes(op) || !canCopyRows(op.getQ()) || !canCopyRows(op.getK()))
    return plans;
  for (auto [rowFragments, keepsQueries] :
       {std::pair(2, true), std::pair(1, true), std::pair(1, false)}) {
    TensorPlan plan = makePlan(op, numColumns, rowFragments, keepsQueries);
    // Registers: two fragments of queries leave room for few columns.
    if (rowFragments > 1 && plan.numColumns > 32)
      continue;
    if (plan.numColumns <= kMaxMixColumns && plan.getBytes() <= sharedBytes)
      plans.push_back(plan);
  }
  return plans;
}

//===----------------------------------------------------------------------===//
// Emitter
//===----------------------------------------------------------------------===//

namespace {
class TensorMix {
public:
  TensorMix(WarpBuilder &b, SoftmaxMixOp op, const TensorPlan &plan)
      : b(b), op(op), plan(plan),
        element(getShaped(op.getQ()).getElementType()), thread(b.thread()),
        warp(b.div(thread, kWarpSize)),
        mix(b, op,
            getFragmentLayout(b, warp, plan.rowFragments, plan.tileRows,
                              plan.tileKeys)),
        copies(mix, thread, kMixThreads) {
    queries = b.reserveShared(plan.getBytes());
    stages = b.at(queries, plan.queryBytes);
    values = b.at(stages, kStages * plan.stageBytes);
    biases = b.at(values, kStages * plan.values.getBytes());
  }

  void emit() {
    mix.forEachTile([&] { emitTile(); });
  }

private:
  void emitTile();

  // Copies into shared memory.
  void copyStage(Value firstKey, Value chunk, Value stage);
  void copyTileExtras(Value firstKey, Value slot);

  // Products.
  Fragment multiply(Value firstKey, Value slot, Value &stage);
  SmallVector<Value> multiplyChunk(Value chunk, Value stage, ValueRange totals);
  void mixValues(Value slot, const Fragment &p, ArrayRef<Value> decays,
                 MutableArrayRef<Value> sums);

  /// Place number `number` of an array of things of `bytes` each.
  Value select(Value base, Value number, int64_t bytes) {
    return b.at(base, b.mul(number, b.i32(bytes)));
  }

  WarpBuilder &b;
  SoftmaxMixOp op;
  const TensorPlan plan;
  const Type element;
  Value thread, warp;
  MixEmitter mix;
  MixCopies copies;
  Value queries, stages, values, biases;
};
} // namespace

//===----------------------------------------------------------------------===//
// Copies
//===----------------------------------------------------------------------===//

/// Starts copying what the product of one chunk needs.
void TensorMix::copyStage(Value firstKey, Value chunk, Value stage) {
  Value shared = select(stages, stage, plan.stageBytes);
  copies.copyChunk(op.getK(), shared, plan.tileKeys, firstKey, chunk,
                   /*areKeys=*/true);
  if (!plan.keepsQueries)
    copies.copyChunk(op.getQ(), b.at(shared, plan.tileKeys * kChunkBytes),
                     plan.tileRows, mix.firstRow, chunk, /*areKeys=*/false);
}

/// Starts copying what belongs to a key tile beside its features.
void TensorMix::copyTileExtras(Value firstKey, Value slot) {
  mix.writeBiases(thread, firstKey, select(biases, slot, plan.biasBytes));
  if (op.getV())
    copies.copyValues(plan.values, firstKey,
                      select(values, slot, plan.values.getBytes()));
}

//===----------------------------------------------------------------------===//
// Products
//===----------------------------------------------------------------------===//

/// Adds the products of one chunk to `totals`; fragments by queries, then keys.
SmallVector<Value> TensorMix::multiplyChunk(Value chunk, Value stage,
                                            ValueRange totals) {
  Value keys = select(stages, stage, plan.stageBytes);
  Value rows = plan.keepsQueries
                   ? select(queries, chunk, plan.tileRows * kChunkBytes)
                   : b.at(keys, plan.tileKeys * kChunkBytes);
  Value firstRow = b.mul(warp, b.i32(16 * plan.rowFragments));
  auto loadLeft = [&](int64_t fragment, int64_t step) {
    return b.loadLeft(rows, firstRow, b.i32(2 * step), kChunkBytes,
                      fragment * 16 * kChunkBytes);
  };
  auto loadRight = [&](int64_t pair, int64_t step) {
    return b.loadRight(keys, b.i32(0), b.i32(2 * step), kChunkBytes,
                       pair * 16 * kChunkBytes);
  };
  return addChunkProducts(b, element, plan.rowFragments, loadLeft,
                          plan.tileKeys / 16, loadRight, totals);
}

/// q.k of the thread's queries and keys of the tile at `firstKey`, and the
/// copies of the next tile under way. `stage` holds the first chunk.
Fragment TensorMix::multiply(Value firstKey, Value slot, Value &stage) {
  int64_t keyFragments = plan.tileKeys / 8;
  Value one = b.i32(1);
  Value nextTile = b.add(firstKey, b.index(plan.tileKeys));
  auto copyExtras = [&] {
    copyTileExtras(nextTile, b.op<arith::XOrIOp>(slot, one));
  };
  // A loop over many chunks stays one and has no branch for its first chunk;
  // few are unrolled and need no barrier of their own for those who still read
  // the slot of the last tile.
  bool isRolled = plan.numChunks > 2;
  if (isRolled) {
    b.barrier();
    copyExtras();
  }
  SmallVector<Value> carried{stage};
  carried.append(4 * plan.rowFragments * keyFragments, b.f32(0.0));
  SmallVector<Value> last =
      b.loop(b.index(0), b.index(plan.numChunks), 1, carried,
             [&](Value iteration, ValueRange old) -> SmallVector<Value> {
               Value chunk = b.toI32(iteration);
               b.waitForCopies(0);
               b.barrier();
               Value other = b.op<arith::XOrIOp>(old[0], one);
               Value following = b.add(chunk, one);
               Value isLast = b.compare(arith::CmpIPredicate::eq, following,
                                        b.i32(plan.numChunks));
               copyStage(b.select(isLast, nextTile, firstKey),
                         b.select(isLast, b.i32(0), following), other);
               if (!isRolled)
                 b.ifThen(b.compare(arith::CmpIPredicate::eq, chunk, b.i32(0)),
                          copyExtras);
               b.commitCopies();
               SmallVector<Value> next{other};
               next.append(multiplyChunk(chunk, old[0], old.drop_front()));
               return next;
             });
  if (isRolled)
    keepRolled(last);
  stage = last[0];
  Fragment products(2 * plan.rowFragments);
  for (int64_t i = 0; i < plan.rowFragments; ++i)
    for (int64_t j = 0; j < keyFragments; ++j)
      for (int64_t part = 0; part < 4; ++part)
        products[2 * i + part / 2].push_back(
            last[1 + 4 * (i * keyFragments + j) + part]);
  return products;
}

/// sums = a sums + p v; fragments by queries, then columns.
void TensorMix::mixValues(Value slot, const Fragment &p, ArrayRef<Value> decays,
                          MutableArrayRef<Value> sums) {
  int64_t columnFragments = plan.getColumnFragments();
  for (auto [number, sum] : llvm::enumerate(sums)) {
    int64_t row = number / (4 * columnFragments);
    sum = b.mul(sum, decays[2 * row + number % 4 / 2]);
  }
  Value base = select(values, slot, plan.values.getBytes());
  for (int64_t step = 0; step < plan.tileKeys / 16; ++step) {
    SmallVector<Fragment> left;
    for (int64_t i = 0; i < plan.rowFragments; ++i)
      left.push_back(
          splitWeights(b, ArrayRef(p).slice(2 * i, 2), step, plan.weightTerms));
    for (int64_t pair = 0; pair < columnFragments / 2; ++pair)
      for (int64_t term = 0; term < plan.values.terms; ++term) {
        SmallVector<Value> right = b.loadTransposedRight(
            base, b.i32(16 * step), b.i32(2 * pair), plan.values.getRowBytes(),
            term * plan.values.getTermBytes());
        for (int64_t i = 0; i < plan.rowFragments; ++i)
          for (int64_t j = 0; j < 2; ++j) {
            int64_t first = 4 * (i * columnFragments + 2 * pair + j);
            MutableArrayRef<Value> sum = sums.slice(first, 4);
            for (int64_t part = plan.weightTerms - term - 1; part >= 0; --part)
              llvm::copy(b.multiplyAdd(left[i][part],
                                       ArrayRef(right).slice(2 * j, 2),
                                       ValueRange(sum), b.getBF16Type()),
                         sum.begin());
          }
      }
  }
}

//===----------------------------------------------------------------------===//
// Tiles of queries
//===----------------------------------------------------------------------===//

void TensorMix::emitTile() {
  auto [begin, end] = mix.getKeyRange();
  Value zero = b.i32(0);
  // Whoever still reads the last tile's memory does so before this.
  b.barrier();
  if (plan.keepsQueries)
    for (int64_t chunk = 0; chunk < plan.numChunks; ++chunk)
      copies.copyChunk(
          op.getQ(), b.at(queries, chunk * plan.tileRows * kChunkBytes),
          plan.tileRows, mix.firstRow, b.i32(chunk), /*areKeys=*/false);
  copyStage(begin, zero, zero);
  copyTileExtras(begin, zero);
  b.commitCopies();

  SmallVector<Value> carried{zero, zero};
  carried.append(mix.getInitialState());
  int64_t sumsBegin = carried.size();
  carried.append(4 * plan.rowFragments * plan.getColumnFragments(), b.f32(0.0));
  SmallVector<Value> last = b.loop(
      begin, end, plan.tileKeys, carried,
      [&](Value firstKey, ValueRange old) -> SmallVector<Value> {
        SmallVector<Value> next(old);
        Value slot = old[1];
        Fragment p = multiply(firstKey, slot, next[0]);
        SmallVector<Value> state(next.begin() + 2, next.begin() + sumsBegin);
        SmallVector<Value> decays = mix.update(
            state, p, firstKey, select(biases, slot, plan.biasBytes));
        llvm::copy(state, next.begin() + 2);
        if (op.getV())
          mixValues(slot, p, decays,
                    MutableArrayRef(next).drop_front(sumsBegin));
        next[1] = b.op<arith::XOrIOp>(slot, b.i32(1));
        return next;
      });
  b.waitForCopies(0);

  finishFragments(mix, ValueRange(last).slice(2, mix.getStateSize()),
                  ValueRange(last).drop_front(sumsBegin));
}

SmallVector<MixPlan> mlir::moe::planMixOnTensorCores(SoftmaxMixOp op,
                                                     int64_t numColumns,
                                                     int64_t sharedBytes) {
  return llvm::map_to_vector(
      getPlans(op, numColumns, sharedBytes), [](const TensorPlan &plan) {
        return MixPlan{{kMixThreads, plan.tileRows, plan.getBytes()},
                       [=](WarpBuilder &b, SoftmaxMixOp op) {
                         TensorMix(b, op, plan).emit();
                       }};
      });
}
