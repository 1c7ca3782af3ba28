//===- SoftmaxMixFloat.cpp - softmax_mix on the float units ---------------===//
//
// Serves any element types and widths. 128 threads stand in a grid of 8 x 16: a
// thread has the logits of 8 (4 for many columns) neighbouring queries and 4
// neighbouring keys, and the mixed values of its queries at every 16th column.
// Features go through shared memory in chunks, transposed, so that a thread
// reads the queries and keys of a feature with one or two wide loads. Each
// chunk is summed from 0 and then added: one chain over all features would
// round as often as there are features.
//
// The weights then take the way to the threads that need them through shared
// memory, transposed too, and the values lie where the features were.
//
//===----------------------------------------------------------------------===//

#include "MixEmitter.h"
#include "SoftmaxMix.h"

#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// Threads of a block along queries and along keys.
static constexpr int64_t kThreadRows = 8, kThreadColumns = 16;
static constexpr int64_t kKeys = 64;
static constexpr int64_t kChunk = 32;
/// Floats between the features of shared tiles, beside the tile: keeps wide
/// loads aligned, and eight features of four rows on different banks.
static constexpr int64_t kPadding = 4;
/// Rows and features of a tile that the lanes of a warp store at once.
static constexpr int64_t kLaneRows = 4, kLaneFeatures = 8;

namespace {
/// Which queries, keys and columns of values a thread of the grid has.
struct FloatGrid {
  FloatGrid(WarpBuilder &b, SoftmaxMixOp op, int64_t tileRows)
      : b(b), tileRows(tileRows), rowsEach(tileRows / kThreadRows),
        keysEach(kKeys / kThreadColumns),
        columnsEach(llvm::divideCeil(getNumColumns(op), kThreadColumns)),
        thread(b.thread()), threadRow(b.div(thread, kThreadColumns)),
        threadColumn(b.rem(thread, kThreadColumns)) {}

  MixLayout getLayout() const;
  /// The columns that the threads have together.
  int64_t getWidth() const { return columnsEach * kThreadColumns; }
  /// Bytes of the features of a tile.
  int64_t getFeatureBytes() const {
    return kChunk * (tileRows + kKeys + 2 * kPadding) * 4;
  }

  WarpBuilder &b;
  const int64_t tileRows, rowsEach, keysEach, columnsEach;
  Value thread, threadRow, threadColumn;
};

/// The products of queries and keys, whose features go through shared memory.
class FloatProducts {
public:
  FloatProducts(const FloatGrid &grid, MixTiles &mix, Value shared)
      : b(grid.b), grid(grid), mix(mix), queries(shared),
        keys(b.at(shared, kChunk * (grid.tileRows + kPadding) * 4)) {}

  /// q.k of the thread's queries with its keys of the tile at `firstKey`.
  Fragment multiply(Value firstKey);

private:
  void loadChunk(Value memref, Value shared, int64_t size, Value first,
                 Value firstFeature, bool areKeys);
  SmallVector<Value> multiplyChunk();

  WarpBuilder &b;
  const FloatGrid &grid;
  MixTiles &mix;
  Value queries, keys;
};

/// The values mixed by weights, both of which go through shared memory: values
/// where the features were, weights behind them.
class FloatValues {
public:
  FloatValues(const FloatGrid &grid, MixTiles &mix, Value shared)
      : b(grid.b), grid(grid), mix(mix), values(shared),
        weights(b.at(shared, grid.getFeatureBytes())), valueKeys(kKeys) {
    // As many keys' values as fit.
    while (grid.columnsEach > 0 &&
           valueKeys * grid.getWidth() * 4 > grid.getFeatureBytes())
      valueKeys /= 2;
  }

  /// sums = a sums + p v.
  void mixValues(Value firstKey, const Fragment &p, ArrayRef<Value> decays,
                 MutableArrayRef<Value> sums);

private:
  void loadValues(Value firstKey);
  Value getWeightOffset(Value key, Value row);
  void mixKey(Value key, Value valueKey, int64_t behind,
              MutableArrayRef<Value> sums);

  WarpBuilder &b;
  const FloatGrid &grid;
  MixTiles &mix;
  Value values, weights;
  int64_t valueKeys;
};

class FloatMix {
public:
  FloatMix(WarpBuilder &b, SoftmaxMixOp op, MixShape shape)
      : b(b), op(op), grid(b, op, shape.tileRows), mix(b, op, grid.getLayout()),
        shared(b.reserveShared(shape.sharedBytes)), products(grid, mix, shared),
        values(grid, mix, shared),
        biases(b.at(shared,
                    grid.getFeatureBytes() + kKeys * shape.tileRows * 4)) {}

  void emit() {
    mix.forEachTile([&] { emitTile(); });
  }

private:
  void emitTile();

  WarpBuilder &b;
  SoftmaxMixOp op;
  FloatGrid grid;
  MixEmitter mix;
  Value shared;
  FloatProducts products;
  FloatValues values;
  Value biases;
};
} // namespace

MixLayout FloatGrid::getLayout() const {
  MixLayout layout;
  layout.numRows = tileRows;
  layout.numKeys = kKeys;
  for (int64_t i = 0; i < rowsEach; ++i)
    layout.rows.push_back(b.add(b.mul(threadRow, b.i32(rowsEach)), b.i32(i)));
  for (int64_t i = 0; i < keysEach; ++i)
    layout.keys.push_back(
        b.add(b.mul(threadColumn, b.i32(keysEach)), b.i32(i)));
  layout.laneBits = {1, 2, 4, 8};
  layout.isFirstLane =
      b.compare(arith::CmpIPredicate::eq, threadColumn, b.i32(0));
  return layout;
}

/// `count` neighbouring floats at float `offset` of a shared tile.
static SmallVector<Value> loadFloats(WarpBuilder &b, Value shared, Value offset,
                                     int64_t count) {
  SmallVector<Value> floats;
  auto four = VectorType::get({4}, b.getF32Type());
  for (int64_t i = 0; i < count; i += 4) {
    Value place = b.at(shared, b.mul(b.add(offset, b.i32(i)), b.i32(4)));
    Value vector = b.load(four, place, 16);
    for (int64_t lane = 0; lane < 4; ++lane)
      floats.push_back(LLVM::ExtractElementOp::create(b, vector, b.i32(lane)));
  }
  return floats;
}

//===----------------------------------------------------------------------===//
// Products
//===----------------------------------------------------------------------===//

/// Brings kChunk features of `size` rows of q or k to shared memory, feature by
/// feature; 0 where there is none, and for masked keys.
void FloatProducts::loadChunk(Value memref, Value shared, int64_t size,
                              Value first, Value firstFeature, bool areKeys) {
  Value numFeatures = memref::DimOp::create(b, memref, b.index(3));
  // A warp stores 8 features of 4 rows, each warp its own features.
  static_assert(kThreadRows * kThreadColumns == kLaneRows * kChunk);
  Value feature =
      b.add(b.rem(grid.thread, kLaneFeatures),
            b.mul(b.div(grid.thread, kWarpSize), b.i32(kLaneFeatures)));
  Value laneRow = b.rem(b.div(grid.thread, kLaneFeatures), kLaneRows);
  Value column = b.add(firstFeature, b.toIndex(feature));
  Value exists = b.less(column, numFeatures);
  Value lastFeature = b.sub(numFeatures, b.index(1));
  column = b.minSigned(column, lastFeature);
  // Rows count from the first one in 32 bits: their places stay in registers
  // from chunk to chunk, which 64 bits would overfill on some chips.
  Value numRows = areKeys ? mix.numKeys : mix.numQueries;
  Value numReal = b.toI32(b.minSigned(b.sub(numRows, first), b.index(size)));
  Value lastRow = b.sub(numReal, b.i32(1));
  for (int64_t i = 0; i < size; i += kLaneRows) {
    Value row = b.add(laneRow, b.i32(i));
    Value isReal = b.less(row, numReal);
    Value place = b.add(first, b.toIndex(b.minSigned(row, lastRow)));
    if (Value unmasked = areKeys ? mix.isUnmasked(place) : Value())
      isReal = b.both(isReal, unmasked);
    Value value = b.loadF32(memref, {mix.batch, mix.head, place, column});
    value = b.select(b.both(exists, isReal), value, b.f32(0.0));
    Value offset = b.add(b.mul(feature, b.i32(size + kPadding)), row);
    b.store(value, b.at(shared, b.mul(offset, b.i32(4))), 4);
  }
}

/// The products of the chunk in shared memory, row-major.
SmallVector<Value> FloatProducts::multiplyChunk() {
  constexpr int64_t unroll = 4;
  SmallVector<Value> zeros(grid.rowsEach * grid.keysEach, b.f32(0.0));
  return b.loop(b.index(0), b.index(kChunk), unroll, zeros,
                [&](Value first, ValueRange carried) -> SmallVector<Value> {
                  SmallVector<Value> sums(carried);
                  for (int64_t i = 0; i < unroll; ++i) {
                    Value feature = b.add(b.toI32(first), b.i32(i));
                    SmallVector<Value> q = loadFloats(
                        b, queries,
                        b.add(b.mul(feature, b.i32(grid.tileRows + kPadding)),
                              b.mul(grid.threadRow, b.i32(grid.rowsEach))),
                        grid.rowsEach);
                    SmallVector<Value> k = loadFloats(
                        b, keys,
                        b.add(b.mul(feature, b.i32(kKeys + kPadding)),
                              b.mul(grid.threadColumn, b.i32(grid.keysEach))),
                        grid.keysEach);
                    for (auto [number, sum] : llvm::enumerate(sums))
                      sum = b.fma(q[number / grid.keysEach],
                                  k[number % grid.keysEach], sum);
                  }
                  return sums;
                });
}

Fragment FloatProducts::multiply(Value firstKey) {
  SmallVector<Value> zeros(grid.rowsEach * grid.keysEach, b.f32(0.0));
  Value numFeatures = memref::DimOp::create(b, mix.op.getQ(), b.index(3));
  SmallVector<Value> sums = b.loop(
      b.index(0), numFeatures, kChunk, zeros,
      [&](Value feature, ValueRange totals) -> SmallVector<Value> {
        b.barrier();
        loadChunk(mix.op.getQ(), queries, grid.tileRows, mix.firstRow, feature,
                  /*areKeys=*/false);
        loadChunk(mix.op.getK(), keys, kKeys, firstKey, feature,
                  /*areKeys=*/true);
        b.barrier();
        SmallVector<Value> next;
        for (auto [total, part] : llvm::zip_equal(totals, multiplyChunk()))
          next.push_back(b.add(total, part));
        return next;
      });
  Fragment products;
  for (int64_t row = 0; row < grid.rowsEach; ++row)
    products.emplace_back(
        ArrayRef(sums).slice(row * grid.keysEach, grid.keysEach));
  return products;
}

//===----------------------------------------------------------------------===//
// Values
//===----------------------------------------------------------------------===//

/// Brings the values of `valueKeys` keys to shared memory, 0 for keys that
/// nobody sees and behind the last column.
void FloatValues::loadValues(Value firstKey) {
  int64_t width = grid.getWidth();
  int64_t count = valueKeys * width;
  Value numColumns = b.index(getNumColumns(mix.op));
  b.loop(b.toIndex(grid.thread), b.index(count), kThreadRows * kThreadColumns,
         [&](Value number) {
           Value key =
               b.add(firstKey, b.op<arith::DivUIOp>(number, b.index(width)));
           Value column = b.op<arith::RemUIOp>(number, b.index(width));
           Value isReal = b.both(mix.isReal(key), b.less(column, numColumns));
           column = b.minSigned(column, b.sub(numColumns, b.index(1)));
           Value value = b.loadF32(
               mix.op.getV(), mix.getValuePlace(mix.clampKey(key), column));
           value = b.select(isReal, value, b.f32(0.0));
           b.store(value, b.at(values, b.mul(b.toI32(number), b.i32(4))), 4);
         });
}

/// Where the weight of a key and a row, a multiple of 4, lies. Groups of 4 rows
/// change places with the key's thread, so that the threads that store the
/// weights of one row meet different banks.
Value FloatValues::getWeightOffset(Value key, Value row) {
  Value group = b.op<arith::XOrIOp>(
      row, b.mul(b.rem(b.div(key, grid.keysEach), 8), b.i32(4)));
  return b.add(b.mul(key, b.i32(grid.tileRows)), group);
}

/// sums += p v of the key behind `key`, a multiple of those unrolled;
/// `valueKey` is its number among those whose values are in shared memory.
void FloatValues::mixKey(Value key, Value valueKey, int64_t behind,
                         MutableArrayRef<Value> sums) {
  SmallVector<Value> w, v;
  for (int64_t row = 0; row < grid.rowsEach; row += 4) {
    Value offset = getWeightOffset(key, mix.layout.rows[row]);
    llvm::append_range(
        w, loadFloats(b, weights, b.add(offset, b.i32(behind * grid.tileRows)),
                      4));
  }
  int64_t width = grid.getWidth();
  Value valueRow = b.mul(b.add(valueKey, b.i32(behind)), b.i32(width));
  for (int64_t i = 0; i < grid.columnsEach; ++i) {
    Value column = b.add(grid.threadColumn, b.i32(i * kThreadColumns));
    Value place = b.at(values, b.mul(b.add(valueRow, column), b.i32(4)));
    v.push_back(b.load(b.getF32Type(), place, 4));
  }
  for (auto [number, sum] : llvm::enumerate(sums))
    sum =
        b.fma(w[number / grid.columnsEach], v[number % grid.columnsEach], sum);
}

void FloatValues::mixValues(Value firstKey, const Fragment &p,
                            ArrayRef<Value> decays,
                            MutableArrayRef<Value> sums) {
  auto four = VectorType::get({4}, b.getF32Type());
  for (int64_t key = 0; key < grid.keysEach; ++key)
    for (int64_t row = 0; row < grid.rowsEach; row += 4) {
      Value vector = LLVM::UndefOp::create(b, four);
      for (int64_t i = 0; i < 4; ++i)
        vector =
            LLVM::InsertElementOp::create(b, vector, p[row + i][key], b.i32(i));
      Value offset =
          getWeightOffset(mix.layout.keys[key], mix.layout.rows[row]);
      b.store(vector, b.at(weights, b.mul(offset, b.i32(4))), 16);
    }
  for (auto [number, sum] : llvm::enumerate(sums))
    sum = b.mul(sum, decays[number / grid.columnsEach]);
  SmallVector<Value> mixed = b.loop(
      b.index(0), b.index(kKeys), valueKeys, sums,
      [&](Value first, ValueRange carried) -> SmallVector<Value> {
        b.barrier();
        loadValues(b.add(firstKey, first));
        b.barrier();
        // The keys of a thread share the places of their rows.
        int64_t unroll = std::min(grid.keysEach, valueKeys);
        return b.loop(b.index(0), b.index(valueKeys), unroll, carried,
                      [&](Value key, ValueRange old) -> SmallVector<Value> {
                        SmallVector<Value> next(old);
                        for (int64_t i = 0; i < unroll; ++i)
                          mixKey(b.toI32(b.add(first, key)), b.toI32(key), i,
                                 next);
                        return next;
                      });
      });
  llvm::copy(mixed, sums.begin());
}

//===----------------------------------------------------------------------===//
// Tiles of queries
//===----------------------------------------------------------------------===//

void FloatMix::emitTile() {
  auto [begin, end] = mix.getKeyRange();
  SmallVector<Value> carried = mix.getInitialState();
  int64_t stateSize = carried.size();
  carried.append(grid.rowsEach * grid.columnsEach, b.f32(0.0));
  SmallVector<Value> last =
      b.loop(begin, end, kKeys, carried,
             [&](Value firstKey, ValueRange old) -> SmallVector<Value> {
               SmallVector<Value> next(old);
               // The biases of the last tile have been read: each chunk of
               // features starts with a barrier, and so does what follows here.
               b.barrier();
               mix.writeBiases(grid.thread, firstKey, biases);
               Fragment p = products.multiply(firstKey);
               b.barrier();
               SmallVector<Value> state(next.begin(), next.begin() + stateSize);
               SmallVector<Value> decays =
                   mix.update(state, p, firstKey, biases);
               llvm::copy(state, next.begin());
               if (op.getV())
                 values.mixValues(firstKey, p, decays,
                                  MutableArrayRef(next).drop_front(stateSize));
               return next;
             });
  SmallVector<Value> factors =
      mix.finish(ValueRange(last).take_front(stateSize));
  for (int64_t row = 0; row < grid.rowsEach; ++row)
    for (int64_t i = 0; i < grid.columnsEach; ++i)
      mix.storeMixed(last[stateSize + row * grid.columnsEach + i], factors[row],
                     mix.layout.rows[row],
                     b.add(grid.threadColumn, b.i32(i * kThreadColumns)));
  // The next tile's loop starts with a barrier.
}

static MixShape getShape(SoftmaxMixOp op) {
  int64_t rows = getNumColumns(op) > 32 ? 32 : 64;
  int64_t features = kChunk * (rows + kKeys + 2 * kPadding) * 4;
  int64_t weights = kKeys * rows * 4;
  return {kMixThreads, rows,
          features + weights + MixEmitter::getBiasBytes(op, kKeys)};
}

MixPlan mlir::moe::planMixOnFloatUnits(SoftmaxMixOp op) {
  MixShape shape = getShape(op);
  return {shape, [=](WarpBuilder &b, SoftmaxMixOp op) {
            FloatMix(b, op, shape).emit();
          }};
}
