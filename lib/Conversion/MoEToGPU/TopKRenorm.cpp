//===- TopKRenorm.cpp - topk_renorm to threads ----------------------------===//
//
// A row of scores belongs to a group of neighbouring lanes of one warp. Lane l
// of a group of G holds the experts l, l + G, l + 2G, ... as sortable keys in
// registers, and the k experts come out one a round:
//
//   for rank in 0..k:
//     best = max of all keys of the group        (in registers, then shuffles)
//     the key equal to best becomes 0            (keys are distinct)
//     lane rank % G keeps best in slot rank / G
//
// A key orders values as E1 to E5 say and then indices upwards, so that one
// unsigned comparison decides everything:
//
//   ordered(x) | ~index    ordered maps -inf..+inf to rising integers; NaN is
//                          below -inf, and 0 is below every key
//
// 16-bit scores and their index share 32 bits; f32 choice scores take 64.
// The gates are computed from the scores of the chosen experts, which are read
// again: a slot's expert rarely lies in the lane that keeps it.
//
//===----------------------------------------------------------------------===//

#include "ThreadBuilder.h"
#include "ThreadLowerings.h"

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;
using arith::CmpIPredicate;

//===----------------------------------------------------------------------===//
// Keys
//===----------------------------------------------------------------------===//

namespace {
/// How a choice score and an expert's index share one unsigned integer.
class KeyLayout {
public:
  KeyLayout(TopKRenormOp op, bool choosesByScores) {
    Type element = getElementTypeOrSelf(op.getScores().getType());
    // Widened to f32, a bf16 fills the upper 16 bits and an f16 the upper 19.
    int64_t scoreBits = element.isBF16() ? 16 : element.isF16() ? 19 : 32;
    if (choosesByScores && scoreBits < 32 &&
        op.getNumExperts() <= (int64_t(1) << (32 - scoreBits)))
      indexBits = 32 - scoreBits;
  }

  bool isWide() const { return indexBits == 32; }

  /// The key of no expert, below every expert's.
  Value none(ThreadBuilder &b) const {
    return arith::ConstantOp::create(
        b, b.getIntegerAttr(b.getIntegerType(isWide() ? 64 : 32), 0));
  }

  Value make(ThreadBuilder &b, Value score, Value expert) const {
    Value value = ordered(b, score);
    Value inverted = b.op<arith::XOrIOp>(expert, b.i32(indexMask()));
    if (!isWide()) {
      value = b.both(value, b.i32(~indexMask()));
      return b.either(value, inverted);
    }
    Type i64 = b.getI64Type();
    value = arith::ExtUIOp::create(b, i64, value);
    Value shift = arith::ConstantOp::create(b, b.getI64IntegerAttr(32));
    value = b.op<arith::ShLIOp>(value, shift);
    return b.either(value, arith::ExtUIOp::create(b, i64, inverted));
  }

  Value expertOf(ThreadBuilder &b, Value key) const {
    if (isWide())
      key = arith::TruncIOp::create(b, b.getI32Type(), key);
    return b.both(b.op<arith::XOrIOp>(key, b.i32(indexMask())),
                  b.i32(indexMask()));
  }

  /// Whether the score in a wide key is -inf.
  Value isExcluded(ThreadBuilder &b, Value key) const {
    assert(isWide() && "narrow keys are made of the scores themselves");
    Value shift = arith::ConstantOp::create(b, b.getI64IntegerAttr(32));
    Value value = arith::TruncIOp::create(b, b.getI32Type(),
                                          b.op<arith::ShRUIOp>(key, shift));
    return b.compare(CmpIPredicate::eq, value, b.i32(0x007fffff));
  }

  /// x as an unsigned integer of the same order (E1, E2, E3): the sign bit of a
  /// positive number is set, all bits of a negative one are inverted.
  Value ordered(ThreadBuilder &b, Value x) const {
    // -0 + 0 is +0, so both zeros get one key.
    Value bits =
        arith::BitcastOp::create(b, b.getI32Type(), b.add(x, b.f32(0.0)));
    Value sign = b.op<arith::ShRSIOp>(bits, b.i32(31));
    Value flip = b.either(sign, b.i32(int64_t(1) << 31));
    Value value = b.op<arith::XOrIOp>(bits, flip);
    return b.select(b.isNaN(x), b.i32(isWide() ? 1 : indexMask() + 1), value);
  }

private:
  int64_t indexMask() const { return (int64_t(1) << indexBits) - 1; }

  int64_t indexBits = 32;
};

//===----------------------------------------------------------------------===//
// The form of the selection
//===----------------------------------------------------------------------===//

/// What of topk_renorm's definition an op asks for.
struct Form {
  explicit Form(TopKRenormOp op)
      : function(op.getScoreFunction()),
        choosesByScores(!op.getSelectBias() && op.getNGroup() == 1),
        gatesFromLogits(op.getRenorm() &&
                        op.getEps().convertToDouble() == 0.0 &&
                        (function == ScoreFunction::Softmax ||
                         function == ScoreFunction::Sigmoid)),
        needsRowSoftmax(
            function == ScoreFunction::Softmax &&
            !(gatesFromLogits && (choosesByScores || op.getForced()))) {}

  ScoreFunction function;
  /// The choice scores are the scores as given: the score functions are
  /// monotone, so they need not be computed to choose.
  bool choosesByScores;
  /// The gates are a softmax over the chosen experts of x (softmax) or of
  /// ln sigmoid(x) (sigmoid): nothing under- or overflows.
  bool gatesFromLogits;
  /// The maximum and the sum of exponentials of the whole row are needed.
  bool needsRowSoftmax;
};

/// How many lanes share a row and what each of them holds.
struct LaneShape {
  /// `availableLanes` is how many lanes the block has for each of its rows.
  LaneShape(int64_t numExperts, int64_t numSelected, int64_t availableLanes) {
    // Few lanes mean few shuffles, many mean few registers: at most 16 keys a
    // lane, at least 4 lanes so that a load touches whole sectors, and no
    // fewer lanes than the block has for each of its rows.
    constexpr int64_t minLanes = 4, maxKeys = 16;
    int64_t wanted = std::max<int64_t>(
        {minLanes, availableLanes,
         static_cast<int64_t>(llvm::divideCeil(numExperts, maxKeys))});
    wanted = std::min(wanted, numExperts);
    lanes = std::min<int64_t>(llvm::PowerOf2Ceil(wanted), kWarpSize);
    keysPerLane = llvm::divideCeil(numExperts, lanes);
    slotsPerLane = llvm::divideCeil(numSelected, lanes);
  }

  int64_t lanes;
  int64_t keysPerLane;
  int64_t slotsPerLane;
};

//===----------------------------------------------------------------------===//
// One row
//===----------------------------------------------------------------------===//

/// Emits what one lane does for one row.
class RowSelection {
public:
  RowSelection(ThreadBuilder &b, TopKRenormOp op, LaneShape shape, Value lane)
      : b(b), op(op), form(op), layout(op, form.choosesByScores), shape(shape),
        numExperts(op.getNumExperts()), numSelected(op.getNumSelected()),
        lane(lane) {}

  /// Selects in row `row`; stores only where `isRow` holds.
  void emit(Value row, Value isRow);

private:
  void loadScores();
  void computeRowSoftmax();
  SmallVector<Value> getChoiceScores();
  void dropGroups(MutableArrayRef<Value> choice);
  SmallVector<Value> getGroupValues(ArrayRef<Value> choice);
  /// Condition that key `j` of the lane belongs to the experts of `group`;
  /// null if it cannot.
  Value isInGroup(int64_t j, int64_t group);
  void selectByKeys(ArrayRef<Value> choice);
  void readForced();
  SmallVector<Value> computeGates();
  SmallVector<Value> renormalise(ArrayRef<Value> values, Value floor);
  void storeSlots(ArrayRef<Value> gates, Value isRow);

  /// The score function at x.
  Value score(Value x);
  /// ln sigmoid(x) = min(x, 0) - ln(1 + e^-|x|).
  Value logSigmoid(Value x);
  /// ln(1 + e^-|x|).
  Value log1pExpOfMinusAbs(Value x);
  Value loadScore(Value expert);
  Value maximum(Value lhs, Value rhs) {
    return b.op<arith::MaxNumFOp>(lhs, rhs);
  }
  Value reduceMax(Value x) {
    return b.reduceLanes(x, shape.lanes,
                         [&](Value l, Value r) { return maximum(l, r); });
  }
  Value reduceSum(Value x) {
    return b.reduceLanes(x, shape.lanes,
                         [&](Value l, Value r) { return b.add(l, r); });
  }
  /// -inf becomes 0, so that subtracting it from -inf does not make a NaN.
  Value finiteOrZero(Value x) {
    Value empty = b.compare(CmpFPredicate::OEQ, x, b.infinity(true));
    return b.select(empty, b.f32(0.0), x);
  }
  SmallVector<Value> at(Value memref, int64_t numInner, Value inner);

  ThreadBuilder &b;
  TopKRenormOp op;
  Form form;
  KeyLayout layout;
  LaneShape shape;
  int64_t numExperts, numSelected;
  Value lane, row;

  /// For each key of the lane: its expert, whether the expert exists (null if
  /// it always does), and the expert's score.
  SmallVector<Value> experts, exists, scores;
  /// The row holds a NaN; the maximum and the sum of exponentials of the row.
  Value hasNaN, rowMax, rowSum;
  /// For each slot of the lane: whether it is one of the k (null if always),
  /// the expert, and whether that one has a gate.
  SmallVector<Value> isSlot, chosen, hasGate;
};
} // namespace

SmallVector<Value> RowSelection::at(Value memref, int64_t numInner,
                                    Value inner) {
  SmallVector<Value> indices = getRowIndices(b, memref, numInner, row);
  if (numInner == 1)
    indices.push_back(b.toIndex(inner));
  return indices;
}

Value RowSelection::loadScore(Value expert) {
  return b.loadF32(op.getScores(), at(op.getScores(), 1, expert));
}

void RowSelection::loadScores() {
  Value anyNaN = b.i1(false);
  for (int64_t j = 0; j < shape.keysPerLane; ++j) {
    Value expert = b.add(lane, b.i32(j * shape.lanes));
    Value isExpert;
    if ((j + 1) * shape.lanes > numExperts) {
      isExpert = b.compare(CmpIPredicate::slt, expert, b.i32(numExperts));
      // A lane without an expert reads the last one's score and ignores it.
      expert = b.op<arith::MinSIOp>(expert, b.i32(numExperts - 1));
    }
    experts.push_back(expert);
    exists.push_back(isExpert);
    scores.push_back(loadScore(expert));
    anyNaN = b.either(anyNaN, b.isNaN(scores.back()));
  }
  Value flag = arith::ExtUIOp::create(b, b.getI32Type(), anyNaN);
  flag = b.reduceLanes(flag, shape.lanes,
                       [&](Value l, Value r) { return b.either(l, r); });
  hasNaN = b.compare(CmpIPredicate::ne, flag, b.i32(0));
}

void RowSelection::computeRowSoftmax() {
  if (!form.needsRowSoftmax)
    return;
  Value highest = scores.front();
  for (Value x : ArrayRef(scores).drop_front())
    highest = maximum(highest, x);
  rowMax = finiteOrZero(reduceMax(highest));
  rowSum = b.f32(0.0);
  for (auto [x, isExpert] : llvm::zip_equal(scores, exists)) {
    Value weight = b.exp(b.op<arith::SubFOp>(x, rowMax));
    if (isExpert)
      weight = b.select(isExpert, weight, b.f32(0.0));
    rowSum = b.add(rowSum, weight);
  }
  rowSum = reduceSum(rowSum);
}

//===----------------------------------------------------------------------===//
// Choice scores
//===----------------------------------------------------------------------===//

Value RowSelection::log1pExpOfMinusAbs(Value x) {
  Value minusAbs =
      b.op<arith::MinNumFOp>(x, b.op<arith::SubFOp>(b.f32(0.0), x));
  return b.log1p(b.exp(minusAbs));
}

Value RowSelection::logSigmoid(Value x) {
  return b.op<arith::SubFOp>(b.op<arith::MinNumFOp>(x, b.f32(0.0)),
                             log1pExpOfMinusAbs(x));
}

Value RowSelection::score(Value x) {
  switch (form.function) {
  case ScoreFunction::None:
    return x;
  case ScoreFunction::Sigmoid: {
    Value decay = b.exp(b.op<arith::SubFOp>(b.f32(0.0), x));
    return b.op<arith::DivFOp>(b.f32(1.0), b.add(b.f32(1.0), decay));
  }
  case ScoreFunction::Softmax: {
    Value weight = b.exp(b.op<arith::SubFOp>(x, rowMax));
    Value isEmpty = b.compare(CmpFPredicate::OEQ, rowSum, b.f32(0.0));
    return b.op<arith::DivFOp>(weight, b.select(isEmpty, b.f32(1.0), rowSum));
  }
  case ScoreFunction::SqrtSoftplus: {
    // ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|).
    return b.sqrt(b.add(maximum(x, b.f32(0.0)), log1pExpOfMinusAbs(x)));
  }
  }
  llvm_unreachable("unknown score function");
}

SmallVector<Value> RowSelection::getChoiceScores() {
  if (form.choosesByScores)
    return scores;
  SmallVector<Value> choice;
  for (auto [x, expert] : llvm::zip_equal(scores, experts)) {
    Value c = score(x);
    if (Value bias = op.getSelectBias())
      c = b.add(c, b.loadF32(bias, b.toIndex(expert)));
    choice.push_back(c);
  }
  if (op.getNGroup() > 1)
    dropGroups(choice);
  return choice;
}

Value RowSelection::isInGroup(int64_t j, int64_t group) {
  int64_t size = numExperts / op.getNGroup();
  int64_t first = j * shape.lanes, last = first + shape.lanes - 1;
  int64_t begin = group * size, end = begin + size;
  if (last < begin || first >= end)
    return {};
  if (first >= begin && last < end)
    return b.i1(true);
  Value expert = b.add(lane, b.i32(first));
  return b.both(b.compare(CmpIPredicate::sge, expert, b.i32(begin)),
                b.compare(CmpIPredicate::slt, expert, b.i32(end)));
}

/// The value of each group, the same in all lanes. A NaN counts as -inf here:
/// the gates of its row are NaN whatever is selected.
SmallVector<Value> RowSelection::getGroupValues(ArrayRef<Value> choice) {
  int64_t numGroups = op.getNGroup();
  bool sumsTwo =
      op.getGroupScore() == GroupScore::Top2Sum && numExperts / numGroups > 1;
  Value lowest = b.infinity(true);
  SmallVector<Value> values;
  for (int64_t group = 0; group < numGroups; ++group) {
    // The two largest of a set that is the union of two sets:
    // first = max(first, first'), second = max(min(first, first'), second,
    // second').
    Value first = lowest, second = lowest;
    auto merge = [&](Value otherFirst, Value otherSecond) {
      Value lower = b.op<arith::MinNumFOp>(first, otherFirst);
      first = maximum(first, otherFirst);
      second = maximum(maximum(second, otherSecond), lower);
    };
    for (int64_t j = 0; j < shape.keysPerLane; ++j)
      if (Value inGroup = isInGroup(j, group))
        merge(maximum(b.select(inGroup, choice[j], lowest), lowest), lowest);
    for (int64_t distance = 1; distance < shape.lanes; distance *= 2) {
      Value otherFirst = b.shuffleXor(first, distance);
      Value otherSecond =
          sumsTwo ? b.shuffleXor(second, distance) : Value(lowest);
      merge(otherFirst, otherSecond);
    }
    values.push_back(sumsTwo ? b.add(first, second) : first);
  }
  return values;
}

/// The choice scores outside of the topk_group best groups become -inf.
void RowSelection::dropGroups(MutableArrayRef<Value> choice) {
  int64_t numGroups = op.getNGroup(), numKept = op.getTopkGroup();
  // +inf plus -inf is a NaN; as a key it ranks last.
  SmallVector<Value> keys;
  for (Value value : getGroupValues(choice))
    keys.push_back(layout.ordered(b, value));

  // rank[g] = the number of groups before g; of equal ones the lower is first.
  SmallVector<Value> ranks(numGroups, b.i32(0));
  for (int64_t g = 0; g < numGroups; ++g)
    for (int64_t higher = g + 1; higher < numGroups; ++higher) {
      Value later = b.compare(CmpIPredicate::uge, keys[g], keys[higher]);
      ranks[higher] = b.add(ranks[higher], b.select(later, b.i32(1), b.i32(0)));
      ranks[g] = b.add(ranks[g], b.select(later, b.i32(0), b.i32(1)));
    }
  for (int64_t g = 0; g < numGroups; ++g) {
    Value dropped = b.compare(CmpIPredicate::sge, ranks[g], b.i32(numKept));
    for (int64_t j = 0; j < shape.keysPerLane; ++j)
      if (Value inGroup = isInGroup(j, g))
        choice[j] =
            b.select(b.both(inGroup, dropped), b.infinity(true), choice[j]);
  }
}

//===----------------------------------------------------------------------===//
// Selection
//===----------------------------------------------------------------------===//

void RowSelection::selectByKeys(ArrayRef<Value> choice) {
  Value none = layout.none(b);
  SmallVector<Value> state;
  for (auto [c, expert, isExpert] : llvm::zip_equal(choice, experts, exists)) {
    Value key = layout.make(b, c, expert);
    state.push_back(isExpert ? b.select(isExpert, key, none) : key);
  }
  state.append(shape.slotsPerLane, none);

  // The keys, then the slots, are carried through the k rounds.
  int64_t numKeys = shape.keysPerLane;
  auto loop = scf::ForOp::create(
      b, b.i32(0), b.i32(numSelected), b.i32(1), state,
      [&](OpBuilder &builder, Location loc, Value rank, ValueRange carried) {
        ThreadBuilder body(loc, builder);
        auto higher = [&](Value l, Value r) {
          return body.op<arith::MaxUIOp>(l, r);
        };
        SmallVector<Value> next(carried);
        Value best = next.front();
        for (Value key : ArrayRef(next).slice(1, numKeys - 1))
          best = higher(best, key);
        best = body.reduceLanes(best, shape.lanes, higher);
        for (Value &key : MutableArrayRef(next).take_front(numKeys))
          key = body.select(body.compare(CmpIPredicate::eq, key, best), none,
                            key);
        for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
          Value owned = body.add(lane, body.i32(slot * shape.lanes));
          Value isOwner = body.compare(CmpIPredicate::eq, owned, rank);
          next[numKeys + slot] =
              body.select(isOwner, best, next[numKeys + slot]);
        }
        scf::YieldOp::create(body, next);
      });
  for (auto [slot, key] :
       llvm::enumerate(loop.getResults().drop_front(numKeys))) {
    chosen.push_back(layout.expertOf(b, key));
    // A slot past k has the key of no expert, whose index is out of range.
    if (isSlot[slot])
      chosen.back() = b.select(isSlot[slot], chosen.back(), b.i32(0));
    hasGate.push_back(form.choosesByScores ? Value()
                                           : b.no(layout.isExcluded(b, key)));
  }
}

void RowSelection::readForced() {
  for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
    Value rank = b.add(lane, b.i32(slot * shape.lanes));
    if (isSlot[slot])
      rank = b.op<arith::MinSIOp>(rank, b.i32(numSelected - 1));
    Value expert =
        memref::LoadOp::create(b, op.getForced(), at(op.getForced(), 1, rank));
    Value limit = arith::ConstantOp::create(
        b, b.getIntegerAttr(expert.getType(), numExperts));
    hasGate.push_back(b.compare(CmpIPredicate::ult, expert, limit));
    if (expert.getType() != b.getI32Type())
      expert = arith::TruncIOp::create(b, b.getI32Type(), expert);
    chosen.push_back(expert);
  }
}

//===----------------------------------------------------------------------===//
// Gates
//===----------------------------------------------------------------------===//

/// values / (sum of all lanes' values + floor), or 0 where the sum is 0 (E7).
SmallVector<Value> RowSelection::renormalise(ArrayRef<Value> values,
                                             Value floor) {
  Value sum = values.front();
  for (Value value : values.drop_front())
    sum = b.add(sum, value);
  sum = reduceSum(sum);
  Value isEmpty = b.compare(CmpFPredicate::OEQ, sum, b.f32(0.0));
  Value divisor =
      b.select(isEmpty, b.f32(1.0), floor ? b.add(sum, floor) : sum);
  SmallVector<Value> gates;
  for (Value value : values)
    gates.push_back(
        b.select(isEmpty, b.f32(0.0), b.op<arith::DivFOp>(value, divisor)));
  return gates;
}

SmallVector<Value> RowSelection::computeGates() {
  Value zero = b.f32(0.0), lowest = b.infinity(true);
  // t = the logits whose softmax the gates are, or v = the chosen scores;
  // slots without a gate have t = -inf, v = 0.
  SmallVector<Value> values;
  for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
    Value expert = chosen[slot];
    if (op.getForced())
      expert = b.select(hasGate[slot], expert, b.i32(0));
    Value x = loadScore(expert);
    Value counts = b.compare(CmpFPredicate::UNE, x, lowest);
    if (hasGate[slot])
      counts = b.both(counts, hasGate[slot]);
    if (isSlot[slot])
      counts = b.both(counts, isSlot[slot]);
    Value value = !form.gatesFromLogits                     ? score(x)
                  : form.function == ScoreFunction::Sigmoid ? logSigmoid(x)
                                                            : x;
    values.push_back(
        b.select(counts, value, form.gatesFromLogits ? lowest : zero));
  }
  if (!form.gatesFromLogits) {
    if (!op.getRenorm())
      return values;
    double eps = op.getEps().convertToDouble();
    return renormalise(values, eps == 0.0 ? Value() : b.f32(eps));
  }
  Value highest = values.front();
  for (Value t : ArrayRef(values).drop_front())
    highest = maximum(highest, t);
  highest = finiteOrZero(reduceMax(highest));
  for (Value &t : values)
    t = b.exp(b.op<arith::SubFOp>(t, highest));
  return renormalise(values, {});
}

void RowSelection::storeSlots(ArrayRef<Value> gates, Value isRow) {
  // A masked token selects nothing (E10).
  Value isToken;
  if (Value mask = op.getMask())
    isToken = memref::LoadOp::create(b, mask, at(mask, 0, {}));
  double scale = op.getRouteScale().convertToDouble();
  for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
    Value gate = gates[slot], expert = chosen[slot];
    if (scale != 1.0)
      gate = b.mul(gate, b.f32(scale));
    gate = b.select(hasNaN, b.nan(), gate); // E3
    if (isToken) {
      gate = b.select(isToken, gate, b.f32(0.0));
      expert = b.select(isToken, expert, b.i32(-1));
    }
    Type type = getElementTypeOrSelf(op.getIndicesInit().getType());
    if (type != expert.getType())
      expert = arith::ExtSIOp::create(b, type, expert);
    Value rank = b.add(lane, b.i32(slot * shape.lanes));
    SmallVector<Value> place = at(op.getGatesInit(), 1, rank);
    Value stores = isSlot[slot] ? b.both(isRow, isSlot[slot]) : isRow;
    auto ifStores = scf::IfOp::create(b, stores, /*withElseRegion=*/false);
    OpBuilder::InsertionGuard guard(b);
    b.setInsertionPointToStart(ifStores.thenBlock());
    memref::StoreOp::create(b, gate, op.getGatesInit(), place);
    memref::StoreOp::create(b, expert, op.getIndicesInit(), place);
  }
}

void RowSelection::emit(Value rowToSelect, Value isRow) {
  row = rowToSelect;
  for (int64_t slot = 0; slot < shape.slotsPerLane; ++slot) {
    bool always = (slot + 1) * shape.lanes <= numSelected;
    Value rank = b.add(lane, b.i32(slot * shape.lanes));
    isSlot.push_back(
        always ? Value()
               : b.compare(CmpIPredicate::slt, rank, b.i32(numSelected)));
  }
  loadScores();
  computeRowSoftmax();
  if (op.getForced())
    readForced();
  else
    selectByKeys(getChoiceScores());
  storeSlots(computeGates(), isRow);
}

//===----------------------------------------------------------------------===//
// Pattern
//===----------------------------------------------------------------------===//

/// 64 keys of 64 bits are 128 registers of a lane.
static constexpr int64_t kMaxExperts = 64 * kWarpSize;

namespace {
/// The groups of lanes of a block take the rows in turns:
///
///   for base in 0..rows step groups:
///     row = base + group             (all lanes stay in the loop: shuffles)
///     select in row min(row, rows - 1), store if row < rows
struct TopKRenormToThreads : OpRewritePattern<TopKRenormOp> {
  TopKRenormToThreads(MLIRContext *context, BlockShape block)
      : OpRewritePattern(context), block(block) {}

  LogicalResult matchAndRewrite(TopKRenormOp op,
                                PatternRewriter &rewriter) const override {
    int64_t numExperts = op.getNumExperts(), numSelected = op.getNumSelected();
    if (ShapedType::isDynamic(numExperts) || ShapedType::isDynamic(numSelected))
      return rewriter.notifyMatchFailure(
          op, "expected static numbers of experts and of selected experts; "
              "kernels are specialised for both");
    if (numExperts > kMaxExperts)
      return rewriter.notifyMatchFailure(op, [&](Diagnostic &diagnostic) {
        diagnostic << "expected at most " << kMaxExperts << " experts, found "
                   << numExperts
                   << "; a row is held in the registers of a warp";
      });

    if (op.getNumValid())
      return rewriter.notifyMatchFailure(
          op, "expected no 'num_valid': a block does not know the position of "
              "its tile in the batch; pass a 'mask' instead");

    ThreadBuilder b(op.getLoc(), rewriter);
    Value numRows = getNumRows(b, op.getScores(), /*numInner=*/1);
    LaneShape shape(numExperts, numSelected, getLanesPerRow(numRows));
    Value thread = b.toI32(gpu::ThreadIdOp::create(b, gpu::Dimension::x));
    Value lane = b.op<arith::RemUIOp>(thread, b.i32(shape.lanes));
    Value group = b.toIndex(b.op<arith::DivUIOp>(thread, b.i32(shape.lanes)));
    int64_t groups = block.numThreads / shape.lanes;
    auto loop = scf::ForOp::create(b, b.index(0), numRows, b.index(groups));
    b.setInsertionPointToStart(loop.getBody());
    Value row = b.add(loop.getInductionVar(), group);
    Value isRow = b.compare(CmpIPredicate::ult, row, numRows);
    Value last = b.op<arith::SubIOp>(numRows, b.index(1));
    RowSelection(b, op, shape, lane)
        .emit(b.op<arith::MinUIOp>(row, last), isRow);
    rewriter.eraseOp(op);
    return success();
  }

private:
  /// How many lanes the block has for each of its rows, if their number has a
  /// known bound.
  int64_t getLanesPerRow(Value numRows) const {
    FailureOr<int64_t> maxRows = ValueBoundsConstraintSet::computeConstantBound(
        presburger::BoundType::UB, numRows, /*stopCondition=*/nullptr,
        /*closedUB=*/true);
    if (failed(maxRows) || *maxRows < 1)
      return 1;
    return std::min(block.numThreads / *maxRows, kWarpSize);
  }

  BlockShape block;
};
} // namespace

bool mlir::moe::hasThreadKernel(TopKRenormOp op) {
  int64_t experts = op.getNumExperts();
  return !ShapedType::isDynamic(experts) && experts <= kMaxExperts &&
         !ShapedType::isDynamic(op.getNumSelected());
}

void mlir::moe::populateTopKRenormToThreadsPatterns(RewritePatternSet &patterns,
                                                    BlockShape block) {
  patterns.add<TopKRenormToThreads>(patterns.getContext(), block);
}
