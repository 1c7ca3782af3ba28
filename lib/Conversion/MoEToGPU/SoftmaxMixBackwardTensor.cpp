//===- SoftmaxMixBackwardTensor.cpp - The gradient on tensor cores --------===//
//
// The plan of the tiles, their way into shared memory, and the second stage, in
// which what the pairs weigh is multiplied by the other side's rows. Serves
// bf16 and f16 queries and keys whose rows are whole units of 16 bytes.
//
//===----------------------------------------------------------------------===//

#include "SoftmaxMixBackwardTensor.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

static constexpr int64_t kWarps = 4;
static constexpr int64_t kThreads = kWarps * kWarpSize;
/// Accumulators of a thread that leave registers for the rest.
static constexpr int64_t kMaxSums = 136, kGoodSums = 80;

//===----------------------------------------------------------------------===//
// Plan
//===----------------------------------------------------------------------===//

static ShapedType getShaped(Value value) {
  return cast<ShapedType>(value.getType());
}

static std::optional<SweepPlan> makePlan(MixSweep sweep, int64_t sharedBytes) {
  SweepPlan plan;
  Value own = sweep.getOwn(), other = sweep.getOther();
  plan.numFeatures = getShaped(own).getDimSize(3);
  constexpr int64_t unit = kUnitBytes / 2;
  Type element = getShaped(own).getElementType();
  if (!(element.isBF16() || element.isF16()) ||
      element != getShaped(other).getElementType() ||
      ShapedType::isDynamic(plan.numFeatures) || plan.numFeatures % unit != 0 ||
      !hasWholeRows(own) || !hasWholeRows(other))
    return std::nullopt;
  plan.numChunks = llvm::divideCeil(plan.numFeatures, kSweepChunk);
  plan.numColumns = sweep.v ? getShaped(sweep.v).getShape().back() : 0;
  plan.valueWidth =
      plan.numColumns
          ? llvm::PowerOf2Ceil(std::max<int64_t>(plan.numColumns, 16))
          : 0;
  if (ShapedType::isDynamic(plan.numColumns) || plan.valueWidth > 256)
    return std::nullopt;
  plan.ownPlanes = plan.otherPlanes = 0;
  if (sweep.v) {
    Type element = getShaped(sweep.v).getElementType();
    int64_t ofValues = element.isBF16() ? 1 : element.isF16() ? 2 : kPlanes;
    plan.ownPlanes = sweep.ofQueries ? kPlanes : ofValues;
    plan.otherPlanes = sweep.ofQueries ? ofValues : kPlanes;
  }
  plan.hasDv = static_cast<bool>(sweep.dv);
  for (plan.sharing = 1; plan.sharing <= kWarps; plan.sharing *= 2) {
    int64_t sums = 8 * (plan.getFeatureGroups() + plan.getColumnGroups());
    if (sums > (plan.sharing == kWarps ? kMaxSums : kGoodSums))
      continue;
    plan.pieces = plan.sharing == 1 ? 2 : 1;
    plan.ownRows = 16 * kWarps / plan.sharing;
    plan.otherRows = 16 * plan.sharing * plan.pieces;
    if (plan.getBytes() <= sharedBytes)
      return plan;
  }
  return std::nullopt;
}

std::optional<int64_t> mlir::moe::getTensorSweepRows(MixSweep sweep,
                                                     int64_t sharedBytes) {
  std::optional<SweepPlan> plan = makePlan(sweep, sharedBytes);
  return plan ? std::optional(plan->ownRows) : std::nullopt;
}

//===----------------------------------------------------------------------===//
// Emitter
//===----------------------------------------------------------------------===//

TensorSweep::TensorSweep(WarpBuilder &b, MixSweep sweep, const SweepPlan &plan)
    : b(b), sweep(sweep), op(sweep.op),
      logits(sweep.op, /*isTransposed=*/!sweep.ofQueries), plan(plan),
      element(getElementTypeOrSelf(sweep.getOwn())), thread(b.thread()),
      lane(b.rem(thread, kWarpSize)) {
  Value warp = b.div(thread, kWarpSize);
  rowWarp = b.div(warp, plan.sharing);
  sharer = b.rem(warp, plan.sharing);
  own = b.reserveShared(plan.getBytes());
  others = b.at(own, plan.getOwnBytes());
  ownValues = b.at(others, plan.getOtherBytes());
  otherValues = b.at(ownValues, plan.ownPlanes * plan.getOwnValueBytes());
  gradients = b.at(otherValues, plan.otherPlanes * plan.getOtherValueBytes());
  weights = b.at(gradients, kPlanes * plan.getPairBytes());
  partSums =
      b.at(gradients, kPlanes * (plan.hasDv ? 2 : 1) * plan.getPairBytes());
  auto getNumTokens = [&](Value rows) -> Value {
    return memref::DimOp::create(b, rows, b.index(2));
  };
  numOwn = getNumTokens(sweep.getOwn());
  numOthers = getNumTokens(sweep.getOther());
  origin = sweep.origin ? sweep.origin : b.sub(numOthers, numOwn);
}

//===----------------------------------------------------------------------===//
// Shared memory
//===----------------------------------------------------------------------===//

Value TensorSweep::isReal(Value row, Value count, Value mask) {
  Value exists = b.less(row, count);
  if (!mask)
    return exists;
  Value last = b.sub(count, b.index(1));
  Value unmasked = memref::LoadOp::create(
      b, mask, ValueRange{batch, b.minSigned(row, last)});
  return b.both(exists, unmasked);
}

/// Starts copying the features of `numRows` rows, chunk by chunk; zeros for
/// masked rows and for what lies behind the last row or feature.
void TensorSweep::copyRows(Value memref, Value shared, int64_t numRows,
                           Value first, Value count, Value mask) {
  constexpr int64_t units = kSweepChunkBytes / kUnitBytes;
  constexpr int64_t step = kThreads / units;
  Value unit = b.rem(thread, units), firstPlace = b.div(thread, units);
  Value zero = b.index(0), last = b.sub(count, b.index(1));
  Value base = b.addressOf(memref, {batch, head, zero, zero});
  for (int64_t i = 0; i < numRows; i += step) {
    Value place = b.add(firstPlace, b.i32(i));
    Value row = b.add(first, b.toIndex(place));
    Value exists = isReal(row, count, mask);
    if (numRows < step)
      exists = b.both(exists, b.less(place, b.i32(numRows)));
    Value offset = arith::IndexCastOp::create(
        b, b.getI64Type(),
        b.mul(b.minSigned(row, last), b.index(2 * plan.numFeatures)));
    Value from = b.at(base, offset);
    Value to = b.at(shared, b.swizzle(place, unit, kSweepChunkBytes));
    b.loop(zero, b.index(plan.numChunks), 1, [&](Value chunk) {
      Value column = b.add(b.mul(b.toI32(chunk), b.i32(kSweepChunkBytes)),
                           b.mul(unit, b.i32(kUnitBytes)));
      Value isFeature = b.less(column, b.i32(2 * plan.numFeatures));
      Value chunkBytes =
          b.mul(b.toI32(chunk), b.i32(numRows * kSweepChunkBytes));
      b.copyAsync(b.at(to, chunkBytes), b.at(from, column),
                  b.both(exists, isFeature));
    });
  }
}

/// Brings columns of values, or of their gradients, to shared memory as bf16
/// planes; 0 for masked rows and behind the last row or column.
void TensorSweep::copyValues(Value memref, Value shared, int64_t numRows,
                             int64_t planes, Value first, Value count,
                             Value mask) {
  int64_t units = plan.valueWidth / 8;
  int64_t planeBytes = numRows * plan.valueWidth * 2;
  bool hasHeads = getShaped(memref).getRank() == 4;
  b.loop(
      b.toIndex(thread), b.index(numRows * units), kThreads, [&](Value number) {
        Value row = b.div(b.toI32(number), units);
        Value unit = b.rem(b.toI32(number), units);
        Value token = b.add(first, b.toIndex(row));
        Value exists = isReal(token, count, mask);
        SmallVector<Value> place{batch};
        if (hasHeads)
          place.push_back(head);
        place.append({b.minSigned(token, b.sub(count, b.index(1))), Value()});
        SmallVector<Value> values;
        for (int64_t i = 0; i < 8; ++i) {
          Value column = b.toIndex(b.add(b.mul(unit, b.i32(8)), b.i32(i)));
          Value isColumn = b.less(column, b.index(plan.numColumns));
          place.back() = b.minSigned(column, b.index(plan.numColumns - 1));
          values.push_back(b.select(b.both(exists, isColumn),
                                    b.loadF32(memref, place), b.f32(0.0)));
        }
        Value to = b.at(shared, b.swizzle(row, unit, 2 * plan.valueWidth));
        b.storeSplit(values, to, planes, planeBytes);
      });
}

//===----------------------------------------------------------------------===//
// Gradients
//===----------------------------------------------------------------------===//

/// sums += left right, of two neighbouring fragments of 8 columns each, where
/// both sides are sums of planes; the smaller products come first.
void TensorSweep::addPlanes(ArrayRef<SmallVector<Value>> left,
                            ArrayRef<SmallVector<Value>> right,
                            MutableArrayRef<Value> sums) {
  for (int64_t plane = right.size() - 1; plane >= 0; --plane) {
    int64_t most = std::min<int64_t>(left.size(), kPlanes - plane);
    for (int64_t part = most - 1; part >= 0; --part)
      for (int64_t i = 0; i < 2; ++i) {
        MutableArrayRef<Value> sum = sums.slice(4 * i, 4);
        llvm::copy(b.multiplyAdd(left[part],
                                 ArrayRef(right[plane]).slice(2 * i, 2),
                                 ValueRange(sum), b.getBF16Type()),
                   sum.begin());
      }
  }
}

/// A fragment of f16 as two planes of bf16, which have all of its bits.
static SmallVector<SmallVector<Value>> splitF16(WarpBuilder &b,
                                                ArrayRef<Value> fragment) {
  SmallVector<SmallVector<Value>> planes(2);
  for (Value packed : fragment) {
    auto [low, high] = b.unpackF16(packed);
    for (auto [plane, part] :
         llvm::zip_equal(planes, b.splitBF16(low, high, planes.size())))
      plane.push_back(part);
  }
  return planes;
}

/// sums += weights rows, where the planes of `weights` are pairs and `rows` are
/// the features, in chunks, or planes of values, of the other side.
void TensorSweep::addProducts(Value weights, Value rows, int64_t numRowPlanes,
                              int64_t planeBytes, bool areFeatures,
                              MutableArrayRef<Value> sums) {
  int64_t groups = sums.size() / 8;
  int64_t rowBytes = areFeatures ? kSweepChunkBytes : 2 * plan.valueWidth;
  Value ownRow = b.add(b.mul(rowWarp, b.i32(16)), leftRow());
  SmallVector<Value> next = b.loop(
      b.index(0), b.index(plan.otherRows / 16), 1,
      SmallVector<Value>(sums.begin(), sums.end()),
      [&](Value iteration, ValueRange old) -> SmallVector<Value> {
        Value step = b.toI32(iteration);
        Value unit = b.add(b.mul(step, b.i32(2)), b.div(lane, 16));
        Value place =
            b.at(weights, b.swizzle(ownRow, unit, 2 * plan.otherRows));
        SmallVector<SmallVector<Value>> left;
        for (int64_t plane = 0; plane < kPlanes; ++plane)
          left.push_back(
              b.loadMatrices(b.at(place, plane * plan.getPairBytes()),
                             /*transpose=*/false));
        Value otherRow = b.add(b.mul(step, b.i32(16)), leftRow());
        SmallVector<Value> next(old);
        for (int64_t i = 0; i < groups; ++i) {
          Value group = b.add(b.mul(sharer, b.i32(groups)), b.i32(i));
          Value base = rows;
          if (areFeatures) {
            Value chunk = b.div(group, kSweepChunk / 16);
            base = b.at(rows,
                        b.mul(chunk, b.i32(plan.otherRows * kSweepChunkBytes)));
            group = b.rem(group, kSweepChunk / 16);
          } else {
            group = b.minSigned(group, b.i32(plan.valueWidth / 16 - 1));
          }
          Value unit = b.add(b.mul(group, b.i32(2)), b.div(lane, 16));
          Value place = b.at(base, b.swizzle(otherRow, unit, rowBytes));
          SmallVector<SmallVector<Value>> right;
          for (int64_t plane = 0; plane < numRowPlanes; ++plane)
            right.push_back(b.loadMatrices(b.at(place, plane * planeBytes),
                                           /*transpose=*/true));
          if (areFeatures && element.isF16())
            right = splitF16(b, right[0]);
          addPlanes(left, right, MutableArrayRef(next).slice(8 * i, 8));
        }
        return next;
      });
  llvm::copy(next, sums.begin());
}

/// Writes accumulators of `groups` groups of 16 columns.
void TensorSweep::storeGradient(ArrayRef<Value> sums, Value out, int64_t groups,
                                int64_t width, double scale) {
  for (auto [number, sum] : llvm::enumerate(sums)) {
    int64_t group = number / 8, half = number / 4 % 2, part = number % 4;
    Value column = b.add(b.mul(sharer, b.i32(groups)), b.i32(group));
    column = b.add(b.mul(column, b.i32(16)), b.mul(b.rem(lane, 4), b.i32(2)));
    column = b.add(column, b.i32(8 * half + part % 2));
    const RowFacts &row = ownFacts[part / 2];
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
void TensorSweep::storeTotals(ArrayRef<Value> totals) {
  Value isFirstLane = b.compare(CmpIPredicate::eq, b.rem(lane, 4), b.i32(0));
  auto placeOf = [&](int64_t row, Value part) {
    Value place =
        b.add(b.mul(rowWarp, b.i32(16)), b.add(b.div(lane, 4), b.i32(8 * row)));
    place = b.add(b.mul(part, b.i32(plan.ownRows)), place);
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
    b.ifThen(b.both(b.both(isFirst, isFirstLane), ownFacts[row].exists), [&] {
      Value sum = b.f32(0.0);
      for (int64_t part = 0; part < plan.sharing; ++part)
        sum = b.add(sum, b.load(b.getF32Type(), placeOf(row, b.i32(part)),
                                sizeof(float)));
      memref::StoreOp::create(b, sum, sweep.total,
                              ValueRange{batch, head, ownFacts[row].place});
    });
}

void TensorSweep::emitTile() {
  ownFacts.clear();
  for (int64_t row = 0; row < 2; ++row) {
    Value place =
        b.add(b.mul(rowWarp, b.i32(16)), b.add(b.div(lane, 4), b.i32(8 * row)));
    ownFacts.push_back(
        getFacts(sweep.ofQueries, b.add(firstRow, b.toIndex(place))));
  }
  Value ownSide = sweep.ofQueries ? sweep.dmixed : sweep.v;
  Value otherSide = sweep.ofQueries ? sweep.v : sweep.dmixed;
  // Whoever still reads the last tile's memory does so before this.
  b.barrier();
  copyRows(sweep.getOwn(), own, plan.ownRows, firstRow, numOwn,
           sweep.getOwnMask());
  if (sweep.v)
    copyValues(ownSide, ownValues, plan.ownRows, plan.ownPlanes, firstRow,
               numOwn, sweep.getOwnMask());

  int64_t numSums = 8 * plan.getFeatureGroups();
  int64_t numColumnSums = 8 * plan.getColumnGroups();
  SmallVector<Value> carried(numSums + numColumnSums + 2, b.f32(0.0));
  auto [begin, end] =
      logits.rule.getColumns(b, b.add(origin, firstRow), b.index(plan.ownRows),
                             numOthers, plan.otherRows);
  SmallVector<Value> last = b.loop(
      begin, end, plan.otherRows, carried,
      [&](Value first, ValueRange old) -> SmallVector<Value> {
        SmallVector<Value> next(old);
        MutableArrayRef<Value> sums(next);
        b.barrier();
        copyRows(sweep.getOther(), others, plan.otherRows, first, numOthers,
                 sweep.getOtherMask());
        if (sweep.v)
          copyValues(otherSide, otherValues, plan.otherRows, plan.otherPlanes,
                     first, numOthers, sweep.getOtherMask());
        b.commitCopies();
        b.waitForCopies(0);
        b.barrier();
        weigh(first, sums.take_back(2));
        b.barrier();
        addProducts(gradients, others, /*numRowPlanes=*/1, /*planeBytes=*/0,
                    /*areFeatures=*/true, sums.take_front(numSums));
        if (plan.hasDv)
          addProducts(weights, otherValues, plan.otherPlanes,
                      plan.getOtherValueBytes(), /*areFeatures=*/false,
                      sums.slice(numSums, numColumnSums));
        return next;
      });
  // Without other rows nobody has waited for the own ones.
  b.commitCopies();
  b.waitForCopies(0);
  ArrayRef<Value> sums(last);
  storeGradient(sums.take_front(numSums), sweep.gradient,
                plan.getFeatureGroups(), plan.numFeatures, sweep.scale);
  if (plan.hasDv)
    storeGradient(sums.slice(numSums, numColumnSums), sweep.dv,
                  plan.getColumnGroups(), plan.numColumns, /*scale=*/1.0);
  if (sweep.total)
    storeTotals(sums.take_back(2));
}

void TensorSweep::emit() {
  Value zero = b.index(0);
  auto getSize = [&](int64_t dim) -> Value {
    return memref::DimOp::create(b, sweep.gradient, b.index(dim));
  };
  b.loop(zero, getSize(0), 1, [&](Value batchIndex) {
    b.loop(zero, getSize(1), 1, [&](Value headIndex) {
      b.loop(zero, numOwn, plan.ownRows, [&](Value row) {
        batch = batchIndex;
        head = headIndex;
        firstRow = row;
        emitTile();
      });
    });
  });
}

void mlir::moe::emitSweepOnTensorCores(WarpBuilder &b, MixSweep sweep,
                                       int64_t sharedBytes) {
  TensorSweep(b, sweep, *makePlan(sweep, sharedBytes)).emit();
}
