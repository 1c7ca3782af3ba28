//===- SoftmaxMixBackward.cpp - The gradient of softmax_mix to threads ----===//
//
// bf16 and f16 queries and keys go to the tensor cores
// (SoftmaxMixBackwardTensor.h).
// Here a warp takes a row of its own side and goes over the rows of the other
// side 32 at a time,
//
//   lane t   A = exp(x - lse), dx = A (dmixed . v - delta)   of the t-th pair
//   lane l   own gradient_l += dx_t other_l                  t = 0, 1, .. 31
//
// with features l, l + 32, ... in lane l. No pair is stored, unless the
// gradient of the pairs' own biases is asked for: memory is linear in the
// number of tokens. The order of every sum depends on nothing but the position
// of the other row, and of the batch and head where they share a bias: one warp
// takes the rows that do, one after the other. Rows are read through the
// caches, not staged.
//
//===----------------------------------------------------------------------===//

#include "SoftmaxMixBackward.h"
#include "KernelFacts.h"
#include "SoftmaxMix.h"
#include "ThreadLowerings.h"

#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

/// The widest rows that the registers of a warp accumulate.
static constexpr int64_t kMaxFeatures = 1024;

static int64_t getWidth(Value rows) {
  return cast<ShapedType>(rows.getType()).getShape().back();
}

MixSweep::MixSweep(SoftmaxMixBackwardDqOp op)
    : op(op), ofQueries(true), lse(op.getLse()), delta(op.getDelta()),
      v(op.getV()), dmixed(op.getDmixed()), origin(op.getOrigin()),
      scale(op.getScale().convertToDouble()), gradient(op.getOut("dq")),
      total(op.getWithSums() ? op.getOut("sums") : Value()),
      dbias(op.getWithDbias() ? op.getOut("dbias") : Value()) {}

MixSweep::MixSweep(SoftmaxMixBackwardDkvOp op)
    : op(op), ofQueries(false), lse(op.getLse()), delta(op.getDelta()),
      v(op.getV()), dmixed(op.getDmixed()), origin(op.getOrigin()),
      scale(op.getScale().convertToDouble()), gradient(op.getOut("dk")),
      dv(op.getV() ? op.getOut("dv") : Value()),
      total(op.getWithSums() ? op.getOut("sums") : Value()) {}

//===----------------------------------------------------------------------===//
// One row
//===----------------------------------------------------------------------===//

namespace {
/// A sum of rows of the other side, `[b, h, other, width]`, into a destination.
struct WeightedSum {
  Value rows, out;
  /// Whether rows are weighted by dx, or by A.
  bool byGradient;
  double scale;
};

/// Emits the sweep of a warp.
class Sweep {
public:
  Sweep(ThreadBuilder &b, MixSweep sweep)
      : b(b), op(sweep.op), ofQueries(sweep.ofQueries), lse(sweep.lse),
        delta(sweep.delta), v(sweep.v), dmixed(sweep.dmixed),
        origin(sweep.origin), total(sweep.total), dbias(sweep.dbias),
        logits(sweep.op, /*isTransposed=*/!sweep.ofQueries) {
    sums.push_back(
        {sweep.getOther(), sweep.gradient, /*byGradient=*/true, sweep.scale});
    if (sweep.dv)
      sums.push_back({dmixed, sweep.dv, /*byGradient=*/false, /*scale=*/1.0});
  }

  void emit(Workers workers);

private:
  struct Pair {
    Value weight, gradient;
  };

  void emitRow();
  SmallVector<Value> takeOthers(Value first, ValueRange carried);
  Pair getPair(Value other);
  PairTerms getTerms(Value other, Value exists);
  Value dot(Value lhs, ArrayRef<Value> lhsRow, Value rhs,
            ArrayRef<Value> rhsRow);
  void addRow(Value other, Value weight, const WeightedSum &sum,
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

  Value lane, numOthers;
  /// Of the pair that is being emitted: query and key.
  Value batch, head, own, i, j;
};
} // namespace

/// lhs[lhsRow, ..] . rhs[rhsRow, ..]
Value Sweep::dot(Value lhs, ArrayRef<Value> lhsRow, Value rhs,
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
PairTerms Sweep::getTerms(Value other, Value exists) {
  PairTerms pair;
  pair.product = dot(op.getQ(), {batch, head, i}, op.getK(), {batch, head, j});
  if (Value bias = op.getKeyBias())
    pair.biases = {b.loadF32(bias, {batch, head, j})};
  if (Value bias = op.getBias()) {
    pair.biases.resize(1);
    pair.biases.push_back(loadPairBias(b, bias, batch, head, i, j));
  }
  pair.row = b.add(own, origin);
  pair.column = other;
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

/// A and dx of the own row and row `other`, which may lie behind the last one.
Sweep::Pair Sweep::getPair(Value other) {
  Value last = b.sub(numOthers, b.index(1));
  Value exists = b.compare(CmpIPredicate::ult, other, numOthers);
  other = b.op<arith::MinUIOp>(other, last);
  i = ofQueries ? own : other;
  j = ofQueries ? other : own;
  Value zero = b.f32(0.0), hidden = b.negInfinity();
  Value logSum = b.loadF32(lse, {batch, head, i});
  PairTerms pair = getTerms(other, exists);
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

std::pair<Value, Value> Sweep::getFeature(const WeightedSum &sum,
                                          int64_t slot) {
  Value feature = b.add(lane, b.index(slot * kWarpSize));
  Value width = b.index(getWidth(sum.out));
  Value exists = b.compare(CmpIPredicate::ult, feature, width);
  Value last = b.index(getWidth(sum.out) - 1);
  return {b.op<arith::MinUIOp>(feature, last), exists};
}

/// slots += weight * row `other`. What a row of weight 0 holds is not looked
/// at: it may be masked (E11).
void Sweep::addRow(Value other, Value weight, const WeightedSum &sum,
                   MutableArrayRef<Value> slots) {
  Value isNone = b.compare(CmpFPredicate::OEQ, weight, b.f32(0.0));
  for (auto [slot, acc] : llvm::enumerate(slots)) {
    Value feature = getFeature(sum, slot).first;
    Value value = b.loadF32(sum.rows, {batch, head, other, feature});
    acc = b.select(isNone, acc, b.fma(weight, value, acc));
  }
}

void mlir::moe::storeBiasGradient(ThreadBuilder &b, Value dbias,
                                  SmallVector<Value, 4> place, Value exists,
                                  Value gradient) {
  Value zero = b.index(0), isFirst = b.boolean(true);
  for (int64_t dim = 0; dim < 2; ++dim)
    if (isBiasShared(dbias, dim)) {
      Value isZero = b.compare(CmpIPredicate::eq, place[dim], zero);
      isFirst = b.both(isFirst, isZero);
      place[dim] = zero;
    }
  b.ifThen(exists, [&] {
    b.ifThen(isFirst,
             [&] { memref::StoreOp::create(b, gradient, dbias, place); });
    b.ifThen(b.negate(isFirst), [&] {
      Value old = memref::LoadOp::create(b, dbias, place);
      memref::StoreOp::create(b, b.add(old, gradient), dbias, place);
    });
  });
}

/// Folds the rows first, first + 1, ... first + 31 of the other side.
SmallVector<Value> Sweep::takeOthers(Value first, ValueRange carried) {
  Pair pair = getPair(b.add(first, lane));
  if (dbias) {
    Value other = b.add(first, lane);
    storeBiasGradient(b, dbias, {batch, head, own, other},
                      b.compare(CmpIPredicate::ult, other, numOthers),
                      pair.gradient);
  }
  Value count =
      b.op<arith::MinUIOp>(b.sub(numOthers, first), b.index(kWarpSize));
  SmallVector<Value> state =
      b.loop(b.index(0), count, 1, carried.drop_back(),
             [&](Value place, ValueRange carried) {
               Value source = b.toI32(place), other = b.add(first, place);
               SmallVector<Value> slots(carried);
               MutableArrayRef<Value> rest(slots);
               for (const WeightedSum &sum : sums) {
                 Value weight = b.shuffleFrom(
                     sum.byGradient ? pair.gradient : pair.weight, source);
                 addRow(other, weight, sum, rest.take_front(getNumSlots(sum)));
                 rest = rest.drop_front(getNumSlots(sum));
               }
               return slots;
             });
  state.push_back(b.add(carried.back(), pair.gradient));
  return state;
}

void Sweep::emitRow() {
  int64_t numSlots = 1;
  for (const WeightedSum &sum : sums)
    numSlots += getNumSlots(sum);
  SmallVector<Value> state = b.loop(b.index(0), numOthers, kWarpSize,
                                    SmallVector<Value>(numSlots, b.f32(0.0)),
                                    [&](Value first, ValueRange carried) {
                                      return takeOthers(first, carried);
                                    });
  ArrayRef<Value> rest(state);
  for (const WeightedSum &sum : sums) {
    for (int64_t slot = 0; slot < getNumSlots(sum); ++slot) {
      auto [feature, exists] = getFeature(sum, slot);
      Value value = b.mul(rest[slot], b.f32(sum.scale));
      b.ifThen(exists, [&] {
        memref::StoreOp::create(b, value, sum.out,
                                ValueRange{batch, head, own, feature});
      });
    }
    rest = rest.drop_front(getNumSlots(sum));
  }
  if (!total)
    return;
  Value sum = b.reduceLanes(rest.front(), kWarpSize,
                            [&](Value x, Value y) { return b.add(x, y); });
  b.ifThen(b.compare(CmpIPredicate::eq, lane, b.index(0)), [&] {
    memref::StoreOp::create(b, sum, total, ValueRange{batch, head, own});
  });
}

void Sweep::emit(Workers workers) {
  auto getNumTokens = [&](Value rows) -> Value {
    return memref::DimOp::create(b, rows, b.index(2));
  };
  numOthers = getNumTokens(ofQueries ? op.getK() : op.getQ());
  if (!origin)
    origin = b.sub(numOthers, getNumTokens(ofQueries ? op.getQ() : op.getK()));
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
    own = b.op<arith::RemUIOp>(unit, numRows);
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

//===----------------------------------------------------------------------===//
// Patterns
//===----------------------------------------------------------------------===//

static bool fitsRegisters(ArrayRef<Value> rows) {
  return llvm::all_of(rows, [](Value row) {
    return !row || (!ShapedType::isDynamic(getWidth(row)) &&
                    getWidth(row) <= kMaxFeatures);
  });
}

static bool hasThreadKernel(SoftmaxMixBackwardDqOp op) {
  return fitsRegisters(op.getOut("dq"));
}

static bool hasThreadKernel(SoftmaxMixBackwardDkvOp op) {
  return fitsRegisters({op.getOut("dk"), op.getOut("dv")});
}

namespace {
template <typename OpTy>
struct SweepToThreads : OpRewritePattern<OpTy> {
  SweepToThreads(MLIRContext *context, BlockShape block)
      : OpRewritePattern<OpTy>(context), block(block) {}

  LogicalResult matchAndRewrite(OpTy op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics() || !hasThreadKernel(op))
      return rewriter.notifyMatchFailure(
          op, "expected buffers, and rows of a static width of at most 1024");
    WarpBuilder b(op.getLoc(), rewriter);
    MixSweep sweep(op);
    if (block.numThreads == kMixThreads &&
        getTensorSweepRows(sweep, block.sharedBytes))
      emitSweepOnTensorCores(b, sweep, block.sharedBytes);
    else
      Sweep(b, sweep).emit(Workers::ofBlock(b, block));
    rewriter.eraseOp(op);
    return success();
  }

  BlockShape block;
};
} // namespace

/// On tensor cores a block goes over all other rows for each tile.
template <typename OpTy>
static std::optional<int64_t> getTileRows(OpTy op, BlockShape block) {
  return getTensorSweepRows(MixSweep(op), block.sharedBytes);
}

void mlir::moe::addSoftmaxMixBackwardFacts(KernelFacts &facts) {
  constexpr StringLiteral requirement =
      "rows of a static width of at most 1024; else memory grows with the "
      "queries times the keys";
  facts.addForms<SoftmaxMixBackwardDqOp>(hasThreadKernel, requirement);
  facts.addForms<SoftmaxMixBackwardDkvOp>(hasThreadKernel, requirement);
  facts.addTileRows(getTileRows<SoftmaxMixBackwardDqOp>);
  facts.addTileRows(getTileRows<SoftmaxMixBackwardDkvOp>);
}

void mlir::moe::populateSoftmaxMixBackwardToThreadsPatterns(
    RewritePatternSet &patterns, BlockShape block) {
  patterns.add<SweepToThreads<SoftmaxMixBackwardDqOp>,
               SweepToThreads<SoftmaxMixBackwardDkvOp>>(patterns.getContext(),
                                                        block);
}
