//===- SoftmaxMixTiles.cpp - Register tiles of rows and columns -----------===//

#include "SoftmaxMixTiles.h"

#include "RegisterTile.h"

#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Packing
//===----------------------------------------------------------------------===//

Value mlir::moe::loadLanes(Emitter &e, Value mask, ArrayRef<Value> rows) {
  Values lanes;
  for (Value row : rows)
    lanes.push_back(
        arith::ExtUIOp::create(e, e.getI32Type(), e.load(mask, {row})));
  return e.compare(arith::CmpIPredicate::ne,
                   vector::FromElementsOp::create(e, e.ints(), lanes),
                   e.i32(0));
}

PackedShape mlir::moe::getPackedShape(Emitter &e, Value rowSource,
                                      Value columnSource,
                                      OpFoldResult numFeatures) {
  OpFoldResult columns = e.getIndexAttr(getColumnVectors(e) * e.width);
  bool inPairs = e.target.bf16Dot;
  for (Value source : {rowSource, columnSource})
    inPairs &= cast<MemRefType>(source.getType()).getElementType().isBF16();
  if (!inPairs)
    return {{numFeatures, columns}, e.getF32Type()};
  OpFoldResult numPairs;
  if (std::optional<int64_t> constant = getConstantIntValue(numFeatures))
    numPairs = e.getIndexAttr(llvm::divideCeil(*constant, 2));
  else
    numPairs =
        arith::CeilDivSIOp::create(e, cast<Value>(numFeatures), e.index(2))
            .getResult();
  return {{numPairs, columns}, e.getI32Type()};
}

/// Whether `packed` holds pairs of bf16 features.
static bool isInPairs(Value packed) {
  return cast<MemRefType>(packed.getType()).getElementType().isInteger();
}

/// Features first, first + 1, .. of a row as the lanes of a vector: one a lane
/// in f32, or two a lane. `count` of them exist, all where it is null.
static Value loadFeatures(Emitter &e, Value source, Value row, Value first,
                          Value count, bool inPairs) {
  if (!inPairs)
    return e.loadFloats(source, {row, first},
                        count ? e.firstLanes(count) : Value());
  return e.loadPairs(source, {row, first}, count);
}

void mlir::moe::packTransposed(Emitter &e, Value source, ArrayRef<Value> rows,
                               Value isReal, Value packed, Value slot) {
  bool inPairs = isInPairs(packed);
  int64_t perLane = inPairs ? 2 : 1, step = perLane * e.width;
  Value zero = inPairs ? e.i32(0) : e.f32(0.0);
  auto pack = [&](Value feature, Value count) {
    Values vectors;
    for (Value row : rows)
      vectors.push_back(loadFeatures(e, source, row, feature, count, inPairs));
    Value first = feature;
    if (inPairs)
      first = arith::DivSIOp::create(e, feature, e.index(2));
    for (auto [lane, column] : llvm::enumerate(transposeLanes(e, vectors))) {
      Value tokens = isReal ? e.select(isReal, column, zero) : column;
      Value position = e.add(first, e.index(lane));
      auto store = [&] { e.storeVector(tokens, packed, {position, slot}); };
      if (count)
        e.ifThen(e.compare(arith::CmpIPredicate::slt, e.index(perLane * lane),
                           count),
                 store);
      else
        store();
    }
  };
  int64_t size = cast<MemRefType>(source.getType()).getDimSize(1);
  Value numFeatures = e.dim(source, 1), rest = e.rest(numFeatures, step);
  Value wholeEnd = e.sub(numFeatures, rest);
  e.loop(e.index(0), wholeEnd, step,
         [&](Value feature) { pack(feature, Value()); });
  if (ShapedType::isDynamic(size) || size % step != 0)
    pack(wholeEnd, rest);
}

void mlir::moe::packRows(Emitter &e, Value source, Value first, int64_t count,
                         Value terms, Value packed) {
  Value last = e.sub(e.dim(source, 0), e.index(1));
  Value size = e.dim(source, 1);
  e.loop(e.index(0), e.index(count), 1, [&](Value slot) {
    Value row = e.minSigned(e.add(first, slot), last);
    Value isHidden = e.compare(arith::CmpFPredicate::OEQ, e.load(terms, {slot}),
                               e.constant(e.getF32Type(), -kInfinity));
    e.loop(e.index(0), size, e.width, [&](Value column) {
      Value mask = e.firstLanes(e.sub(size, column));
      Value values = e.loadFloats(source, {row, column}, mask);
      e.storeVector(e.select(isHidden, e.f32(0.0), values), packed,
                    {slot, column});
    });
  });
}

OpFoldResult mlir::moe::padToVectors(Emitter &e, OpFoldResult size) {
  if (std::optional<int64_t> constant = getConstantIntValue(size))
    return e.getIndexAttr(llvm::alignTo(*constant, e.width));
  Value vectors =
      arith::CeilDivSIOp::create(e, cast<Value>(size), e.index(e.width));
  return e.mul(vectors, e.index(e.width));
}

//===----------------------------------------------------------------------===//
// Products
//===----------------------------------------------------------------------===//

/// Products that one accumulator takes before it is added to the total: one
/// long chain would round the sum of d products d times, and log-sum-exps would
/// leave their tolerance from d = 352 on.
static constexpr int64_t kChainLength = 64;

namespace {
/// The products of a group of rows with the packed columns, one step a feature
/// or a pair of them.
class TileProduct {
public:
  /// Of the vectors of columns from `firstVector` on.
  TileProduct(Emitter &e, Value source, ArrayRef<Value> rows, Value packed,
              int64_t firstVector = 0)
      : firstVector(firstVector), numVectors(getColumnVectors(e) - firstVector),
        e(e), source(source), rows(rows), packed(packed) {}

  const int64_t firstVector, numVectors;

  Tile emit();
  /// Steps of one feature or a pair of them, and those of a chain.
  Value getNumSteps();
  int64_t getChainSteps();
  Values sumChain(Value first, Value end,
                  function_ref<void(Value step)> fetch = {});
  bool mayHaveLastOdd();
  Values addLastOdd(Values sums);

private:
  Values sumChains();
  Values step(Value position, ValueRange carried, bool isLastOdd = false);
  Value loadPair(Value row, Value pair, bool isLastOdd);
  Value multiplyAdd(Value element, Value column, Value sum);

  Emitter &e;
  Value source;
  ArrayRef<Value> rows;
  Value packed;
};
} // namespace

/// Two features of a row in every lane. Behind the last of an odd number lies
/// another row, which may hold anything.
Value TileProduct::loadPair(Value row, Value pair, bool isLastOdd) {
  Value feature = e.mul(pair, e.index(2));
  if (isLastOdd) {
    Value bits = arith::BitcastOp::create(e, e.getI16Type(),
                                          e.load(source, {row, feature}));
    return e.splat(arith::ExtUIOp::create(e, e.getI32Type(), bits));
  }
  return e.splatPair(source, {row, feature});
}

Value TileProduct::multiplyAdd(Value element, Value column, Value sum) {
  if (!isInPairs(packed))
    return e.fma(element, column, sum);
  return e.dotPairs(element, column, sum);
}

Values TileProduct::step(Value position, ValueRange carried, bool isLastOdd) {
  Values columns, next;
  for (int64_t vector = 0; vector < numVectors; ++vector)
    columns.push_back(e.loadVector(
        packed, {position, e.index((firstVector + vector) * e.width)}));
  for (auto [i, row] : llvm::enumerate(rows)) {
    Value element = isInPairs(packed)
                        ? loadPair(row, position, isLastOdd)
                        : e.splat(e.toF32(e.load(source, {row, position})));
    for (auto [j, column] : llvm::enumerate(columns))
      next.push_back(multiplyAdd(element, column, carried[i * numVectors + j]));
  }
  return next;
}

/// The sums over steps `first` to `end`; `fetch` asks for something ahead, a
/// line of steps at a time.
Values TileProduct::sumChain(Value first, Value end,
                             function_ref<void(Value)> fetch) {
  Values zeros(kGroupRows * numVectors, e.f32(0.0));
  constexpr int64_t kLineBits = 512;
  int64_t line = kLineBits / getElementType(source).getIntOrFloatBitWidth();
  int64_t size = cast<MemRefType>(source.getType()).getDimSize(1);
  bool areWhole = !ShapedType::isDynamic(size) && size % line == 0;
  int64_t steps = isInPairs(packed) ? line / 2 : line;
  return loopOverK(e, {first, end, steps, areWhole}, zeros, fetch,
                   [&](Value position, ValueRange carried) {
                     return step(position, carried);
                   });
}

/// The sums over all steps, in chains of kChainLength products.
Values TileProduct::sumChains() {
  Values zeros(kGroupRows * numVectors, e.f32(0.0));
  Value numSteps = getNumSteps();
  return e.loop(
      e.index(0), numSteps, getChainSteps(), zeros,
      [&](Value first, ValueRange totals) -> Values {
        Value end =
            e.minSigned(e.add(first, e.index(getChainSteps())), numSteps);
        Values next;
        for (auto [total, part] : llvm::zip_equal(totals, sumChain(first, end)))
          next.push_back(e.add(total, part));
        return next;
      });
}

/// Whether the number of features may be odd.
bool TileProduct::mayHaveLastOdd() {
  int64_t size = cast<MemRefType>(source.getType()).getDimSize(1);
  return ShapedType::isDynamic(size) || size % 2 != 0;
}

/// Adds the last feature of an odd number of them.
Values TileProduct::addLastOdd(Values sums) {
  int64_t size = cast<MemRefType>(source.getType()).getDimSize(1);
  Value numFeatures = e.dim(source, 1), two = e.index(2);
  auto add = [&] {
    return step(arith::DivSIOp::create(e, numFeatures, two), sums,
                /*isLastOdd=*/true);
  };
  if (!ShapedType::isDynamic(size))
    return size % 2 == 0 ? sums : add();
  Value isOdd =
      e.compare(arith::CmpIPredicate::ne, e.rest(numFeatures, 2), e.index(0));
  return e.ifElse(isOdd, TypeRange(ValueRange(sums)), add,
                  [&] { return sums; });
}

Tile TileProduct::emit() {
  Values sums = sumChains();
  if (isInPairs(packed))
    sums = addLastOdd(sums);
  Tile tile;
  for (int64_t row = 0; row < kGroupRows; ++row)
    tile.push_back(Values(ArrayRef(sums).slice(row * numVectors, numVectors)));
  return tile;
}

Value TileProduct::getNumSteps() {
  Value numFeatures = e.dim(source, 1);
  if (!isInPairs(packed))
    return numFeatures;
  return arith::DivSIOp::create(e, numFeatures, e.index(2));
}

int64_t TileProduct::getChainSteps() {
  return isInPairs(packed) ? kChainLength / 2 : kChainLength;
}

Tile mlir::moe::multiplyTile(Emitter &e, Value source, ArrayRef<Value> rows,
                             Value packed) {
  return TileProduct(e, source, rows, packed).emit();
}

BlockProducts::BlockProducts(Emitter &e, OpFoldResult numFeatures,
                             int64_t blockRows)
    : blockRows(blockRows) {
  // A block of 128 features of a vector-wide tile fills the first cache.
  constexpr int64_t mostInCache = 128;
  std::optional<int64_t> constant = getConstantIntValue(numFeatures);
  if (!constant || *constant > mostInCache)
    sums = e.scratch({e.getIndexAttr(blockRows),
                      e.getIndexAttr(getColumnVectors(e) * e.width)},
                     e.getF32Type());
}

void BlockProducts::multiply(Emitter &e, Value source, Value packed,
                             Value first, Value count, Value columns,
                             Value nextColumn,
                             function_ref<Value(Value)> isVisible,
                             function_ref<Value(Value)> getFirstVector) const {
  if (!sums)
    return;
  // While a group is multiplied, the rows of the next one and its share of the
  // next columns come nearer, a line of each at a time: the hardware does not
  // foresee walks along pieces of rows, and more requests at once would fill
  // the core's queue of misses.
  int64_t share =
      llvm::divideCeil(getColumnVectors(e) * e.width * kGroupRows, blockRows);
  auto fetchRows = [&](Value from, Value first, int64_t count, Value step) {
    Value feature = isInPairs(packed) ? e.mul(step, e.index(2)) : step;
    for (Value row : clampRows(e, first, count, e.dim(from, 0)))
      prefetchLine(e, from, {row, feature}, kFirstCache);
  };
  auto fetch = [&](Value group, Value step) {
    fetchRows(source, e.add(e.add(first, group), e.index(kGroupRows)),
              kGroupRows, step);
    Value number = arith::DivUIOp::create(e, group, e.index(kGroupRows));
    fetchRows(columns, e.add(nextColumn, e.mul(number, e.index(share))), share,
              step);
  };
  Value numRows = e.dim(source, 0);
  auto forEachGroup = [&](function_ref<void(TileProduct &, Value)> body) {
    e.loop(e.index(0), count, kGroupRows, [&](Value group) {
      auto emit = [&](int64_t firstVector) {
        Values rows = clampRows(e, e.add(first, group), kGroupRows, numRows);
        TileProduct product(e, source, rows, packed, firstVector);
        body(product, group);
      };
      auto emitVectors = [&] {
        if (!getFirstVector)
          return emit(0);
        Value firstVector = getFirstVector(group);
        for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
          e.ifThen(
              e.compare(arith::CmpIPredicate::eq, firstVector, e.index(vector)),
              [&] { emit(vector); });
      };
      Value visible = isVisible ? isVisible(group) : Value();
      visible ? e.ifThen(visible, emitVectors) : emitVectors();
    });
  };
  auto getPlace = [&](const TileProduct &product, Value group,
                      int64_t i) -> Values {
    int64_t vector = product.firstVector + i % product.numVectors;
    return {e.add(group, e.index(i / product.numVectors)),
            e.index(vector * e.width)};
  };
  auto store = [&](const TileProduct &product, Value group,
                   ArrayRef<Value> values) {
    for (auto [i, value] : llvm::enumerate(values))
      e.storeVector(value, sums, getPlace(product, group, i));
  };
  auto load = [&](const TileProduct &product, Value group) {
    Values values;
    for (int64_t i = 0; i < kGroupRows * product.numVectors; ++i)
      values.push_back(e.loadVector(sums, getPlace(product, group, i)));
    return values;
  };
  Value zero = e.index(0);
  // The first piece stores its products. Of an unknown number of features there
  // may be no whole step.
  if (ShapedType::isDynamic(cast<MemRefType>(source.getType()).getDimSize(1)))
    forEachGroup([&](TileProduct &product, Value group) {
      store(product, group,
            Values(kGroupRows * product.numVectors, e.f32(0.0)));
    });
  TileProduct any(e, source, {}, packed);
  Value numSteps = any.getNumSteps();
  e.loop(zero, numSteps, any.getChainSteps(), [&](Value firstStep) {
    Value end =
        e.minSigned(e.add(firstStep, e.index(any.getChainSteps())), numSteps);
    Value isFirst = e.compare(arith::CmpIPredicate::eq, firstStep, zero);
    forEachGroup([&](TileProduct &product, Value group) {
      Values products = product.sumChain(
          firstStep, end, [&](Value step) { fetch(group, step); });
      e.ifElse(
          isFirst, TypeRange(),
          [&]() -> Values { return store(product, group, products), Values(); },
          [&]() -> Values {
            Values totals = load(product, group);
            for (auto [total, added] : llvm::zip_equal(totals, products))
              total = e.add(total, added);
            return store(product, group, totals), Values();
          });
    });
  });
  if (isInPairs(packed) && any.mayHaveLastOdd())
    forEachGroup([&](TileProduct &product, Value group) {
      store(product, group, product.addLastOdd(load(product, group)));
    });
}

Tile BlockProducts::loadTile(Emitter &e, Value group) const {
  Tile tile(kGroupRows);
  for (auto [row, values] : llvm::enumerate(tile))
    for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
      values.push_back(e.loadVector(
          sums, {e.add(group, e.index(row)), e.index(vector * e.width)}));
  return tile;
}

Tile BlockProducts::get(Emitter &e, Value source, ArrayRef<Value> rows,
                        Value packed, Value group) const {
  return sums ? loadTile(e, group) : multiplyTile(e, source, rows, packed);
}

namespace {
/// Rows of sums over steps: sums[row] += weight(row, step) * packed[step].
struct TileSum {
  /// The factor of a row at a step, a vector.
  function_ref<Value(int64_t row, Value step)> getWeight;
  Value firstStep, endStep, packed, accumulators;
  /// What each row adds to. One of them may be there more than once.
  Values rows;
  /// Factors of what the accumulators held, or none.
  ArrayRef<Value> decays;
  /// Whether the accumulators hold nothing yet; null: they do.
  Value isFirst;

  void emit(Emitter &e, Value first, int64_t numVectors) const;
};
} // namespace

/// `numVectors` vectors of elements from `first` on.
void TileSum::emit(Emitter &e, Value first, int64_t numVectors) const {
  auto at = [&](int64_t vector) {
    return e.add(first, e.index(vector * e.width));
  };
  for (Value row : rows)
    for (int64_t vector = 0; vector < numVectors; ++vector)
      memref::PrefetchOp::create(e, accumulators, ValueRange{row, at(vector)},
                                 /*isWrite=*/true, /*localityHint=*/3,
                                 /*isDataCache=*/true);
  // The block is summed on its own: one large weight would swallow thousands of
  // small ones that are added to it one by one.
  Values zeros(rows.size() * numVectors, e.f32(0.0));
  Values sums = e.loop(
      firstStep, endStep, 1, zeros, [&](Value step, ValueRange old) -> Values {
        Values values, next;
        for (int64_t vector = 0; vector < numVectors; ++vector)
          values.push_back(e.loadVector(packed, {step, at(vector)}));
        for (size_t row = 0; row < rows.size(); ++row) {
          Value weight = getWeight(row, step);
          for (auto [vector, value] : llvm::enumerate(values))
            next.push_back(
                e.fma(weight, value, old[row * numVectors + vector]));
        }
        return next;
      });
  auto store = [&](bool adds) {
    for (auto [i, row] : llvm::enumerate(rows))
      for (int64_t vector = 0; vector < numVectors; ++vector) {
        Values place{row, at(vector)};
        Value sum = sums[i * numVectors + vector];
        if (adds) {
          Value old = e.loadVector(accumulators, place);
          sum = decays.empty() ? e.add(old, sum) : e.fma(old, decays[i], sum);
        }
        e.storeVector(sum, accumulators, place);
      }
    return Values();
  };
  if (isFirst)
    e.ifElse(
        isFirst, TypeRange(), [&] { return store(/*adds=*/false); },
        [&] { return store(/*adds=*/true); });
  else
    store(/*adds=*/true);
}

/// Calls `step` for tiles of at most as many vectors as a block has, which
/// cover `size` elements.
static void
forEachVectors(Emitter &e, OpFoldResult size,
               function_ref<void(Value first, int64_t numVectors)> step) {
  std::optional<int64_t> constant = getConstantIntValue(size);
  if (!constant) {
    e.loop(e.index(0), cast<Value>(size), e.width,
           [&](Value first) { step(first, 1); });
    return;
  }
  // Whole tiles, then what is left.
  int64_t tile = getColumnVectors(e);
  int64_t numVectors = llvm::divideCeil(*constant, e.width);
  int64_t rest = numVectors % tile, wide = tile * e.width;
  Value wideEnd = e.index((numVectors - rest) * e.width);
  if (numVectors > tile)
    e.loop(e.index(0), wideEnd, wide, [&](Value first) { step(first, tile); });
  else if (numVectors == tile)
    step(e.index(0), tile);
  if (rest)
    step(wideEnd, rest);
}

/// Rows [first, first + count).
static Values getRows(Emitter &e, Value first, int64_t count) {
  Values rows;
  for (int64_t i = 0; i < count; ++i)
    rows.push_back(e.add(first, e.index(i)));
  return rows;
}

void mlir::moe::accumulateTile(Emitter &e, Value weights, Value packed,
                               Value accumulators, Value group,
                               ArrayRef<Value> decays, OpFoldResult size,
                               std::pair<Value, Value> columns) {
  auto getWeight = [&](int64_t row, Value step) {
    return e.splat(e.load(weights, {e.index(row), step}));
  };
  TileSum sum{getWeight,     columns.first, columns.second,
              packed,        accumulators,  getRows(e, group, kGroupRows),
              decays,
              /*isFirst=*/{}};
  forEachVectors(e, size, [&](Value first, int64_t numVectors) {
    sum.emit(e, first, numVectors);
  });
}

void mlir::moe::accumulateRows(Emitter &e, Value weights, Value packed,
                               Value accumulators, Value firstRow,
                               Value numRows, Value numColumns,
                               OpFoldResult size) {
  forEachVectors(e, size, [&](Value first, int64_t numVectors) {
    e.loop(e.index(0), numRows, kGroupRows, [&](Value group) {
      auto getWeight = [&](int64_t row, Value step) {
        return e.splat(e.load(weights, {e.add(group, e.index(row)), step}));
      };
      Values rows = clampRows(e, e.add(firstRow, group), kGroupRows,
                              e.dim(accumulators, 0));
      TileSum sum{getWeight,     e.index(0),    numColumns,
                  packed,        accumulators,  rows,
                  /*decays=*/{}, /*isFirst=*/{}};
      sum.emit(e, first, numVectors);
    });
  });
}

void mlir::moe::accumulateColumns(Emitter &e, Value weights, Value packed,
                                  Value accumulators, Value firstColumn,
                                  Value numRows, OpFoldResult size,
                                  Value isFirst) {
  int64_t numColumns = getColumnVectors(e) * e.width;
  int64_t rest = numColumns % kGroupRows, whole = numColumns - rest;
  // Groups inside: what they read of the rows stays in the first cache.
  forEachVectors(e, size, [&](Value first, int64_t numVectors) {
    auto add = [&](Value group, int64_t count) {
      auto getWeight = [&](int64_t column, Value row) {
        return e.splat(e.load(weights, {row, e.add(group, e.index(column))}));
      };
      Values columns = getRows(e, e.add(firstColumn, group), count);
      TileSum sum{getWeight,     e.index(0),   numRows,
                  packed,        accumulators, columns,
                  /*decays=*/{}, isFirst};
      sum.emit(e, first, numVectors);
    };
    e.loop(e.index(0), e.index(whole), kGroupRows,
           [&](Value group) { add(group, kGroupRows); });
    if (rest)
      add(e.index(whole), rest);
  });
}
