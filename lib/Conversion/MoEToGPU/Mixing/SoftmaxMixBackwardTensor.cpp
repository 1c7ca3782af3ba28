//===- SoftmaxMixBackwardTensor.cpp - The gradient on tensor cores --------===//
//
// The plan of the tiles, their way into shared memory, and the second stage, in
// which what the pairs weigh is multiplied by the columns. Serves
// bf16 and f16 queries and keys whose rows are whole units of 16 bytes.
//
//===----------------------------------------------------------------------===//

#include "SoftmaxMixBackward.h"
#include "SoftmaxMixBackwardPairs.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

static constexpr int64_t kWarps = kMixThreads / kWarpSize;
/// Accumulators of a thread that leave registers for the rest.
static constexpr int64_t kMaxSums = 136, kGoodSums = 80;

//===----------------------------------------------------------------------===//
// Plan
//===----------------------------------------------------------------------===//

static std::optional<GradientPlan> makePlan(MixGradient mix,
                                            int64_t sharedBytes) {
  GradientPlan plan;
  Value rows = mix.getRows(), columns = mix.getColumns();
  plan.numFeatures = getShaped(rows).getDimSize(3);
  constexpr int64_t unit = kUnitBytes / 2;
  Type element = getShaped(rows).getElementType();
  if (!(element.isBF16() || element.isF16()) ||
      element != getShaped(columns).getElementType() ||
      ShapedType::isDynamic(plan.numFeatures) || plan.numFeatures % unit != 0 ||
      !canCopyRows(rows) || !canCopyRows(columns))
    return std::nullopt;
  plan.numChunks = llvm::divideCeil(plan.numFeatures, kChunk);
  if (mix.v) {
    int64_t numValues = getShaped(mix.v).getShape().back();
    if (ShapedType::isDynamic(numValues))
      return std::nullopt;
    ValueTile tile;
    tile.numColumns = numValues;
    tile.width = tile.blockColumns =
        numValues ? llvm::PowerOf2Ceil(std::max<int64_t>(numValues, 16)) : 0;
    if (tile.width > 256)
      return std::nullopt;
    plan.rowValues = plan.columnValues = tile;
    Type element = getShaped(mix.v).getElementType();
    int64_t ofValues = element.isBF16() ? 1 : element.isF16() ? 2 : kF32Terms;
    plan.rowValues.terms = mix.ofQueries ? kF32Terms : ofValues;
    plan.columnValues.terms = mix.ofQueries ? ofValues : kF32Terms;
  }
  plan.hasDv = static_cast<bool>(mix.dv);
  for (plan.sharing = 1; plan.sharing <= kWarps; plan.sharing *= 2) {
    int64_t sums = 8 * (plan.getFeatureGroups() + plan.getValueGroups());
    if (sums > (plan.sharing == kWarps ? kMaxSums : kGoodSums))
      continue;
    plan.pieces = plan.sharing == 1 ? 2 : 1;
    plan.tileRows = plan.rowValues.numKeys = 16 * kWarps / plan.sharing;
    plan.tileColumns = plan.columnValues.numKeys =
        16 * plan.sharing * plan.pieces;
    if (plan.getBytes() <= sharedBytes)
      return plan;
  }
  return std::nullopt;
}

//===----------------------------------------------------------------------===//
// Emitter
//===----------------------------------------------------------------------===//

namespace {
/// The gradients of tiles of rows: what the pairs weigh, times the columns.
class TensorGradient : GradientPairs {
public:
  TensorGradient(WarpBuilder &b, MixGradient mix, const GradientPlan &plan)
      : GradientPairs(b, mix, plan),
        copies{b, plan.numFeatures, thread, kMixThreads} {}

  void emit();

private:
  void copyRows(Value memref, Value shared, int64_t numRows, Value first,
                Value count, Value mask);
  void copyValues(const ValueTile &tile, Value memref, Value shared,
                  Value first, Value count, Value mask);
  void addProducts(Value weights, Value rows, bool areFeatures,
                   MutableArrayRef<Value> sums);
  void emitTile();
  void storeGradient(ArrayRef<Value> sums, Value out, int64_t groups,
                     int64_t width, double scale);
  void storeTotals(ArrayRef<Value> totals);

  ChunkCopies copies;
};
} // namespace

//===----------------------------------------------------------------------===//
// Shared memory
//===----------------------------------------------------------------------===//

/// Starts copying the features of `numRows` rows, chunk by chunk; zeros for
/// masked rows and for what lies behind the last row or feature.
void TensorGradient::copyRows(Value memref, Value shared, int64_t numRows,
                              Value first, Value count, Value mask) {
  Value zero = b.index(0), last = b.sub(count, b.index(1));
  Value base = b.addressOf(memref, {batch, head, zero, zero});
  auto getRow = [&](Value number) -> ChunkCopies::Row {
    Value row = b.add(first, b.toIndex(number));
    return {base, copies.offsetOf(b.minSigned(row, last)),
            isReal(row, count, mask)};
  };
  // A row at a time: the addresses of all of them would fill registers.
  for (auto [i, row] : llvm::enumerate(copies.getRows(numRows, getRow)))
    b.loop(zero, b.index(plan.numChunks), 1, [&, i = i](Value iteration) {
      Value chunk = b.toI32(iteration);
      Value offset = b.add(b.mul(chunk, b.i32(numRows * kChunkBytes)),
                           b.i32(i * copies.rowsAtOnce() * kChunkBytes));
      copies.copy(row, b.at(shared, offset), chunk);
    });
}

/// Brings columns of values, or of their gradients, to shared memory as bf16
/// terms; 0 for masked rows and behind the last row or column.
void TensorGradient::copyValues(const ValueTile &tile, Value memref,
                                Value shared, Value first, Value count,
                                Value mask) {
  int64_t units = tile.width / 8;
  bool hasHeads = getShaped(memref).getRank() == 4;
  b.loop(b.toIndex(thread), b.index(tile.numKeys * units), kMixThreads,
         [&](Value number) {
           Value row = b.div(b.toI32(number), units);
           Value unit = b.rem(b.toI32(number), units);
           Value token = b.add(first, b.toIndex(row));
           Value exists = isReal(token, count, mask);
           SmallVector<Value> place{batch};
           if (hasHeads)
             place.push_back(head);
           place.push_back(b.minSigned(token, b.sub(count, b.index(1))));
           place.push_back(b.index(0));
           Value to = b.at(shared, b.swizzle(row, unit, tile.getRowBytes()));
           storeValueUnit(b, tile, memref, place, exists, unit, to);
         });
}

//===----------------------------------------------------------------------===//
// Gradients
//===----------------------------------------------------------------------===//

/// A fragment of f16 as two terms of bf16, which have all of its bits.
static SmallVector<SmallVector<Value>> splitF16(WarpBuilder &b,
                                                ArrayRef<Value> fragment) {
  SmallVector<SmallVector<Value>> terms(2);
  for (Value packed : fragment) {
    auto [low, high] = b.unpackF16(packed);
    for (auto [term, part] :
         llvm::zip_equal(terms, b.splitBF16(low, high, terms.size())))
      term.push_back(part);
  }
  return terms;
}

/// sums += weights rows, where the terms of `weights` are pairs and `rows` are
/// the features, in chunks, or terms of values, of the columns.
void TensorGradient::addProducts(Value weights, Value rows, bool areFeatures,
                                 MutableArrayRef<Value> sums) {
  const ValueTile &tile = plan.columnValues;
  int64_t groups = sums.size() / 8;
  int64_t rowBytes = areFeatures ? kChunkBytes : tile.getRowBytes();
  SmallVector<Value> next = b.loop(
      b.index(0), b.index(plan.tileColumns / 16), 1,
      SmallVector<Value>(sums.begin(), sums.end()),
      [&](Value iteration, ValueRange old) -> SmallVector<Value> {
        Value step = b.toI32(iteration);
        Fragment left;
        for (int64_t term = 0; term < kF32Terms; ++term)
          left.push_back(b.loadLeft(weights, warpRow, b.mul(step, b.i32(2)),
                                    2 * plan.tileColumns,
                                    term * plan.getPairBytes()));
        SmallVector<Value> next(old);
        for (int64_t i = 0; i < groups; ++i) {
          Value group = b.add(b.mul(sharer, b.i32(groups)), b.i32(i));
          Value base = rows;
          if (areFeatures) {
            Value chunk = b.div(group, kChunk / 16);
            base =
                b.at(rows, b.mul(chunk, b.i32(plan.tileColumns * kChunkBytes)));
            group = b.rem(group, kChunk / 16);
          } else {
            group = b.minSigned(group, b.i32(tile.width / 16 - 1));
          }
          Fragment right;
          for (int64_t term = 0; term < (areFeatures ? 1 : tile.terms); ++term)
            right.push_back(b.loadTransposedRight(
                base, b.mul(step, b.i32(16)), b.mul(group, b.i32(2)), rowBytes,
                term * tile.getTermBytes()));
          if (areFeatures && element.isF16())
            right = splitF16(b, right[0]);
          addTermProducts(b, left, right,
                          MutableArrayRef(next).slice(8 * i, 8));
        }
        return next;
      });
  llvm::copy(next, sums.begin());
}

/// Writes accumulators of `groups` groups of 16 columns.
void TensorGradient::storeGradient(ArrayRef<Value> sums, Value out,
                                   int64_t groups, int64_t width,
                                   double scale) {
  for (auto [number, sum] : llvm::enumerate(sums)) {
    int64_t group = number / 8, half = number / 4 % 2, part = number % 4;
    Value column = b.add(b.mul(sharer, b.i32(groups)), b.i32(group));
    column = b.add(b.mul(column, b.i32(16)), b.mul(b.rem(lane, 4), b.i32(2)));
    column = b.add(column, b.i32(8 * half + part % 2));
    const TokenFacts &row = rowFacts[part / 2];
    Value exists = b.both(row.exists, b.less(column, b.i32(width)));
    Value scaled = scale == 1.0 ? sum : b.mul(sum, b.f32(scale));
    b.ifThen(exists, [&] {
      memref::StoreOp::create(
          b, scaled, out,
          ValueRange{batch, head, row.place, b.toIndex(column)});
    });
  }
}

/// Adds up what the lanes and warps of a row have, in a fixed order.
void TensorGradient::storeTotals(ArrayRef<Value> totals) {
  Value isFirstLane = b.compare(CmpIPredicate::eq, b.rem(lane, 4), b.i32(0));
  auto placeOf = [&](int64_t row, Value part) {
    Value place = b.add(warpRow, b.add(b.div(lane, 4), b.i32(8 * row)));
    place = b.add(b.mul(part, b.i32(plan.tileRows)), place);
    return b.at(partSums, b.mul(place, b.i32(sizeof(float))));
  };
  for (int64_t row = 0; row < 2; ++row) {
    Value sum = b.reduceLanes(totals[row], 4,
                              [&](Value x, Value y) { return b.add(x, y); });
    b.ifThen(isFirstLane,
             [&] { b.store(sum, placeOf(row, sharer), sizeof(float)); });
  }
  b.barrier();
  Value isFirst = b.compare(CmpIPredicate::eq, sharer, b.i32(0));
  for (int64_t row = 0; row < 2; ++row)
    b.ifThen(b.both(b.both(isFirst, isFirstLane), rowFacts[row].exists), [&] {
      Value sum = b.f32(0.0);
      for (int64_t part = 0; part < plan.sharing; ++part)
        sum = b.add(sum, b.load(b.getF32Type(), placeOf(row, b.i32(part)),
                                sizeof(float)));
      memref::StoreOp::create(b, sum, mix.total,
                              ValueRange{batch, head, rowFacts[row].place});
    });
}

void TensorGradient::emitTile() {
  loadRowFacts();
  Value valuesOfRows = mix.ofQueries ? mix.dmixed : mix.v;
  Value valuesOfColumns = mix.ofQueries ? mix.v : mix.dmixed;
  // Whoever still reads the last tile's memory does so before this.
  b.barrier();
  copyRows(mix.getRows(), rowFeatures, plan.tileRows, firstRow, numRows,
           mix.getRowMask());
  if (mix.v)
    copyValues(plan.rowValues, valuesOfRows, rowValues, firstRow, numRows,
               mix.getRowMask());

  int64_t numSums = 8 * plan.getFeatureGroups();
  int64_t numValueSums = 8 * plan.getValueGroups();
  SmallVector<Value> carried(numSums + numValueSums + 2, b.f32(0.0));
  auto [begin, end] =
      logits.rule.getColumns(b, b.add(origin, firstRow), b.index(plan.tileRows),
                             numColumns, plan.tileColumns);
  SmallVector<Value> last =
      b.loop(begin, end, plan.tileColumns, carried,
             [&](Value first, ValueRange old) -> SmallVector<Value> {
               SmallVector<Value> next(old);
               MutableArrayRef<Value> sums(next);
               b.barrier();
               copyRows(mix.getColumns(), columnFeatures, plan.tileColumns,
                        first, numColumns, mix.getColumnMask());
               if (mix.v)
                 copyValues(plan.columnValues, valuesOfColumns, columnValues,
                            first, numColumns, mix.getColumnMask());
               b.commitCopies();
               b.waitForCopies(0);
               b.barrier();
               weigh(first, sums.take_back(2));
               b.barrier();
               addProducts(gradients, columnFeatures, /*areFeatures=*/true,
                           sums.take_front(numSums));
               if (plan.hasDv)
                 addProducts(weights, columnValues, /*areFeatures=*/false,
                             sums.slice(numSums, numValueSums));
               return next;
             });
  // Without columns nobody has waited for the rows.
  b.commitCopies();
  b.waitForCopies(0);
  ArrayRef<Value> sums(last);
  storeGradient(sums.take_front(numSums), mix.gradient, plan.getFeatureGroups(),
                plan.numFeatures, mix.scale);
  if (plan.hasDv)
    storeGradient(sums.slice(numSums, numValueSums), mix.dv,
                  plan.getValueGroups(), plan.rowValues.numColumns,
                  /*scale=*/1.0);
  if (mix.total)
    storeTotals(sums.take_back(2));
}

void TensorGradient::emit() {
  Value zero = b.index(0);
  auto getSize = [&](int64_t dim) -> Value {
    return memref::DimOp::create(b, mix.gradient, b.index(dim));
  };
  b.loop(zero, getSize(0), 1, [&](Value batchIndex) {
    b.loop(zero, getSize(1), 1, [&](Value headIndex) {
      b.loop(zero, numRows, plan.tileRows, [&](Value row) {
        startTile(batchIndex, headIndex, row);
        emitTile();
      });
    });
  });
}

std::optional<TensorGradientPlan>
mlir::moe::planGradientOnTensorCores(MixGradient mix, int64_t sharedBytes) {
  std::optional<GradientPlan> plan = makePlan(mix, sharedBytes);
  if (!plan)
    return std::nullopt;
  return TensorGradientPlan{plan->tileRows,
                            [plan = *plan](WarpBuilder &b, MixGradient mix) {
                              TensorGradient(b, mix, plan).emit();
                            }};
}
