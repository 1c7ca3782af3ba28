//===- SoftmaxMixTiles.cpp - Register tiles of rows and columns -----------===//

#include "SoftmaxMixTiles.h"

#include "Product/Chains.h"
#include "Product/RegisterTile.h"

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
  bool arePairs = e.target.bf16Dot;
  for (Value source : {rowSource, columnSource})
    arePairs &= getElementType(source).isBF16();
  if (!arePairs)
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
static bool usesBf16Dot(Value packed) {
  return cast<MemRefType>(packed.getType()).getElementType().isInteger();
}

/// Features first, first + 1, .. of a row as the lanes of a vector: one a lane
/// in f32, or two a lane. `count` of them exist, all where it is null.
static Value loadFeatures(Emitter &e, Value source, Value row, Value first,
                          Value count, bool arePairs) {
  if (!arePairs)
    return e.loadFloats(source, {row, first},
                        count ? e.firstLanes(count) : Value());
  return e.loadPairs(source, {row, first}, count);
}

void mlir::moe::packTransposed(Emitter &e, Value source, ArrayRef<Value> rows,
                               Value isReal, Value packed, Value slot) {
  bool arePairs = usesBf16Dot(packed);
  int64_t perLane = arePairs ? 2 : 1, step = perLane * e.width;
  Value zero = arePairs ? e.i32(0) : e.f32(0.0);
  auto pack = [&](Value feature, Value count) {
    Values vectors;
    for (Value row : rows)
      vectors.push_back(loadFeatures(e, source, row, feature, count, arePairs));
    Value first = feature;
    if (arePairs)
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

namespace {
/// Rows of tokens as packRows writes them.
struct TokenRows {
  Value source, first, terms;

  /// What tells whether a slot counts, and its row.
  std::pair<Value, Value> get(Emitter &e, Value slot) const;
  Value load(Emitter &e, std::pair<Value, Value> row, Value column) const;
};
} // namespace

std::pair<Value, Value> TokenRows::get(Emitter &e, Value slot) const {
  Value last = e.sub(e.dim(source, 0), e.index(1));
  Value isHidden = e.compare(arith::CmpFPredicate::OEQ, e.load(terms, {slot}),
                             e.constant(e.getF32Type(), -kInfinity));
  return {isHidden, e.minSigned(e.add(first, slot), last)};
}

/// A vector of a row in f32, 0 where it does not count.
Value TokenRows::load(Emitter &e, std::pair<Value, Value> row,
                      Value column) const {
  Value mask = e.firstLanes(e.sub(e.dim(source, 1), column));
  Value values = e.loadFloats(source, {row.second, column}, mask);
  return e.select(row.first, e.f32(0.0), values);
}

/// Two vectors of bf16, as f32, as pairs.
static Value joinPairs(Emitter &e, Value low, Value high) {
  auto getBits = [&](Value floats) {
    return arith::BitcastOp::create(e, e.ints(), floats);
  };
  low = arith::ShRUIOp::create(e, getBits(low), e.i32(16));
  return arith::OrIOp::create(e, low, getBits(high));
}

void mlir::moe::packRows(Emitter &e, Value source, Value first, int64_t count,
                         Value terms, Value packed) {
  TokenRows rows{source, first, terms};
  Value size = e.dim(source, 1);
  bool arePairs = usesBf16Dot(packed);
  int64_t perRow = arePairs ? 2 : 1;
  e.loop(e.index(0), e.index(count / perRow), 1, [&](Value packedRow) {
    Value slot = e.mul(packedRow, e.index(perRow));
    SmallVector<std::pair<Value, Value>> tokens{rows.get(e, slot)};
    if (arePairs)
      tokens.push_back(rows.get(e, e.add(slot, e.index(1))));
    e.loop(e.index(0), size, e.width, [&](Value column) {
      Values values;
      for (auto token : tokens)
        values.push_back(rows.load(e, token, column));
      Value stored = arePairs ? joinPairs(e, values[0], values[1]) : values[0];
      e.storeVector(stored, packed, {packedRow, column});
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

namespace {
/// The products of a group of rows with the packed columns. A packed k is a
/// feature or, where `packed` has them, a pair.
class TileProduct {
public:
  /// Of the vectors of columns from `firstVector` on.
  TileProduct(Emitter &e, Value source, ArrayRef<Value> rows, Value packed,
              int64_t firstVector = 0)
      : firstVector(firstVector),
        tile(e, kGroupRows, getColumnVectors(e) - firstVector,
             usesBf16Dot(packed)),
        e(e), source(source), rows(rows), packed(packed) {}

  const int64_t firstVector;
  const RegisterTile tile;

  Tile emit();
  /// Those of whole packed ks.
  Chains getChains();
  Values sumChain(Value first, Value end,
                  function_ref<void(Value packedK)> prefetch = {});
  bool mayHaveLastOdd();
  Values addLastOdd(Values sums);

private:
  Values multiplyAdd(Value packedK, ValueRange sums, bool isLastOdd = false);
  Value splatPair(Value row, Value pair, bool isLastOdd);

  Emitter &e;
  Value source;
  ArrayRef<Value> rows;
  Value packed;
};
} // namespace

/// Two features of a row in every lane. Behind the last of an odd number lies
/// another row, which may hold anything.
Value TileProduct::splatPair(Value row, Value pair, bool isLastOdd) {
  Value feature = e.mul(pair, e.index(2));
  if (isLastOdd) {
    Value bits = arith::BitcastOp::create(e, e.getI16Type(),
                                          e.load(source, {row, feature}));
    return e.splat(arith::ExtUIOp::create(e, e.getI32Type(), bits));
  }
  return e.splatPair(source, {row, feature});
}

Values TileProduct::multiplyAdd(Value packedK, ValueRange sums,
                                bool isLastOdd) {
  Values columns;
  for (int64_t vector = 0; vector < tile.numVectors; ++vector)
    columns.push_back(e.loadVector(
        packed, {packedK, e.index((firstVector + vector) * e.width)}));
  auto splatRow = [&](int64_t row) {
    return usesBf16Dot(packed)
               ? splatPair(rows[row], packedK, isLastOdd)
               : e.splat(e.toF32(e.load(source, {rows[row], packedK})));
  };
  return tile.multiplyAdd(splatRow, columns, sums);
}

/// The sums over packed ks `first` to `end`; `prefetch` asks for something
/// ahead, a line of features at a time.
Values TileProduct::sumChain(Value first, Value end,
                             function_ref<void(Value)> prefetch) {
  Values zeros = tile.getZeros();
  int64_t line = 8 * CPUTarget::kLineBytes /
                 getElementType(source).getIntOrFloatBitWidth();
  int64_t size = cast<MemRefType>(source.getType()).getDimSize(1);
  bool areWhole = !ShapedType::isDynamic(size) && size % line == 0;
  int64_t blockSize = usesBf16Dot(packed) ? line / 2 : line;
  return loopOverK(e, {first, end, blockSize, areWhole}, zeros, prefetch,
                   [&](Value packedK, ValueRange sums) {
                     return multiplyAdd(packedK, sums);
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
    return multiplyAdd(arith::DivSIOp::create(e, numFeatures, two), sums,
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
  Values sums =
      getChains().sum(e, tile.getZeros(), [&](Value first, Value end) {
        return sumChain(first, end);
      });
  if (usesBf16Dot(packed))
    sums = addLastOdd(sums);
  Tile rows;
  for (int64_t row = 0; row < kGroupRows; ++row)
    rows.push_back(tile.getRow(sums, row));
  return rows;
}

Chains TileProduct::getChains() {
  Value numFeatures = e.dim(source, 1);
  if (!usesBf16Dot(packed))
    return {numFeatures, kFeatureChain};
  return {arith::DivSIOp::create(e, numFeatures, e.index(2)),
          kFeatureChain / 2};
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

/// Where a row and a vector of columns are among the sums of a block.
static Values getPlace(Emitter &e, Value group, int64_t row, int64_t vector) {
  return {e.add(group, e.index(row)), e.index(vector * e.width)};
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
  auto prefetchRows = [&](Value from, Value first, int64_t count,
                          Value packedK) {
    Value feature = usesBf16Dot(packed) ? e.mul(packedK, e.index(2)) : packedK;
    for (Value row : clampRows(e, first, count, e.dim(from, 0)))
      prefetchLine(e, from, {row, feature}, kFirstCache);
  };
  auto prefetch = [&](Value group, Value packedK) {
    prefetchRows(source, e.add(e.add(first, group), e.index(kGroupRows)),
                 kGroupRows, packedK);
    Value number = arith::DivUIOp::create(e, group, e.index(kGroupRows));
    prefetchRows(columns, e.add(nextColumn, e.mul(number, e.index(share))),
                 share, packedK);
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
  auto store = [&](const TileProduct &product, Value group,
                   ArrayRef<Value> values) {
    product.tile.forEachSum(
        values, [&](int64_t row, int64_t vector, Value value) {
          e.storeVector(value, sums,
                        getPlace(e, group, row, product.firstVector + vector));
        });
  };
  auto load = [&](const TileProduct &product, Value group) {
    Values values;
    for (int64_t row = 0; row < kGroupRows; ++row)
      for (int64_t vector = product.firstVector; vector < getColumnVectors(e);
           ++vector)
        values.push_back(e.loadVector(sums, getPlace(e, group, row, vector)));
    return values;
  };
  // The first chain stores its sums. Of an unknown number of features there may
  // be no whole packed k.
  if (ShapedType::isDynamic(cast<MemRefType>(source.getType()).getDimSize(1)))
    forEachGroup([&](TileProduct &product, Value group) {
      store(product, group, product.tile.getZeros());
    });
  Value zero = e.index(0);
  TileProduct any(e, source, {}, packed);
  Chains chains = any.getChains();
  chains.forEach(e, zero, [&](Value firstK) {
    Value end = chains.getEnd(e, firstK);
    Value isFirst = e.compare(arith::CmpIPredicate::eq, firstK, zero);
    forEachGroup([&](TileProduct &product, Value group) {
      Values chain = product.sumChain(
          firstK, end, [&](Value packedK) { prefetch(group, packedK); });
      e.ifElse(
          isFirst, TypeRange(),
          [&]() -> Values { return store(product, group, chain), Values(); },
          [&]() -> Values {
            Values totals = addChain(e, load(product, group), chain);
            return store(product, group, totals), Values();
          });
    });
  });
  if (usesBf16Dot(packed) && any.mayHaveLastOdd())
    forEachGroup([&](TileProduct &product, Value group) {
      store(product, group, product.addLastOdd(load(product, group)));
    });
}

Tile BlockProducts::loadTile(Emitter &e, Value group) const {
  Tile tile(kGroupRows);
  for (auto [row, values] : llvm::enumerate(tile))
    for (int64_t vector = 0; vector < getColumnVectors(e); ++vector)
      values.push_back(e.loadVector(sums, getPlace(e, group, row, vector)));
  return tile;
}

Tile BlockProducts::get(Emitter &e, Value source, ArrayRef<Value> rows,
                        Value packed, Value group) const {
  return sums ? loadTile(e, group) : multiplyTile(e, source, rows, packed);
}

namespace {
/// Rows of sums over k, the tokens of the packed block: sums[row] +=
/// weight(row, k) * packed[k].
struct TileSum {
  /// The factor of a row at a k, or at a pair of them, a vector.
  function_ref<Value(int64_t row, Value k)> getWeight;
  Value firstK, endK, packed, accumulators;
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
      prefetchLine(e, accumulators, {row, at(vector)}, kFirstCache,
                   /*isWrite=*/true);
  // The block is summed on its own: one large weight would swallow thousands of
  // small ones that are added to it one by one.
  RegisterTile tile(e, rows.size(), numVectors, usesBf16Dot(packed));
  Values sums =
      loopOverK(e, firstK, endK, tile.getZeros(), [&](Value k, ValueRange old) {
        Values values;
        for (int64_t vector = 0; vector < numVectors; ++vector)
          values.push_back(e.loadVector(packed, {k, at(vector)}));
        return tile.multiplyAdd([&](int64_t row) { return getWeight(row, k); },
                                values, old);
      });
  auto store = [&](bool adds) {
    tile.forEachSum(sums, [&](int64_t row, int64_t vector, Value sum) {
      Values place{rows[row], at(vector)};
      if (adds) {
        Value old = e.loadVector(accumulators, place);
        sum = decays.empty() ? e.add(old, sum) : e.fma(old, decays[row], sum);
      }
      e.storeVector(sum, accumulators, place);
    });
    return Values();
  };
  if (isFirst)
    e.ifElse(
        isFirst, TypeRange(), [&] { return store(/*adds=*/false); },
        [&] { return store(/*adds=*/true); });
  else
    store(/*adds=*/true);
}

/// Calls `body` for tiles of at most as many vectors as a block has, which
/// cover `size` elements.
static void
forEachVectors(Emitter &e, OpFoldResult size,
               function_ref<void(Value first, int64_t numVectors)> body) {
  std::optional<int64_t> constant = getConstantIntValue(size);
  if (!constant) {
    e.loop(e.index(0), cast<Value>(size), e.width,
           [&](Value first) { body(first, 1); });
    return;
  }
  // Whole tiles, then what is left.
  int64_t tile = getColumnVectors(e);
  int64_t numVectors = llvm::divideCeil(*constant, e.width);
  int64_t rest = numVectors % tile, wide = tile * e.width;
  Value wideEnd = e.index((numVectors - rest) * e.width);
  if (numVectors > tile)
    e.loop(e.index(0), wideEnd, wide, [&](Value first) { body(first, tile); });
  else if (numVectors == tile)
    body(e.index(0), tile);
  if (rest)
    body(wideEnd, rest);
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
  auto [begin, end] = columns;
  auto getWeight = [&](int64_t row, Value k) {
    return e.splat(e.load(weights, {e.index(row), k}));
  };
  auto getPair = [&](int64_t row, Value pair) {
    return e.splatPair(weights, {e.index(row), e.mul(pair, e.index(2))});
  };
  bool arePairs = usesBf16Dot(packed);
  if (arePairs) {
    begin = arith::DivUIOp::create(e, begin, e.index(2));
    end = arith::CeilDivUIOp::create(e, end, e.index(2));
  }
  function_ref<Value(int64_t, Value)> single = getWeight, pair = getPair;
  TileSum sum{arePairs ? pair : single,
              begin,
              end,
              packed,
              accumulators,
              getRows(e, group, kGroupRows),
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
      auto getWeight = [&](int64_t row, Value k) {
        return e.splat(e.load(weights, {e.add(group, e.index(row)), k}));
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
