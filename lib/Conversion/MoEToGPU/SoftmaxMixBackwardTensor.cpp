//===- SoftmaxMixBackwardTensor.cpp - The gradient on tensor cores --------===//
//
// Serves bf16 queries and keys whose rows are whole units of 16 bytes. A block
// keeps a tile of its own rows in shared memory and takes the other side tile
// by tile. Four warps stand in a grid: one dim cuts the own rows, the other one
// first the other rows, whose pairs with the own ones a warp computes, then the
// features, of which it accumulates the gradient:
//
//   x = own other^T,  p = dmixed v^T             products of the tile's rows
//   A, dx                                        in registers
//   A, dx -> shared memory                       as bf16 planes
//   gradient += dx other,  dv += A dmixed        over the tile's other rows
//
// The products are as exact as those in f32: what is not bf16 is the sum of two
// or three bf16 (planes), and of the products of planes those below 2^-24 are
// left out. A chunk of 64 features is summed from 0 and then added, because
// tensor cores truncate.
//
//===----------------------------------------------------------------------===//

#include "SoftmaxMix.h"
#include "SoftmaxMixBackward.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

static constexpr int64_t kWarps = 4;
static constexpr int64_t kThreads = kWarps * kWarpSize;
/// Features of a chunk, and the bytes of its rows.
static constexpr int64_t kChunk = 64, kChunkBytes = 2 * kChunk;
/// Terms that an f32 is split into.
static constexpr int64_t kPlanes = 3;
/// Accumulators of a thread that leave registers for the rest.
static constexpr int64_t kMaxSums = 136, kGoodSums = 80;

//===----------------------------------------------------------------------===//
// Plan
//===----------------------------------------------------------------------===//

namespace {
/// Sizes of the tiles, and what they take of shared memory.
struct SweepPlan {
  int64_t numFeatures, numChunks;
  /// Columns of the values, and of their rows in shared memory; 0 for none.
  int64_t numColumns, valueWidth;
  /// Warps that share own rows, and pieces of 16 other rows that each takes.
  int64_t sharing, pieces;
  int64_t ownRows, otherRows;
  int64_t ownPlanes, otherPlanes;
  bool hasDv;

  int64_t getOwnBytes() const { return numChunks * ownRows * kChunkBytes; }
  int64_t getOtherBytes() const { return numChunks * otherRows * kChunkBytes; }
  /// Of one plane.
  int64_t getOwnValueBytes() const { return ownRows * valueWidth * 2; }
  int64_t getOtherValueBytes() const { return otherRows * valueWidth * 2; }
  int64_t getPairBytes() const { return ownRows * otherRows * 2; }
  int64_t getSumBytes() const { return ownRows * sharing * 4; }
  int64_t getBytes() const {
    return getOwnBytes() + getOtherBytes() + ownPlanes * getOwnValueBytes() +
           otherPlanes * getOtherValueBytes() +
           kPlanes * (hasDv ? 2 : 1) * getPairBytes() + getSumBytes();
  }
  /// Groups of 16 features, and of 16 columns, whose sums a warp has.
  int64_t getFeatureGroups() const {
    return llvm::divideCeil(llvm::divideCeil(numFeatures, 16), sharing);
  }
  int64_t getColumnGroups() const {
    return hasDv ? llvm::divideCeil(valueWidth / 16, sharing) : 0;
  }
};
} // namespace

static ShapedType getShaped(Value value) {
  return cast<ShapedType>(value.getType());
}

static std::optional<SweepPlan> makePlan(MixSweep sweep, int64_t sharedBytes) {
  SweepPlan plan;
  Value own = sweep.getOwn(), other = sweep.getOther();
  plan.numFeatures = getShaped(own).getDimSize(3);
  constexpr int64_t unit = kUnitBytes / 2;
  if (!getShaped(own).getElementType().isBF16() ||
      !getShaped(other).getElementType().isBF16() ||
      ShapedType::isDynamic(plan.numFeatures) || plan.numFeatures % unit != 0 ||
      !hasWholeRows(own) || !hasWholeRows(other))
    return std::nullopt;
  plan.numChunks = llvm::divideCeil(plan.numFeatures, kChunk);
  plan.numColumns = sweep.v ? getShaped(sweep.v).getDimSize(2) : 0;
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

namespace {
/// What a thread knows of one of its rows, on either side.
struct RowFacts {
  /// The row, or the last one, and its position among the other side's rows.
  Value place, position;
  /// Whether the row exists, and whether it is not masked either.
  Value exists, isReal;
  Value level;
  /// Of a query.
  Value lse, delta;
  /// Of a key.
  Value bias;
};

class TensorSweep {
public:
  TensorSweep(WarpBuilder &b, MixSweep sweep, const SweepPlan &plan);

  void emit();

private:
  // Shared memory.
  void copyRows(Value memref, Value shared, int64_t numRows, Value first,
                Value count, Value mask);
  void copyValues(Value memref, Value shared, int64_t numRows, int64_t planes,
                  Value first, Value count, Value mask);
  Value isReal(Value row, Value count, Value mask);

  // Pairs.
  Fragment multiplyFeatures();
  Fragment multiplyValues();
  RowFacts getFacts(bool isQuery, Value row);
  Value getVisible(const RowFacts &query, const RowFacts &key);
  Value getLogit(Value product, const RowFacts &query, const RowFacts &key);
  void weigh(Value firstOther, MutableArrayRef<Value> totals);
  void storePair(Value low, Value high, int64_t row, int64_t fragment,
                 Value base);
  void storeBiasGradient(const RowFacts &query, const RowFacts &key,
                         Value gradient);

  // Gradients.
  void addProducts(Value weights, Value rows, int64_t numRowPlanes,
                   int64_t planeBytes, bool areFeatures,
                   MutableArrayRef<Value> sums);
  std::pair<Value, Value> getOtherRange();
  void emitTile();
  void storeGradient(ArrayRef<Value> sums, Value out, int64_t groups,
                     int64_t width, double scale);
  void storeTotals(ArrayRef<Value> totals);

  /// The place of a matrix's row of `lane` in rows of shared memory.
  Value leftRow() { return b.rem(lane, 16); }

  WarpBuilder &b;
  MixSweep sweep;
  MixLogitsOpInterface op;
  const SweepPlan plan;
  Value thread, lane;
  /// The warp's places in the grid of warps.
  Value rowWarp, sharer;
  Value own, others, ownValues, otherValues, gradients, weights, partSums;
  Value numOwn, numOthers, origin;
  /// Of the tile that is being emitted.
  Value batch, head, firstRow;
  SmallVector<RowFacts> ownFacts;
};
} // namespace

TensorSweep::TensorSweep(WarpBuilder &b, MixSweep sweep, const SweepPlan &plan)
    : b(b), sweep(sweep), op(sweep.op), plan(plan), thread(b.thread()),
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
  Value unmasked =
      memref::LoadOp::create(b, mask, ValueRange{batch, b.min(row, last)});
  return b.both(exists, unmasked);
}

/// Starts copying the features of `numRows` rows, chunk by chunk; zeros for
/// masked rows and for what lies behind the last row or feature.
void TensorSweep::copyRows(Value memref, Value shared, int64_t numRows,
                           Value first, Value count, Value mask) {
  constexpr int64_t units = kChunkBytes / kUnitBytes;
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
        b.mul(b.min(row, last), b.index(2 * plan.numFeatures)));
    Value from = b.at(base, offset);
    Value to = b.at(shared, b.swizzle(place, unit, kChunkBytes));
    b.loop(zero, b.index(plan.numChunks), 1, [&](Value chunk) {
      Value column = b.add(b.mul(b.toI32(chunk), b.i32(kChunkBytes)),
                           b.mul(unit, b.i32(kUnitBytes)));
      Value isFeature = b.less(column, b.i32(2 * plan.numFeatures));
      Value chunkBytes = b.mul(b.toI32(chunk), b.i32(numRows * kChunkBytes));
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
  b.loop(b.toIndex(thread), b.index(numRows * units), kThreads,
         [&](Value number) {
           Value row = b.div(b.toI32(number), units);
           Value unit = b.rem(b.toI32(number), units);
           Value token = b.add(first, b.toIndex(row));
           Value exists = isReal(token, count, mask);
           SmallVector<Value> place{batch};
           if (hasHeads)
             place.push_back(head);
           place.append({b.min(token, b.sub(count, b.index(1))), Value()});
           SmallVector<Value> values;
           for (int64_t i = 0; i < 8; ++i) {
             Value column = b.toIndex(b.add(b.mul(unit, b.i32(8)), b.i32(i)));
             Value isColumn = b.less(column, b.index(plan.numColumns));
             place.back() = b.min(column, b.index(plan.numColumns - 1));
             values.push_back(b.select(b.both(exists, isColumn),
                                       b.loadF32(memref, place), b.f32(0.0)));
           }
           Value to = b.at(shared, b.swizzle(row, unit, 2 * plan.valueWidth));
           b.storeSplit(values, to, planes, planeBytes);
         });
}

//===----------------------------------------------------------------------===//
// Products of rows
//===----------------------------------------------------------------------===//

/// own other^T of the warp's rows, by fragment of 8 other rows.
Fragment TensorSweep::multiplyFeatures() {
  Value ownRow = b.add(b.mul(rowWarp, b.i32(16)), leftRow());
  Value otherRow = b.add(b.mul(b.div(lane, 16), b.i32(8)), b.rem(lane, 8));
  otherRow = b.add(otherRow, b.mul(sharer, b.i32(16 * plan.pieces)));
  Value ownUnit = b.div(lane, 16), otherUnit = b.rem(b.div(lane, 8), 2);
  SmallVector<Value> totals = b.loop(
      b.index(0), b.index(plan.numChunks), 1,
      SmallVector<Value>(8 * plan.pieces, b.f32(0.0)),
      [&](Value iteration, ValueRange old) -> SmallVector<Value> {
        Value chunk = b.toI32(iteration);
        Value left = b.at(own, b.mul(chunk, b.i32(plan.ownRows * kChunkBytes)));
        Value right =
            b.at(others, b.mul(chunk, b.i32(plan.otherRows * kChunkBytes)));
        Fragment sums(2 * plan.pieces, SmallVector<Value>(4, b.f32(0.0)));
        for (int64_t step = 0; step < kChunk / 16; ++step) {
          auto load = [&](Value base, Value row, Value unit) {
            unit = b.add(unit, b.i32(2 * step));
            return b.loadMatrices(b.at(base, b.swizzle(row, unit, kChunkBytes)),
                                  /*transpose=*/false);
          };
          SmallVector<Value> a = load(left, ownRow, ownUnit);
          for (int64_t piece = 0; piece < plan.pieces; ++piece) {
            SmallVector<Value> rows =
                load(right, b.add(otherRow, b.i32(16 * piece)), otherUnit);
            for (int64_t i = 0; i < 2; ++i)
              sums[2 * piece + i] =
                  b.multiplyAdd(a, ArrayRef(rows).slice(2 * i, 2),
                                sums[2 * piece + i], b.getBF16Type());
          }
        }
        SmallVector<Value> next(old);
        for (auto [i, value] : llvm::enumerate(next))
          value = b.add(value, sums[i / 4][i % 4]);
        return next;
      });
  Fragment products;
  for (int64_t i = 0; i < 2 * plan.pieces; ++i)
    products.emplace_back(ArrayRef(totals).slice(4 * i, 4));
  return products;
}

/// The products of the values' rows: dmixed v^T, or its transpose.
Fragment TensorSweep::multiplyValues() {
  Fragment sums(2 * plan.pieces, SmallVector<Value>(4, b.f32(0.0)));
  if (!sweep.v)
    return sums;
  int64_t rowBytes = 2 * plan.valueWidth;
  Value ownRow = b.add(b.mul(rowWarp, b.i32(16)), leftRow());
  Value otherRow = b.add(b.mul(b.div(lane, 16), b.i32(8)), b.rem(lane, 8));
  otherRow = b.add(otherRow, b.mul(sharer, b.i32(16 * plan.pieces)));
  SmallVector<Value> carried(8 * plan.pieces, b.f32(0.0));
  SmallVector<Value> totals = b.loop(
      b.index(0), b.index(plan.valueWidth / 16), 1, carried,
      [&](Value iteration, ValueRange old) -> SmallVector<Value> {
        Value firstUnit = b.mul(b.toI32(iteration), b.i32(2));
        auto load = [&](Value base, int64_t offset, Value row, Value unit) {
          unit = b.add(firstUnit, unit);
          return b.loadMatrices(
              b.at(b.at(base, b.swizzle(row, unit, rowBytes)), offset),
              /*transpose=*/false);
        };
        SmallVector<SmallVector<Value>> left;
        for (int64_t plane = 0; plane < plan.ownPlanes; ++plane)
          left.push_back(load(ownValues, plane * plan.getOwnValueBytes(),
                              ownRow, b.div(lane, 16)));
        SmallVector<Value> next(old);
        for (int64_t piece = 0; piece < plan.pieces; ++piece)
          // The smaller products first.
          for (int64_t plane = plan.otherPlanes - 1; plane >= 0; --plane) {
            SmallVector<Value> right = load(
                otherValues, plane * plan.getOtherValueBytes(),
                b.add(otherRow, b.i32(16 * piece)), b.rem(b.div(lane, 8), 2));
            int64_t most = std::min(plan.ownPlanes, kPlanes - plane);
            for (int64_t part = most - 1; part >= 0; --part)
              for (int64_t i = 0; i < 2; ++i) {
                MutableArrayRef<Value> sum =
                    MutableArrayRef(next).slice(8 * piece + 4 * i, 4);
                llvm::copy(b.multiplyAdd(left[part],
                                         ArrayRef(right).slice(2 * i, 2),
                                         ValueRange(sum), b.getBF16Type()),
                           sum.begin());
              }
          }
        return next;
      });
  for (auto [i, value] : llvm::enumerate(totals))
    sums[i / 4][i % 4] = value;
  return sums;
}

//===----------------------------------------------------------------------===//
// Pairs
//===----------------------------------------------------------------------===//

RowFacts TensorSweep::getFacts(bool isQuery, Value row) {
  RowFacts facts;
  bool isOwn = isQuery == sweep.ofQueries;
  Value count = isOwn ? numOwn : numOthers;
  facts.place = b.min(row, b.sub(count, b.index(1)));
  facts.position = isOwn ? b.add(row, origin) : row;
  facts.exists = b.less(row, count);
  facts.isReal =
      isReal(row, count, isQuery ? op.getQueryMask() : op.getKeyMask());
  if (Value level = isQuery ? op.getQueryLevel() : op.getKeyLevel())
    facts.level = b.loadF32(level, {batch, facts.place});
  if (!isQuery) {
    if (op.getKeyBias())
      facts.bias = b.loadF32(op.getKeyBias(), {batch, head, facts.place});
    return facts;
  }
  facts.lse = b.loadF32(sweep.lse, {batch, head, facts.place});
  facts.delta = b.loadF32(sweep.delta, {batch, head, facts.place});
  // A query that sees nothing.
  facts.isReal = b.both(facts.isReal, b.compare(CmpFPredicate::UNE, facts.lse,
                                                b.infinity(/*negative=*/true)));
  return facts;
}

/// Whether the query sees the key (docs/Spec.md, Visibility).
Value TensorSweep::getVisible(const RowFacts &query, const RowFacts &key) {
  Value visible = b.both(query.isReal, key.isReal);
  auto require = [&](Value holds) { visible = b.both(visible, holds); };
  if (op.getCausal())
    require(b.compare(CmpIPredicate::sle, key.position, query.position));
  if (op.getExcludeSelf())
    require(b.compare(CmpIPredicate::ne, key.position, query.position));
  if (std::optional<int64_t> reach = getReach(op))
    require(b.compare(CmpIPredicate::sgt, key.position,
                      b.sub(query.position, b.index(*reach))));
  if (query.level)
    require(b.compare(CmpFPredicate::OLE, key.level, query.level));
  return visible;
}

Value TensorSweep::getLogit(Value product, const RowFacts &query,
                            const RowFacts &key) {
  Value x = b.mul(product, b.f32(op.getScale().convertToDouble()));
  if (key.bias)
    x = b.add(x, key.bias);
  if (Value bias = op.getBias()) {
    Value zero = b.index(0);
    x = b.add(x, b.loadF32(bias, {isBiasShared(bias, 0) ? zero : batch,
                                  isBiasShared(bias, 1) ? zero : head,
                                  query.place, key.place}));
  }
  return x;
}

/// dbias = dx, or, from the second of the rows that share a bias on, dbias +=
/// dx: a place belongs to one lane.
void TensorSweep::storeBiasGradient(const RowFacts &query, const RowFacts &key,
                                    Value gradient) {
  Value zero = b.index(0), isFirst = b.i1(true);
  SmallVector<Value> place{batch, head, query.place, key.place};
  for (int64_t dim = 0; dim < 2; ++dim)
    if (isBiasShared(sweep.dbias, dim)) {
      Value isZero = b.compare(CmpIPredicate::eq, place[dim], zero);
      isFirst = b.both(isFirst, isZero);
      place[dim] = zero;
    }
  b.ifThen(b.both(query.exists, key.exists), [&] {
    b.ifThen(isFirst,
             [&] { memref::StoreOp::create(b, gradient, sweep.dbias, place); });
    b.ifThen(b.no(isFirst), [&] {
      Value old = memref::LoadOp::create(b, sweep.dbias, place);
      memref::StoreOp::create(b, b.add(old, gradient), sweep.dbias, place);
    });
  });
}

/// Writes two neighbouring pairs of the thread as planes.
void TensorSweep::storePair(Value low, Value high, int64_t row,
                            int64_t fragment, Value base) {
  Value place =
      b.add(b.mul(rowWarp, b.i32(16)), b.add(b.div(lane, 4), b.i32(8 * row)));
  Value unit = b.add(b.mul(sharer, b.i32(2 * plan.pieces)), b.i32(fragment));
  Value at = b.at(base, b.swizzle(place, unit, 2 * plan.otherRows));
  at = b.at(at, b.mul(b.rem(lane, 4), b.i32(4)));
  for (auto [plane, packed] : llvm::enumerate(b.splitBF16(low, high, kPlanes)))
    b.store(packed, b.at(at, plane * plan.getPairBytes()), /*alignment=*/4);
}

/// Computes A and dx of the warp's pairs, brings them to shared memory, and
/// adds dx to the totals of the thread's two rows.
void TensorSweep::weigh(Value firstOther, MutableArrayRef<Value> totals) {
  Fragment products = multiplyFeatures(), values = multiplyValues();
  Value zero = b.f32(0.0);
  for (int64_t fragment = 0; fragment < 2 * plan.pieces; ++fragment) {
    SmallVector<RowFacts> facts;
    for (int64_t i = 0; i < 2; ++i) {
      Value place = b.add(b.mul(sharer, b.i32(16 * plan.pieces)),
                          b.mul(b.rem(lane, 4), b.i32(2)));
      place = b.add(place, b.i32(8 * fragment + i));
      facts.push_back(
          getFacts(!sweep.ofQueries, b.add(firstOther, b.toIndex(place))));
    }
    for (int64_t row = 0; row < 2; ++row) {
      SmallVector<Value> as, dxs;
      for (int64_t i = 0; i < 2; ++i) {
        const RowFacts &mine = ownFacts[row], &theirs = facts[i];
        const RowFacts &query = sweep.ofQueries ? mine : theirs;
        const RowFacts &key = sweep.ofQueries ? theirs : mine;
        Value x = getLogit(products[fragment][2 * row + i], query, key);
        Value a =
            b.select(getVisible(query, key), b.exp(b.sub(x, query.lse)), zero);
        Value dx = b.mul(a, b.sub(values[fragment][2 * row + i], query.delta));
        dx = b.select(b.compare(CmpFPredicate::OEQ, a, zero), zero, dx);
        if (sweep.dbias)
          storeBiasGradient(query, key, dx);
        totals[row] = b.add(totals[row], dx);
        as.push_back(a);
        dxs.push_back(dx);
      }
      storePair(dxs[0], dxs[1], row, fragment, gradients);
      if (plan.hasDv)
        storePair(as[0], as[1], row, fragment, weights);
    }
  }
}

//===----------------------------------------------------------------------===//
// Gradients
//===----------------------------------------------------------------------===//

/// sums += weights rows, where the planes of `weights` are pairs and `rows` are
/// the features, in chunks, or planes of values, of the other side.
void TensorSweep::addProducts(Value weights, Value rows, int64_t numRowPlanes,
                              int64_t planeBytes, bool areFeatures,
                              MutableArrayRef<Value> sums) {
  int64_t groups = sums.size() / 8;
  int64_t rowBytes = areFeatures ? kChunkBytes : 2 * plan.valueWidth;
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
            Value chunk = b.div(group, kChunk / 16);
            base =
                b.at(rows, b.mul(chunk, b.i32(plan.otherRows * kChunkBytes)));
            group = b.rem(group, kChunk / 16);
          } else {
            group = b.min(group, b.i32(plan.valueWidth / 16 - 1));
          }
          Value unit = b.add(b.mul(group, b.i32(2)), b.div(lane, 16));
          Value place = b.at(base, b.swizzle(otherRow, unit, rowBytes));
          for (int64_t plane = numRowPlanes - 1; plane >= 0; --plane) {
            SmallVector<Value> right = b.loadMatrices(
                b.at(place, plane * planeBytes), /*transpose=*/true);
            for (int64_t part = kPlanes - plane - 1; part >= 0; --part)
              for (int64_t j = 0; j < 2; ++j) {
                MutableArrayRef<Value> sum =
                    MutableArrayRef(next).slice(8 * i + 4 * j, 4);
                llvm::copy(b.multiplyAdd(left[part],
                                         ArrayRef(right).slice(2 * j, 2),
                                         ValueRange(sum), b.getBF16Type()),
                           sum.begin());
              }
          }
        }
        return next;
      });
  llvm::copy(next, sums.begin());
}

/// The other rows that may form a visible pair with the tile, [begin, end);
/// begin is a multiple of a tile.
std::pair<Value, Value> TensorSweep::getOtherRange() {
  Value begin = b.index(0), end = numOthers, zero = b.index(0);
  Value position = b.add(origin, firstRow);
  Value rows = b.index(plan.ownRows);
  std::optional<int64_t> reach = getReach(op);
  auto startAt = [&](Value first) {
    first = b.maxInt(first, zero);
    begin = b.sub(first, b.op<arith::RemUIOp>(first, b.index(plan.otherRows)));
  };
  if (sweep.ofQueries) {
    if (op.getCausal())
      end = b.min(end, b.add(position, rows));
    if (reach)
      startAt(b.sub(position, b.index(*reach - 1)));
  } else {
    if (op.getCausal())
      startAt(position);
    if (reach)
      end = b.min(end, b.add(b.add(position, rows), b.index(*reach)));
  }
  return {begin, end};
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
  auto [begin, end] = getOtherRange();
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
