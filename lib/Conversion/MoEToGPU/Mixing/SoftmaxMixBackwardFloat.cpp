//===- SoftmaxMixBackwardFloat.cpp - The gradient on the float units ------===//
//
// Serves any element types. A warp takes a row and goes over the columns 32 at
// a time,
//
//   lane t   A = exp(x - lse), dx = A (dmixed . v - delta)   of the t-th pair
//   lane l   row gradient_l += dx_t column_l                 t = 0, 1, .. 31
//
// with features l, l + 32, ... in lane l. No pair is stored, unless the
// gradient of the pairs' own biases is asked for: memory is linear in the
// number of tokens. The order of every sum depends on nothing but the position
// of the column, and of the batch and head where they share a bias: one warp
// takes the rows that do, one after the other. Rows are read through the
// caches, not staged.
//
//===----------------------------------------------------------------------===//

#include "MixEmitter.h"
#include "SoftmaxMixBackward.h"

#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

static int64_t getWidth(Value rows) {
  return cast<ShapedType>(rows.getType()).getShape().back();
}

//===----------------------------------------------------------------------===//
// One row
//===----------------------------------------------------------------------===//

namespace {
/// A sum over the columns, `[b, h, column, width]`, into a destination.
struct WeightedSum {
  Value columns, out;
  /// Whether columns are weighted by dx, or by A.
  bool byGradient;
  double scale;
};

/// Emits the gradient of a row by a warp.
class WarpGradient {
public:
  WarpGradient(ThreadBuilder &b, MixGradient mix)
      : b(b), op(mix.op), ofQueries(mix.ofQueries), lse(mix.lse),
        delta(mix.delta), v(mix.v), dmixed(mix.dmixed), origin(mix.origin),
        total(mix.total), dbias(mix.dbias),
        logits(mix.op, /*isTransposed=*/!mix.ofQueries) {
    sums.push_back(
        {mix.getColumns(), mix.gradient, /*byGradient=*/true, mix.scale});
    if (mix.dv)
      sums.push_back({dmixed, mix.dv, /*byGradient=*/false, /*scale=*/1.0});
  }

  void emit(Workers workers);

private:
  struct Pair {
    Value weight, gradient;
  };

  void emitRow();
  SmallVector<Value> takeColumns(Value first, ValueRange carried);
  Pair getPair(Value column);
  PairTerms getTerms(Value column, Value exists);
  Value dot(Value lhs, ArrayRef<Value> lhsRow, Value rhs,
            ArrayRef<Value> rhsRow);
  void addColumn(Value column, Value weight, const WeightedSum &sum,
                 MutableArrayRef<Value> slots);
  int64_t getNumSlots(const WeightedSum &sum) {
    return llvm::divideCeil(getWidth(sum.out), kWarpSize);
  }
  /// The feature of slot `slot`, and whether there is such a feature.
  std::pair<Value, Value> getFeature(const WeightedSum &sum, int64_t slot);

  ThreadBuilder &b;
  MixLogitsOpInterface op;
  bool ofQueries;
  Value lse, delta, v, dmixed, origin;
  SmallVector<WeightedSum> sums;
  /// The destinations of the sums of dx and of dx; null if there are none.
  Value total, dbias;
  const PairLogits logits;

  Value lane, numColumns;
  /// Of the pair that is being emitted, whose query and key are i and j.
  Value batch, head, row, i, j;
};
} // namespace

/// lhs[lhsRow, ..] . rhs[rhsRow, ..]
Value WarpGradient::dot(Value lhs, ArrayRef<Value> lhsRow, Value rhs,
                        ArrayRef<Value> rhsRow) {
  Value width = memref::DimOp::create(b, lhs, b.index(lhsRow.size()));
  return b.loop(b.index(0), width, 1, ValueRange{b.f32(0.0)},
                [&](Value feature, ValueRange carried) -> SmallVector<Value> {
                  auto load = [&](Value rows, ArrayRef<Value> row) {
                    SmallVector<Value> place(row);
                    place.push_back(feature);
                    return b.loadF32(rows, place);
                  };
                  return {
                      b.fma(load(lhs, lhsRow), load(rhs, rhsRow), carried[0])};
                })[0];
}

/// What the pair of query i and key j is made of.
PairTerms WarpGradient::getTerms(Value column, Value exists) {
  PairTerms pair;
  pair.product = dot(op.getQ(), {batch, head, i}, op.getK(), {batch, head, j});
  if (Value bias = op.getKeyBias())
    pair.biases = {b.loadF32(bias, {batch, head, j})};
  if (Value bias = op.getBias()) {
    pair.biases.resize(1);
    pair.biases.push_back(loadPairBias(b, bias, batch, head, i, j));
  }
  pair.row = b.add(row, origin);
  pair.column = column;
  if (op.getQueryLevel()) {
    pair.rowLevel = b.loadF32(op.getQueryLevel(), {batch, i});
    pair.columnLevel = b.loadF32(op.getKeyLevel(), {batch, j});
    if (!ofQueries)
      std::swap(pair.rowLevel, pair.columnLevel);
  }
  pair.isReal = exists;
  auto require = [&](Value mask, Value token) {
    if (mask)
      pair.isReal =
          b.both(pair.isReal,
                 memref::LoadOp::create(b, mask, ValueRange{batch, token}));
  };
  require(op.getQueryMask(), i);
  require(op.getKeyMask(), j);
  return pair;
}

/// A and dx of the row and a column, which may lie behind the last one.
WarpGradient::Pair WarpGradient::getPair(Value column) {
  Value last = b.sub(numColumns, b.index(1));
  Value exists = b.compare(CmpIPredicate::ult, column, numColumns);
  column = b.op<arith::MinUIOp>(column, last);
  i = ofQueries ? row : column;
  j = ofQueries ? column : row;
  Value zero = b.f32(0.0), hidden = b.negInfinity();
  Value logSum = b.loadF32(lse, {batch, head, i});
  PairTerms pair = getTerms(column, exists);
  Value seen = b.both(logits.isVisible(b, pair),
                      b.compare(CmpFPredicate::UNE, logSum, hidden));
  Value weight =
      b.select(seen, b.exp(b.sub(logits.getLogit(b, pair), logSum)), zero);
  Value product = b.f32(0.0);
  if (v) {
    SmallVector<Value> values{batch, j};
    if (areValuesPerHead(v))
      values.insert(values.begin() + 1, head);
    product = dot(dmixed, {batch, head, i}, v, values);
  }
  Value gradient =
      b.mul(weight, b.sub(product, b.loadF32(delta, {batch, head, i})));
  Value isZero = b.compare(CmpFPredicate::OEQ, weight, zero);
  return {weight, b.select(isZero, zero, gradient)};
}

std::pair<Value, Value> WarpGradient::getFeature(const WeightedSum &sum,
                                                 int64_t slot) {
  Value feature = b.add(lane, b.index(slot * kWarpSize));
  Value width = b.index(getWidth(sum.out));
  Value exists = b.compare(CmpIPredicate::ult, feature, width);
  Value last = b.index(getWidth(sum.out) - 1);
  return {b.op<arith::MinUIOp>(feature, last), exists};
}

/// slots += weight * column. What a column of weight 0 holds is not looked at:
/// it may be masked (E11).
void WarpGradient::addColumn(Value column, Value weight, const WeightedSum &sum,
                             MutableArrayRef<Value> slots) {
  Value isNone = b.compare(CmpFPredicate::OEQ, weight, b.f32(0.0));
  for (auto [slot, acc] : llvm::enumerate(slots)) {
    Value feature = getFeature(sum, slot).first;
    Value value = b.loadF32(sum.columns, {batch, head, column, feature});
    acc = b.select(isNone, acc, b.fma(weight, value, acc));
  }
}

/// Folds the columns first, first + 1, ... first + 31.
SmallVector<Value> WarpGradient::takeColumns(Value first, ValueRange carried) {
  Pair pair = getPair(b.add(first, lane));
  if (dbias) {
    Value column = b.add(first, lane);
    storeBiasGradient(b, dbias, {batch, head, row, column},
                      b.compare(CmpIPredicate::ult, column, numColumns),
                      pair.gradient);
  }
  Value count =
      b.op<arith::MinUIOp>(b.sub(numColumns, first), b.index(kWarpSize));
  SmallVector<Value> state = b.loop(
      b.index(0), count, 1, carried.drop_back(),
      [&](Value place, ValueRange carried) {
        Value source = b.toI32(place), column = b.add(first, place);
        SmallVector<Value> slots(carried);
        MutableArrayRef<Value> rest(slots);
        for (const WeightedSum &sum : sums) {
          Value weight = b.shuffleFrom(
              sum.byGradient ? pair.gradient : pair.weight, source);
          addColumn(column, weight, sum, rest.take_front(getNumSlots(sum)));
          rest = rest.drop_front(getNumSlots(sum));
        }
        return slots;
      });
  state.push_back(b.add(carried.back(), pair.gradient));
  return state;
}

void WarpGradient::emitRow() {
  int64_t numSlots = 1;
  for (const WeightedSum &sum : sums)
    numSlots += getNumSlots(sum);
  SmallVector<Value> state = b.loop(b.index(0), numColumns, kWarpSize,
                                    SmallVector<Value>(numSlots, b.f32(0.0)),
                                    [&](Value first, ValueRange carried) {
                                      return takeColumns(first, carried);
                                    });
  ArrayRef<Value> rest(state);
  for (const WeightedSum &sum : sums) {
    for (int64_t slot = 0; slot < getNumSlots(sum); ++slot) {
      auto [feature, exists] = getFeature(sum, slot);
      Value value = b.mul(rest[slot], b.f32(sum.scale));
      b.ifThen(exists, [&] {
        memref::StoreOp::create(b, value, sum.out,
                                ValueRange{batch, head, row, feature});
      });
    }
    rest = rest.drop_front(getNumSlots(sum));
  }
  if (!total)
    return;
  Value sum = b.reduceLanes(rest.front(), kWarpSize,
                            [&](Value x, Value y) { return b.add(x, y); });
  b.ifThen(b.compare(CmpIPredicate::eq, lane, b.index(0)), [&] {
    memref::StoreOp::create(b, sum, total, ValueRange{batch, head, row});
  });
}

void WarpGradient::emit(Workers workers) {
  auto getNumTokens = [&](Value rows) -> Value {
    return memref::DimOp::create(b, rows, b.index(2));
  };
  numColumns = getNumTokens(ofQueries ? op.getK() : op.getQ());
  if (!origin)
    origin = b.sub(numColumns, getNumTokens(ofQueries ? op.getQ() : op.getK()));
  lane = b.op<arith::RemUIOp>(workers.thread, b.index(kWarpSize));
  Value warp = b.op<arith::DivUIOp>(workers.thread, b.index(kWarpSize));
  // A row of biases is a warp's, and so are all rows that share it.
  Value out = sums.front().out;
  auto getSize = [&](int64_t dim) -> Value {
    return memref::DimOp::create(b, out, b.index(dim));
  };
  Value one = b.index(1);
  bool sharesBatch = dbias && isBiasShared(dbias, 0);
  bool sharesHead = dbias && isBiasShared(dbias, 1);
  Value numBatches = sharesBatch ? one : getSize(0);
  Value numHeads = sharesHead ? one : getSize(1), numRows = getSize(2);
  Value numUnits = b.mul(b.mul(numBatches, numHeads), numRows);
  b.loop(warp, numUnits, workers.count / kWarpSize, [&](Value unit) {
    row = b.op<arith::RemUIOp>(unit, numRows);
    Value rest = b.op<arith::DivUIOp>(unit, numRows);
    auto forEach = [&](Value first, bool isWhole, int64_t dim,
                       function_ref<void(Value)> body) {
      if (isWhole)
        b.loop(b.index(0), getSize(dim), 1, body);
      else
        body(first);
    };
    forEach(b.op<arith::DivUIOp>(rest, numHeads), sharesBatch, 0, [&](Value i) {
      batch = i;
      forEach(b.op<arith::RemUIOp>(rest, numHeads), sharesHead, 1,
              [&](Value j) {
                head = j;
                emitRow();
              });
    });
  });
}

void mlir::moe::emitGradientOnFloatUnits(WarpBuilder &b, MixGradient mix,
                                         Workers workers) {
  WarpGradient(b, mix).emit(workers);
}
