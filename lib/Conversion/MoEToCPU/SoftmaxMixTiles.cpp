//===- SoftmaxMixTiles.cpp - Register tiles of rows and columns -----------===//

#include "SoftmaxMixTiles.h"

#include "llvm/Support/MathExtras.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

static constexpr double kInfinity = std::numeric_limits<double>::infinity();

//===----------------------------------------------------------------------===//
// Visibility by position
//===----------------------------------------------------------------------===//

PositionRule::PositionRule(MixLogitsOpInterface op, bool rowsAreKeys)
    : causal(op.getCausal()), excludeSelf(op.getExcludeSelf()),
      rowsAreKeys(rowsAreKeys) {
  // Positions are compared in 32 bits. Without itself a query still sees
  // `window` keys.
  if (std::optional<uint64_t> window = op.getWindow())
    reach =
        std::min<int64_t>(*window, int64_t(1) << 30) + (excludeSelf ? 1 : 0);
}

Value PositionRule::getVisible(Emitter &e, Value position,
                               Value firstColumn) const {
  if (!causal && !excludeSelf && !reach)
    return {};
  using Predicate = arith::CmpIPredicate;
  Type i32 = e.getI32Type();
  Value columns = e.add(e.splat(e.fromIndex(firstColumn, i32)), e.iota());
  Value own = e.splat(e.fromIndex(position, i32));
  Value visible;
  if (causal)
    visible =
        e.compare(rowsAreKeys ? Predicate::sge : Predicate::sle, columns, own);
  if (excludeSelf)
    visible = e.both(visible, e.compare(Predicate::ne, columns, own));
  if (reach) {
    Value end = rowsAreKeys ? e.add(position, e.index(*reach))
                            : e.sub(position, e.index(*reach));
    visible =
        e.both(visible, e.compare(rowsAreKeys ? Predicate::slt : Predicate::sgt,
                                  columns, e.splat(e.fromIndex(end, i32))));
  }
  return visible;
}

Value PositionRule::isGroupVisible(Emitter &e, Value position,
                                   Value firstColumn,
                                   int64_t numColumns) const {
  using Predicate = arith::CmpIPredicate;
  Value lastPosition = e.add(position, e.index(kGroupRows - 1));
  Value lastColumn = e.add(firstColumn, e.index(numColumns - 1));
  Value visible;
  if (causal)
    visible = rowsAreKeys
                  ? e.compare(Predicate::sge, lastColumn, position)
                  : e.compare(Predicate::sle, firstColumn, lastPosition);
  if (reach)
    visible = e.both(
        visible, rowsAreKeys ? e.compare(Predicate::slt, firstColumn,
                                         e.add(lastPosition, e.index(*reach)))
                             : e.compare(Predicate::sgt, lastColumn,
                                         e.sub(position, e.index(*reach))));
  return visible;
}

std::pair<Value, Value> PositionRule::getRange(Emitter &e, Value position,
                                               Value numRows, Value numColumns,
                                               int64_t blockColumns) const {
  Value begin = e.index(0), end = numColumns;
  auto startBlockAt = [&](Value first) {
    first = e.maxIndex(first, e.index(0));
    return e.sub(first,
                 arith::RemSIOp::create(e, first, e.index(blockColumns)));
  };
  if (rowsAreKeys) {
    if (causal)
      begin = startBlockAt(position);
    if (reach)
      end =
          e.minIndex(end, e.add(position, e.add(numRows, e.index(*reach - 1))));
    return {begin, end};
  }
  if (causal)
    end = e.minIndex(end, e.add(position, numRows));
  if (reach)
    begin = startBlockAt(e.sub(position, e.index(*reach - 1)));
  return {begin, end};
}

//===----------------------------------------------------------------------===//
// Packing
//===----------------------------------------------------------------------===//

Values mlir::moe::clampRows(Emitter &e, Value first, int64_t count,
                            Value size) {
  Value last = e.sub(size, e.index(1));
  Values rows;
  for (int64_t i = 0; i < count; ++i)
    rows.push_back(e.minIndex(e.add(first, e.index(i)), last));
  return rows;
}

Value mlir::moe::loadLanes(Emitter &e, Value mask, ArrayRef<Value> rows) {
  Values lanes;
  for (Value row : rows)
    lanes.push_back(
        arith::ExtUIOp::create(e, e.getI32Type(), e.load(mask, {row})));
  return e.compare(arith::CmpIPredicate::ne,
                   vector::FromElementsOp::create(e, e.ints(), lanes),
                   e.i32(0));
}

void mlir::moe::packTransposed(Emitter &e, Value source, ArrayRef<Value> rows,
                               Value isReal, Value packed, Value slot) {
  auto pack = [&](Value feature, Value mask, Value count) {
    Values vectors;
    for (Value row : rows)
      vectors.push_back(e.loadFloats(source, {row, feature}, mask));
    for (auto [lane, column] : llvm::enumerate(transposeLanes(e, vectors))) {
      Value tokens = isReal ? e.select(isReal, column, e.f32(0.0)) : column;
      Value position = e.add(feature, e.index(lane));
      auto store = [&] { e.storeVector(tokens, packed, {position, slot}); };
      if (count)
        e.ifThen(e.compare(arith::CmpIPredicate::slt, e.index(lane), count),
                 store);
      else
        store();
    }
  };
  int64_t size = cast<MemRefType>(source.getType()).getDimSize(1);
  Value numFeatures = e.dim(source, 1);
  Value rest =
      ShapedType::isDynamic(size)
          ? arith::RemSIOp::create(e, numFeatures, e.index(e.width)).getResult()
          : e.index(size % e.width);
  Value wholeEnd = e.sub(numFeatures, rest);
  e.loop(e.index(0), wholeEnd, e.width,
         [&](Value feature) { pack(feature, Value(), Value()); });
  if (ShapedType::isDynamic(size) || size % e.width != 0)
    pack(wholeEnd, e.firstLanes(rest), rest);
}

void mlir::moe::packRows(Emitter &e, Value source, Value first, int64_t count,
                         Value terms, Value packed) {
  Value last = e.sub(e.dim(source, 0), e.index(1));
  Value size = e.dim(source, 1);
  e.loop(e.index(0), e.index(count), 1, [&](Value slot) {
    Value row = e.minIndex(e.add(first, slot), last);
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

Tile mlir::moe::multiplyTile(Emitter &e, Value source, ArrayRef<Value> rows,
                             Value packed) {
  Value numFeatures = e.dim(source, 1);
  Values zeros(kGroupRows * kColumnVectors, e.f32(0.0));
  auto accumulate = [&](Value feature, ValueRange carried) -> Values {
    Values columns, next;
    for (int64_t vector = 0; vector < kColumnVectors; ++vector)
      columns.push_back(
          e.loadVector(packed, {feature, e.index(vector * e.width)}));
    for (auto [i, row] : llvm::enumerate(rows)) {
      Value element = e.splat(e.toF32(e.load(source, {row, feature})));
      for (auto [j, column] : llvm::enumerate(columns))
        next.push_back(e.fma(element, column, carried[i * kColumnVectors + j]));
    }
    return next;
  };
  Values sums =
      e.loop(e.index(0), numFeatures, kChainLength, zeros,
             [&](Value first, ValueRange totals) -> Values {
               Value end =
                   e.minIndex(e.add(first, e.index(kChainLength)), numFeatures);
               Values chain = e.loop(first, end, 1, zeros, accumulate);
               Values next;
               for (auto [total, part] : llvm::zip_equal(totals, chain))
                 next.push_back(e.add(total, part));
               return next;
             });
  Tile tile;
  for (int64_t row = 0; row < kGroupRows; ++row)
    tile.push_back(
        Values(ArrayRef(sums).slice(row * kColumnVectors, kColumnVectors)));
  return tile;
}

/// One step of accumulateTile: `numVectors` vectors of elements from `first`.
static void accumulateVectors(Emitter &e, Value weights, Value packed,
                              Value accumulators, Value group,
                              ArrayRef<Value> decays, Value first,
                              int64_t numVectors) {
  auto at = [&](int64_t vector) {
    return e.add(first, e.index(vector * e.width));
  };
  Values carried;
  for (int64_t row = 0; row < kGroupRows; ++row)
    for (int64_t vector = 0; vector < numVectors; ++vector) {
      Value old =
          e.loadVector(accumulators, {e.add(group, e.index(row)), at(vector)});
      carried.push_back(decays.empty() ? old : e.mul(old, decays[row]));
    }
  Value numColumns = e.index(kColumnVectors * e.width);
  Values sums =
      e.loop(e.index(0), numColumns, 1, carried,
             [&](Value column, ValueRange old) -> Values {
               Values values, next;
               for (int64_t vector = 0; vector < numVectors; ++vector)
                 values.push_back(e.loadVector(packed, {column, at(vector)}));
               for (int64_t row = 0; row < kGroupRows; ++row) {
                 Value weight =
                     e.splat(e.load(weights, {e.index(row), column}));
                 for (auto [vector, value] : llvm::enumerate(values))
                   next.push_back(
                       e.fma(weight, value, old[row * numVectors + vector]));
               }
               return next;
             });
  for (int64_t row = 0; row < kGroupRows; ++row)
    for (int64_t vector = 0; vector < numVectors; ++vector)
      e.storeVector(sums[row * numVectors + vector], accumulators,
                    {e.add(group, e.index(row)), at(vector)});
}

void mlir::moe::accumulateTile(Emitter &e, Value weights, Value packed,
                               Value accumulators, Value group,
                               ArrayRef<Value> decays, OpFoldResult size) {
  auto step = [&](Value first, int64_t numVectors) {
    accumulateVectors(e, weights, packed, accumulators, group, decays, first,
                      numVectors);
  };
  std::optional<int64_t> constant = getConstantIntValue(size);
  if (!constant) {
    e.loop(e.index(0), cast<Value>(size), e.width,
           [&](Value first) { step(first, 1); });
    return;
  }
  // Whole tiles of four vectors in a loop, then what is left.
  int64_t numVectors = llvm::divideCeil(*constant, e.width);
  int64_t rest = numVectors % 4, wide = 4 * e.width;
  Value wideEnd = e.index((numVectors - rest) * e.width);
  if (numVectors > 4)
    e.loop(e.index(0), wideEnd, wide, [&](Value first) { step(first, 4); });
  else if (numVectors == 4)
    step(e.index(0), 4);
  if (rest)
    step(wideEnd, rest);
}

Value mlir::moe::sumVectors(Emitter &e, ArrayRef<Value> vectors) {
  if (vectors.size() == 1)
    return vectors.front();
  size_t half = vectors.size() / 2;
  return e.add(sumVectors(e, vectors.take_front(half)),
               sumVectors(e, vectors.drop_front(half)));
}
