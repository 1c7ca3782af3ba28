//===- TopK.cpp - moe.topk_renorm on vectors ------------------------------===//
//
// Matches moe.topk_renorm on buffers whose rows are contiguous. As many tokens
// as a vector has lanes are computed at once, one a lane: rows are brought in
// by transposes, and from there on every formula of the specification is the
// scalar formula on vectors. A token's bits do not depend on its lane or on
// the other tokens.
//
// Selection compares 32-bit integer keys in the order of E1..E5. The `k` best
// so far form a sorted list that a new expert enters by strict comparison, so
// that of equal scores the lower index stays ahead. Up to 16 places live in
// registers, more in a stack buffer.
//
// Where selection needs a value that one expert alone does not give (a bias on
// softmax probabilities, groups), the choice scores of a block of tokens are
// staged in a stack buffer of one vector an expert.
//
//===----------------------------------------------------------------------===//

#include "Emitter.h"
#include "Patterns.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

#include "llvm/Support/MathExtras.h"

#include <limits>

using namespace mlir;
using namespace mlir::moe;

/// Above this many places the list moves from registers to a stack buffer.
static constexpr int64_t kMaxRegisterPlaces = 16;

/// The key of an empty place: below every score.
static constexpr int32_t kEmptyKey = std::numeric_limits<int32_t>::min();
/// The key of NaN: below -inf (E3).
static constexpr int32_t kNaNKey = kEmptyKey + 1;

static constexpr double kInfinity = std::numeric_limits<double>::infinity();

//===----------------------------------------------------------------------===//
// Keys
//===----------------------------------------------------------------------===//

/// Maps a negative float's bits to their order among the integers, and back.
static Value flipNegative(Emitter &e, Value bits) {
  Value sign = arith::ShRSIOp::create(e, bits, e.i32(31));
  return arith::XOrIOp::create(
      e, bits, arith::AndIOp::create(e, sign, e.i32(0x7fffffff)));
}

/// An integer with the order of E1: -0 equals +0 (adding 0 makes it so), NaN
/// ranks below -inf.
static Value toKey(Emitter &e, Value score) {
  Value bits = e.bitcast(e.add(score, e.f32(0.0)), e.getI32Type());
  return e.select(e.isNaN(score), e.i32(kNaNKey), flipNegative(e, bits));
}

/// The score of a key; NaN for NaN.
static Value fromKey(Emitter &e, Value key) {
  return e.bitcast(flipNegative(e, key), e.getF32Type());
}

//===----------------------------------------------------------------------===//
// Places
//===----------------------------------------------------------------------===//

namespace {
/// One of the k places: a constant where they are unrolled.
struct Place {
  int64_t constant = 0;
  Value dynamic;
  Value get(Emitter &e) const { return dynamic ? dynamic : e.index(constant); }
};

/// A vector a place, in registers or in a buffer.
class Places {
public:
  Places() = default;
  Places(Emitter &e, int64_t count, VectorType type) {
    if (count <= kMaxRegisterPlaces)
      registers.resize(count);
    else
      buffer = e.scratch({e.getIndexAttr(count)}, type);
  }
  explicit Places(ValueRange values) : registers(values) {}

  Value get(Emitter &e, Place place) const {
    return buffer ? e.load(buffer, {place.get(e)}) : registers[place.constant];
  }
  void set(Emitter &e, Place place, Value value) {
    if (buffer)
      e.store(value, buffer, {place.get(e)});
    else
      registers[place.constant] = value;
  }
  bool areRegisters() const { return !buffer; }
  ArrayRef<Value> getRegisters() const { return registers; }

private:
  Values registers;
  Value buffer;
};

/// The sorted list of the best keys of each lane, and whose they are.
struct BestList {
  Places keys, experts;
};

/// What is known about the whole row of each lane.
struct RowStats {
  Value hasNaN;
  Value max;
  /// sum_e exp(x_e - max), where a softmax over all experts is needed.
  Value sumExp;
};

/// Where a block of tokens lies.
struct TokenBlock {
  /// Index of the first token.
  Value first;
  /// The token of each lane; in a partial block the last token again.
  Values rows;
  /// Lanes that hold a token; null where all do.
  Value exists;
};

class TopKKernel {
public:
  TopKKernel(Emitter &e, TopKRenormOp op)
      : e(e), op(op), function(op.getScoreFunction()), k(op.getNumSelected()),
        renorm(op.getRenorm()), eps(op.getEps().convertToDouble()),
        isForced(static_cast<bool>(op.getForced())),
        isStaged(!isForced && (op.getSelectBias() || op.getNGroup() > 1)) {}

  void emit();

private:
  void emitRows(ValueRange leading);
  void emitBlock(TokenBlock block);

  // Reading.
  Value loadChunk(const TokenBlock &block, Value column, Value mask,
                  Values &columns);
  Values forEachExpert(
      const TokenBlock &block, ValueRange carried,
      function_ref<Values(Value expert, Value exists, Value x, ValueRange)>
          body);
  Values forEachPlace(ValueRange carried,
                      function_ref<Values(Place, ValueRange)> body);
  Value gatherScores(const TokenBlock &block, Value experts, Value valid);
  Value getTokenMask(const TokenBlock &block);

  // Selecting.
  Values insert(ValueRange list, Value key, Value expert);
  BestList makeBestList();
  BestList select(const TokenBlock &block, RowStats &stats);
  BestList selectStaged(RowStats &stats);
  BestList readForced(const TokenBlock &block);
  void stageChoice(const TokenBlock &block, RowStats &stats);
  void dropGroups();
  Value getGroupValue(Value group, Value groupSize);
  RowStats computeStats(const TokenBlock &block);
  Value sumExp(const TokenBlock &block, Value max);

  // Weighing.
  bool needsRowSum() const {
    return function == ScoreFunction::Softmax &&
           (!renorm || eps != 0.0 || isStaged);
  }
  /// softmax over the selected of ln s, which needs no eps and divides no 0/0.
  bool weighsInLogSpace() const {
    return renorm && eps == 0.0 &&
           (function == ScoreFunction::Softmax ||
            function == ScoreFunction::Sigmoid);
  }
  Value applyScore(Value x, const RowStats &stats);
  Places computeGates(const TokenBlock &block, BestList &best,
                      const RowStats &stats);
  Value normalise(Value weight, Value sum);

  // Writing.
  void writeResults(const TokenBlock &block, Places &gates, Places &experts);
  void writeInterleaved(const TokenBlock &block, Value rows, Places &places);

  Emitter &e;
  TopKRenormOp op;
  const ScoreFunction function;
  const int64_t k;
  const bool renorm;
  const double eps;
  const bool isForced;
  /// Whether choice scores are staged in `stage` before the selection.
  const bool isStaged;

  // 2-D views of the rows at hand.
  Value scores, forced, mask, gates, indices;
  /// Rows from this one on are padding; null where there is no num_valid.
  Value validEnd;
  Value numTokens, numExperts;
  Value stage;
};
} // namespace

//===----------------------------------------------------------------------===//
// Loops over experts and places
//===----------------------------------------------------------------------===//

/// Loads `width` consecutive scores of each token and turns them, so that each
/// vector of `columns` is one expert.
Value TopKKernel::loadChunk(const TokenBlock &block, Value column, Value mask,
                            Values &columns) {
  Values rows;
  for (Value row : block.rows)
    rows.push_back(e.loadFloats(scores, {row, column}, mask, -kInfinity));
  columns = transposeLanes(e, rows);
  return e.splat(e.fromIndex(column, e.getI32Type()));
}

/// Calls `body` for every expert in order. `exists` is null, or says in which
/// lanes `expert` is one where their number is dynamic.
Values TopKKernel::forEachExpert(
    const TokenBlock &block, ValueRange carried,
    function_ref<Values(Value, Value, Value, ValueRange)> body) {
  int64_t size = op.getNumExperts();
  auto emitChunk = [&](Value column, Value mask, int64_t count, bool isDynamic,
                       ValueRange values) {
    Values columns, state(values);
    Value base = loadChunk(block, column, mask, columns);
    for (int64_t lane = 0; lane < count; ++lane) {
      Value expert = e.add(base, e.i32(lane));
      Value exists;
      if (isDynamic)
        exists = e.compare(arith::CmpIPredicate::slt, expert,
                           e.splat(e.fromIndex(numExperts, e.getI32Type())));
      state = body(expert, exists, columns[lane], state);
    }
    return state;
  };
  if (ShapedType::isDynamic(size))
    return e.loop(e.index(0), numExperts, e.width, carried,
                  [&](Value column, ValueRange values) {
                    Value mask = e.firstLanes(e.sub(numExperts, column));
                    return emitChunk(column, mask, e.width, true, values);
                  });

  int64_t numWhole = size - size % e.width;
  Values state(carried);
  if (numWhole > 0)
    state = e.loop(e.index(0), e.index(numWhole), e.width, state,
                   [&](Value column, ValueRange values) {
                     return emitChunk(column, Value(), e.width, false, values);
                   });
  if (int64_t rest = size - numWhole)
    state = emitChunk(e.index(numWhole), e.firstLanes(e.index(rest)), rest,
                      false, state);
  return state;
}

/// Calls `body` for every place in order: unrolled where places are registers.
Values TopKKernel::forEachPlace(ValueRange carried,
                                function_ref<Values(Place, ValueRange)> body) {
  if (k > kMaxRegisterPlaces)
    return e.loop(e.index(0), e.index(k), 1, carried,
                  [&](Value place, ValueRange values) {
                    return body(Place{0, place}, values);
                  });
  Values state(carried);
  for (int64_t place = 0; place < k; ++place)
    state = body(Place{place, {}}, state);
  return state;
}

//===----------------------------------------------------------------------===//
// Selection
//===----------------------------------------------------------------------===//

/// Enters (key, expert) into the list, `list` being the k keys and then the k
/// experts where they are registers: the places behind it move down by one.
Values TopKKernel::insert(ValueRange list, Value key, Value expert) {
  Values keys(list.take_front(k)), experts(list.drop_front(k));
  Values isAbove;
  for (Value old : keys)
    isAbove.push_back(e.compare(arith::CmpIPredicate::sgt, key, old));
  for (int64_t place = k - 1; place > 0; --place) {
    experts[place] = e.select(isAbove[place - 1], experts[place - 1],
                              e.select(isAbove[place], expert, experts[place]));
    keys[place] = e.min(keys[place - 1], e.max(key, keys[place]));
  }
  experts[0] = e.select(isAbove[0], expert, experts[0]);
  keys[0] = e.max(key, keys[0]);
  llvm::append_range(keys, experts);
  return keys;
}

/// The same in a buffer, from the last place to the first, and only where some
/// lane's key enters the list at all.
static void insertInBuffer(Emitter &e, BestList &best, int64_t k, Value key,
                           Value expert) {
  Place last{0, e.index(k - 1)};
  Value enters = e.anyLane(
      e.compare(arith::CmpIPredicate::sgt, key, best.keys.get(e, last)));
  e.ifThen(enters, [&] {
    e.loop(e.index(0), e.index(k - 1), 1, [&](Value step) {
      Place place{0, e.sub(e.index(k - 1), step)};
      Place before{0, e.sub(place.dynamic, e.index(1))};
      Value oldKey = best.keys.get(e, place);
      Value keyBefore = best.keys.get(e, before);
      Value isAbove = e.compare(arith::CmpIPredicate::sgt, key, oldKey);
      Value isAboveBefore =
          e.compare(arith::CmpIPredicate::sgt, key, keyBefore);
      best.experts.set(
          e, place,
          e.select(isAboveBefore, best.experts.get(e, before),
                   e.select(isAbove, expert, best.experts.get(e, place))));
      best.keys.set(e, place, e.min(keyBefore, e.max(key, oldKey)));
    });
    Place first{0, e.index(0)};
    Value oldKey = best.keys.get(e, first);
    Value isAbove = e.compare(arith::CmpIPredicate::sgt, key, oldKey);
    best.experts.set(e, first,
                     e.select(isAbove, expert, best.experts.get(e, first)));
    best.keys.set(e, first, e.max(key, oldKey));
  });
}

/// An empty list.
BestList TopKKernel::makeBestList() {
  BestList best{Places(e, k, e.ints()), Places(e, k, e.ints())};
  forEachPlace({}, [&](Place place, ValueRange) {
    best.keys.set(e, place, e.i32(kEmptyKey));
    best.experts.set(e, place, e.i32(0));
    return Values();
  });
  return best;
}

/// The k best of the scores themselves. The lowest key of the row says whether
/// it holds NaN, the highest what its maximum is.
BestList TopKKernel::select(const TokenBlock &block, RowStats &stats) {
  BestList best = makeBestList();
  bool inRegisters = best.keys.areRegisters();
  Values carried{e.i32(std::numeric_limits<int32_t>::max())};
  llvm::append_range(carried, best.keys.getRegisters());
  llvm::append_range(carried, best.experts.getRegisters());
  Values state = forEachExpert(
      block, carried,
      [&](Value expert, Value exists, Value x, ValueRange values) -> Values {
        Value key = toKey(e, x);
        Values next{e.min(values[0], key)};
        if (exists)
          key = e.select(exists, key, e.i32(kEmptyKey));
        if (inRegisters)
          llvm::append_range(next, insert(values.drop_front(), key, expert));
        else
          insertInBuffer(e, best, k, key, expert);
        return next;
      });
  if (inRegisters) {
    ValueRange list = ValueRange(state).drop_front();
    best.keys = Places(list.take_front(k));
    best.experts = Places(list.drop_front(k));
  }
  stats.hasNaN = e.compare(arith::CmpIPredicate::eq, state[0], e.i32(kNaNKey));
  stats.max = fromKey(e, best.keys.get(e, Place{0, {}}));
  if (needsRowSum())
    stats.sumExp = sumExp(block, stats.max);
  return best;
}

/// The k best of the staged choice scores.
BestList TopKKernel::selectStaged(RowStats &stats) {
  BestList best = makeBestList();
  bool inRegisters = best.keys.areRegisters();
  Values carried(best.keys.getRegisters());
  llvm::append_range(carried, best.experts.getRegisters());
  Values state = e.loop(e.index(0), numExperts, 1, carried,
                        [&](Value expert, ValueRange values) -> Values {
                          Value key = toKey(e, e.load(stage, {expert}));
                          Value id =
                              e.splat(e.fromIndex(expert, e.getI32Type()));
                          if (inRegisters)
                            return insert(values, key, id);
                          insertInBuffer(e, best, k, key, id);
                          return {};
                        });
  if (inRegisters) {
    best.keys = Places(ValueRange(state).take_front(k));
    best.experts = Places(ValueRange(state).drop_front(k));
  }
  return best;
}

/// The list that the caller forces. A key says only whether there is an expert.
BestList TopKKernel::readForced(const TokenBlock &block) {
  BestList best{Places(e, k, e.ints()), Places(e, k, e.ints())};
  forEachPlace({}, [&](Place place, ValueRange) {
    Values lanes;
    for (Value row : block.rows)
      lanes.push_back(
          e.toInt(e.load(forced, {row, place.get(e)}), e.getI32Type()));
    Value experts = vector::FromElementsOp::create(e, e.ints(), lanes);
    Value count = e.splat(e.fromIndex(numExperts, e.getI32Type()));
    // As unsigned numbers negative indices are large.
    Value isExpert = e.compare(arith::CmpIPredicate::ult, experts, count);
    best.experts.set(e, place, experts);
    best.keys.set(e, place, e.select(isExpert, e.i32(0), e.i32(kEmptyKey)));
    return Values();
  });
  return best;
}

//===----------------------------------------------------------------------===//
// Facts about whole rows
//===----------------------------------------------------------------------===//

/// `max`, or 0 for a row without support, so that -inf - max stays -inf.
static Value getShift(Emitter &e, Value max) {
  Value isEmpty = e.compare(arith::CmpFPredicate::OEQ, max, e.f32(-kInfinity));
  return e.select(isEmpty, e.f32(0.0), max);
}

/// sum_e exp(x_e - max) in the order of the experts.
Value TopKKernel::sumExp(const TokenBlock &block, Value max) {
  Value shift = getShift(e, max);
  // Lanes behind the last expert hold -inf and add 0.
  return forEachExpert(block, {e.f32(0.0)},
                       [&](Value, Value, Value x, ValueRange sum) -> Values {
                         return {e.add(sum[0], e.exp(e.sub(x, shift)))};
                       })[0];
}

/// The row's maximum and NaN, where the selection does not give them.
RowStats TopKKernel::computeStats(const TokenBlock &block) {
  Value noNaN = e.constantInt(e.vectorOf(e.getI1Type()), 0);
  Values state =
      forEachExpert(block, {e.f32(-kInfinity), noNaN},
                    [&](Value, Value, Value x, ValueRange values) -> Values {
                      return {e.max(x, values[0]),
                              arith::OrIOp::create(e, values[1], e.isNaN(x))};
                    });
  RowStats stats{state[1], state[0], {}};
  if (needsRowSum())
    stats.sumExp = sumExp(block, stats.max);
  return stats;
}

//===----------------------------------------------------------------------===//
// Staged choice scores: bias and groups
//===----------------------------------------------------------------------===//

/// Stages c = s + select_bias of every expert.
void TopKKernel::stageChoice(const TokenBlock &block, RowStats &stats) {
  stats = computeStats(block);
  forEachExpert(
      block, {}, [&](Value expert, Value exists, Value x, ValueRange) {
        Value choice = applyScore(x, stats);
        // All lanes of `expert` are equal.
        Value scalar =
            vector::ExtractOp::create(e, expert, ArrayRef<int64_t>{0});
        auto storeChoice = [&] {
          Value position = e.toIndex(scalar);
          Value value = choice;
          if (Value bias = op.getSelectBias())
            value = e.add(value, e.splat(e.toF32(e.load(bias, {position}))));
          e.store(value, stage, {position});
        };
        if (exists)
          e.ifThen(vector::ExtractOp::create(e, exists, ArrayRef<int64_t>{0}),
                   storeChoice);
        else
          storeChoice();
        return Values();
      });
  if (op.getNGroup() > 1)
    dropGroups();
}

/// The value of a group in every lane: its largest choice score, or the sum of
/// its two largest.
Value TopKKernel::getGroupValue(Value group, Value groupSize) {
  Value begin = e.mul(group, groupSize);
  Values best = e.loop(
      begin, e.add(begin, groupSize), 1, {e.f32(-kInfinity), e.f32(-kInfinity)},
      [&](Value expert, ValueRange values) -> Values {
        Value choice = e.load(stage, {expert});
        // A NaN choice ranks below -inf, and so it never is a maximum.
        Value second = e.max(e.min(choice, values[0]), values[1]);
        return {e.max(choice, values[0]), second};
      });
  if (op.getGroupScore() == GroupScore::Max)
    return best[0];
  // A group of one expert has no second score to add.
  Value isSingle = e.compare(arith::CmpIPredicate::eq, groupSize, e.index(1));
  return e.select(isSingle, best[0], e.add(best[0], best[1]));
}

/// Stages -inf for the experts outside of the topk_group best groups. A group
/// stays iff fewer than topk_group groups come before it: those with a larger
/// value, and lower groups with an equal one.
void TopKKernel::dropGroups() {
  int64_t numGroups = op.getNGroup();
  Value groupSize = arith::DivSIOp::create(e, numExperts, e.index(numGroups));
  Value values = e.scratch({e.getIndexAttr(numGroups)}, e.ints());
  Value end = e.index(numGroups);
  e.loop(e.index(0), end, 1, [&](Value group) {
    e.store(toKey(e, getGroupValue(group, groupSize)), values, {group});
  });
  e.loop(e.index(0), end, 1, [&](Value group) {
    Value own = e.load(values, {group});
    Value rank = e.loop(
        e.index(0), end, 1, {e.i32(0)},
        [&](Value other, ValueRange count) -> Values {
          Value key = e.load(values, {other});
          Value isLower =
              e.splat(e.compare(arith::CmpIPredicate::slt, other, group));
          Value ties = arith::AndIOp::create(
              e, isLower, e.compare(arith::CmpIPredicate::eq, key, own));
          Value isBefore = arith::OrIOp::create(
              e, ties, e.compare(arith::CmpIPredicate::sgt, key, own));
          return {e.add(count[0], e.select(isBefore, e.i32(1), e.i32(0)))};
        })[0];
    Value stays =
        e.compare(arith::CmpIPredicate::slt, rank, e.i32(op.getTopkGroup()));
    Value begin = e.mul(group, groupSize);
    e.loop(begin, e.add(begin, groupSize), 1, [&](Value expert) {
      Value choice = e.load(stage, {expert});
      e.store(e.select(stays, choice, e.f32(-kInfinity)), stage, {expert});
    });
  });
}

//===----------------------------------------------------------------------===//
// Gates
//===----------------------------------------------------------------------===//

/// s = score(x).
Value TopKKernel::applyScore(Value x, const RowStats &stats) {
  switch (function) {
  case ScoreFunction::None:
    return x;
  case ScoreFunction::Sigmoid:
    return e.sigmoid(x);
  case ScoreFunction::SqrtSoftplus:
    return e.sqrtSoftplus(x);
  case ScoreFunction::Softmax:
    break;
  }
  Value weight = e.exp(e.sub(x, getShift(e, stats.max)));
  return normalise(weight, stats.sumExp);
}

/// weight / sum, and 0 where the sum is 0 (E7).
Value TopKKernel::normalise(Value weight, Value sum) {
  Value isZero = e.compare(arith::CmpFPredicate::OEQ, sum, e.f32(0.0));
  return e.select(isZero, e.f32(0.0), e.div(weight, sum));
}

/// The scores x of `experts`, one a lane.
Value TopKKernel::gatherScores(const TokenBlock &block, Value experts,
                               Value valid) {
  Values lanes;
  Value ids = e.select(valid, experts, e.i32(0));
  for (auto [lane, row] : llvm::enumerate(block.rows)) {
    Value id = vector::ExtractOp::create(
        e, ids, ArrayRef<int64_t>{static_cast<int64_t>(lane)});
    lanes.push_back(e.toF32(e.load(scores, {row, e.toIndex(id)})));
  }
  return vector::FromElementsOp::create(e, e.floats(), lanes);
}

/// gates = renorm ? v / (sum v + eps) : v with v the scores at the places.
Places TopKKernel::computeGates(const TokenBlock &block, BestList &best,
                                const RowStats &stats) {
  bool inLogSpace = weighsInLogSpace();
  Places values(e, k, e.floats());
  // v, or ln v, and its maximum.
  Value max = forEachPlace(
      {e.f32(-kInfinity)}, [&](Place place, ValueRange carried) -> Values {
        Value key = best.keys.get(e, place);
        bool isOwnScore = !isForced && !isStaged;
        Value lowest =
            isForced ? e.i32(kEmptyKey) : toKey(e, e.f32(-kInfinity));
        Value valid = e.compare(arith::CmpIPredicate::ne, key, lowest);
        Value x = isOwnScore
                      ? fromKey(e, key)
                      : gatherScores(block, best.experts.get(e, place), valid);
        Value value;
        if (!inLogSpace)
          value = e.select(valid, applyScore(x, stats), e.f32(0.0));
        else if (function == ScoreFunction::Sigmoid)
          value = e.select(valid, e.logSigmoid(x), e.f32(-kInfinity));
        else
          value = e.select(valid, x, e.f32(-kInfinity));
        values.set(e, place, value);
        return {e.max(value, carried[0])};
      })[0];
  if (!renorm)
    return values;

  Value shift = getShift(e, max);
  Value sum = forEachPlace({e.f32(0.0)},
                           [&](Place place, ValueRange carried) -> Values {
                             Value value = values.get(e, place);
                             if (inLogSpace) {
                               value = e.exp(e.sub(value, shift));
                               values.set(e, place, value);
                             }
                             return {e.add(carried[0], value)};
                           })[0];
  if (eps != 0.0)
    sum = e.add(sum, e.f32(eps));
  forEachPlace({}, [&](Place place, ValueRange) {
    values.set(e, place, normalise(values.get(e, place), sum));
    return Values();
  });
  return values;
}

/// Lanes whose token is real; null where all are.
Value TopKKernel::getTokenMask(const TokenBlock &block) {
  Value valid;
  if (mask) {
    Values lanes;
    for (Value row : block.rows)
      lanes.push_back(
          arith::ExtUIOp::create(e, e.getI32Type(), e.load(mask, {row})));
    Value vector = vector::FromElementsOp::create(e, e.ints(), lanes);
    valid = e.compare(arith::CmpIPredicate::ne, vector, e.i32(0));
  }
  if (validEnd) {
    Value count = e.sub(validEnd, block.first);
    // Lanes behind the last token repeat it, and its validity.
    if (block.exists)
      count =
          e.select(e.compare(arith::CmpIPredicate::sge, validEnd, numTokens),
                   e.index(e.width), count);
    valid = e.both(valid, e.firstLanes(count));
  }
  return valid;
}

//===----------------------------------------------------------------------===//
// Results
//===----------------------------------------------------------------------===//

/// Writes whole vectors of neighbouring tokens' places. `rows` is dense.
void TopKKernel::writeInterleaved(const TokenBlock &block, Value rows,
                                  Places &places) {
  SmallVector<ReassociationIndices> flat{{0, 1}};
  Value memory = memref::CollapseShapeOp::create(e, rows, flat);
  Value begin = e.mul(block.first, e.index(k));
  for (auto [i, vector] :
       llvm::enumerate(interleave(e, places.getRegisters()))) {
    Value position = e.add(begin, e.index(i * e.width));
    Value lanes;
    if (block.exists) {
      Value end = e.mul(numTokens, e.index(k));
      lanes = e.firstLanes(e.sub(end, position));
    }
    e.storeVector(vector, memory, {position}, lanes);
  }
}

void TopKKernel::writeResults(const TokenBlock &block, Places &gateValues,
                              Places &experts) {
  Type indexType = cast<MemRefType>(indices.getType()).getElementType();
  for (auto [memory, places, element] :
       {std::tuple<Value, Places *, Type>{gates, &gateValues, e.getF32Type()},
        {indices, &experts, indexType}}) {
    if (places->areRegisters() && llvm::isPowerOf2_64(k) &&
        isContiguousFrom(cast<MemRefType>(memory.getType()), 0)) {
      Values converted(places->getRegisters());
      if (memory == indices)
        for (Value &value : converted)
          value = e.toInt(value, element);
      Places dense(converted);
      writeInterleaved(block, memory, dense);
      continue;
    }
    forEachPlace({}, [&, memory = memory, places = places,
                      element = element](Place place, ValueRange) {
      Value value = places->get(e, place);
      if (memory == indices)
        value = e.toInt(value, element);
      for (auto [lane, row] : llvm::enumerate(block.rows)) {
        // In a partial block the last row is written again with its own value:
        // lanes behind it hold the same token.
        Value scalar = vector::ExtractOp::create(
            e, value, ArrayRef<int64_t>{static_cast<int64_t>(lane)});
        e.store(scalar, memory, {row, place.get(e)});
      }
      return Values();
    });
  }
}

//===----------------------------------------------------------------------===//
// The kernel
//===----------------------------------------------------------------------===//

void TopKKernel::emitBlock(TokenBlock block) {
  RowStats stats;
  BestList best;
  if (isForced) {
    stats = computeStats(block);
    best = readForced(block);
  } else if (isStaged) {
    stageChoice(block, stats);
    best = selectStaged(stats);
  } else {
    best = select(block, stats);
  }

  Places gateValues = computeGates(block, best, stats);
  Value tokens = getTokenMask(block);
  double scale = op.getRouteScale().convertToDouble();
  double nan = std::numeric_limits<double>::quiet_NaN();
  forEachPlace({}, [&](Place place, ValueRange) {
    Value gate = gateValues.get(e, place);
    if (scale != 1.0)
      gate = e.mul(gate, e.f32(scale));
    Value isPoisoned = stats.hasNaN;
    if (isForced) {
      // A place that is forced to be none has gate 0 in any row.
      Value isExpert = e.compare(arith::CmpIPredicate::ne,
                                 best.keys.get(e, place), e.i32(kEmptyKey));
      isPoisoned = e.both(isPoisoned, isExpert);
    }
    gate = e.select(isPoisoned, e.f32(nan), gate);
    Value expert = best.experts.get(e, place);
    if (tokens) {
      gate = e.select(tokens, gate, e.f32(0.0));
      expert = e.select(tokens, expert, e.i32(-1));
    }
    gateValues.set(e, place, gate);
    best.experts.set(e, place, expert);
    return Values();
  });
  writeResults(block, gateValues, best.experts);
}

/// All tokens at one position of the leading dims: whole blocks in a loop, and
/// a partial block for the rest.
void TopKKernel::emitRows(ValueRange leading) {
  auto slice = [&](Value memref) {
    return memref ? sliceLeading(e, memref, leading) : Value();
  };
  scores = slice(op.getScores());
  forced = slice(op.getForced());
  mask = slice(op.getMask());
  gates = slice(op.getGatesInit());
  indices = slice(op.getIndicesInit());
  bool isOneToken = cast<MemRefType>(scores.getType()).getRank() == 1;
  if (isOneToken)
    for (Value *view : {&scores, &forced, &mask, &gates, &indices})
      if (*view)
        *view = addLeadingUnitDim(e, *view);

  numTokens = e.dim(scores, 0);
  numExperts = e.dim(scores, 1);
  if (Value numValid = op.getNumValid()) {
    // num_valid counts tokens over all leading dims.
    Value first = e.index(0);
    for (auto [position, index] : llvm::enumerate(leading))
      first = e.add(e.mul(first, e.dim(op.getScores(), position)), index);
    if (!isOneToken)
      first = e.mul(first, numTokens);
    validEnd = e.sub(e.toIndex(numValid), first);
  }

  int64_t size = cast<MemRefType>(scores.getType()).getDimSize(0);
  Value rest =
      ShapedType::isDynamic(size)
          ? arith::RemSIOp::create(e, numTokens, e.index(e.width)).getResult()
          : e.index(size % e.width);
  Value wholeEnd = e.sub(numTokens, rest);
  if (ShapedType::isDynamic(size) || size >= e.width)
    e.loop(e.index(0), wholeEnd, e.width, [&](Value first) {
      TokenBlock block{first, {}, {}};
      for (int64_t lane = 0; lane < e.width; ++lane)
        block.rows.push_back(e.add(first, e.index(lane)));
      emitBlock(block);
    });
  if (!ShapedType::isDynamic(size) && size % e.width == 0)
    return;
  Value hasRest = e.compare(arith::CmpIPredicate::slt, wholeEnd, numTokens);
  e.ifThen(hasRest, [&] {
    TokenBlock block{wholeEnd, {}, e.firstLanes(rest)};
    Value last = e.sub(numTokens, e.index(1));
    for (int64_t lane = 0; lane < e.width; ++lane)
      block.rows.push_back(e.minIndex(e.add(wholeEnd, e.index(lane)), last));
    emitBlock(block);
  });
}

void TopKKernel::emit() {
  auto type = cast<MemRefType>(op.getScores().getType());
  bool isDynamic = isStaged && type.isDynamicDim(type.getRank() - 1);
  e.withScratch(isDynamic, [&] {
    if (isStaged)
      stage = e.scratch({getSize(e, op.getScores(), type.getRank() - 1)},
                        e.floats());
    // Loops over all leading dims but the last, whose tokens fill the lanes.
    Values leading;
    std::function<void()> nest = [&] {
      int64_t position = leading.size();
      if (position + 2 >= type.getRank())
        return emitRows(leading);
      e.loop(e.index(0), e.dim(op.getScores(), position), 1, [&](Value iv) {
        leading.push_back(iv);
        nest();
        leading.pop_back();
      });
    };
    nest();
  });
}

namespace {
/// moe.topk_renorm on buffers -> loops over blocks of tokens, one a lane.
struct TopKRenormToVector : OpRewritePattern<TopKRenormOp> {
  TopKRenormToVector(MLIRContext *context, const CPUVectorOptions &options)
      : OpRewritePattern(context), options(options) {}

  LogicalResult matchAndRewrite(TopKRenormOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.hasPureBufferSemantics())
      return rewriter.notifyMatchFailure(op, "expected buffers");
    if (ShapedType::isDynamic(op.getNumSelected()))
      return rewriter.notifyMatchFailure(op, "expected a static k");
    if (op.getNumSelected() == 0)
      return rewriter.eraseOp(op), success();
    for (Value operand : op->getOperands())
      if (isa<MemRefType>(operand.getType()) &&
          !isInnermostContiguous(operand.getType()))
        return rewriter.notifyMatchFailure(
            op, "expected operands with contiguous rows");

    Emitter emitter(op.getLoc(), rewriter, options.vectorWidth);
    TopKKernel(emitter, op).emit();
    rewriter.eraseOp(op);
    return success();
  }

  CPUVectorOptions options;
};
} // namespace

void mlir::moe::populateTopKToCPUPatterns(RewritePatternSet &patterns,
                                          const CPUVectorOptions &options) {
  patterns.add<TopKRenormToVector>(patterns.getContext(), options);
}
