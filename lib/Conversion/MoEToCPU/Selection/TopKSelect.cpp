//===- TopKSelect.cpp - Which experts -----------------------------------===//
//
// The loops over experts and places, and the k best of each token.
//
//===----------------------------------------------------------------------===//

#include "TopKGroups.h"
#include "TopKKernel.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Loops over experts and places
//===----------------------------------------------------------------------===//

/// Loads `width` consecutive scores of each token and transposes them, so that
/// each vector of `columns` is one expert.
Value TopKKernel::loadChunk(const TokenBlock &block, Value column, Value mask,
                            Values &columns) {
  Values rows;
  for (Value row : block.rows)
    rows.push_back(e.loadFloats(scores, {row, column}, mask, -kInfinity));
  columns = transposeLanes(e, rows);
  return e.splat(e.castInt(column, e.getI32Type()));
}

/// Calls `body` for every expert in order. `exists` is null, or says in which
/// lanes `expert` is one where their number is dynamic. The first pass over a
/// block fetches scores further on: rows are short streams, which the processor
/// does not foresee.
Values TopKKernel::forEachExpert(
    const TokenBlock &block, ValueRange carried,
    function_ref<Values(Value, Value, Value, ValueRange)> body,
    bool isFirstPass) {
  int64_t size = op.getNumExperts();
  auto emitChunk = [&](Value column, Value mask, int64_t count, bool isDynamic,
                       ValueRange values) {
    Values columns, state(values);
    if (isFirstPass)
      for (Value row : block.ahead)
        memref::PrefetchOp::create(e, scores, ValueRange{row, column},
                                   /*isWrite=*/false, /*localityHint=*/3,
                                   /*isDataCache=*/true);
    Value base = loadChunk(block, column, mask, columns);
    for (int64_t lane = 0; lane < count; ++lane) {
      Value expert = e.add(base, e.i32(lane));
      Value exists;
      if (isDynamic)
        exists = e.compare(arith::CmpIPredicate::slt, expert,
                           e.splat(e.castInt(numExperts, e.getI32Type())));
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
  auto isAbove = [&](int64_t place) {
    return e.compare(arith::CmpIPredicate::sgt, key, keys[place]);
  };
  // A comparison is made where it is used: AVX-512 has seven registers for
  // them.
  Value above = isAbove(k - 1);
  for (int64_t place = k - 1; place > 0; --place) {
    Value aboveBefore = isAbove(place - 1);
    experts[place] = e.select(aboveBefore, experts[place - 1],
                              e.select(above, expert, experts[place]));
    keys[place] = e.minSigned(keys[place - 1], e.maxSigned(key, keys[place]));
    above = aboveBefore;
  }
  experts[0] = e.select(above, expert, experts[0]);
  keys[0] = e.maxSigned(key, keys[0]);
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
      best.keys.set(e, place, e.minSigned(keyBefore, e.maxSigned(key, oldKey)));
    });
    Place first{0, e.index(0)};
    Value oldKey = best.keys.get(e, first);
    Value isAbove = e.compare(arith::CmpIPredicate::sgt, key, oldKey);
    best.experts.set(e, first,
                     e.select(isAbove, expert, best.experts.get(e, first)));
    best.keys.set(e, first, e.maxSigned(key, oldKey));
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
        Value key = toSortableKey(e, x);
        Values next{e.minSigned(values[0], key)};
        if (exists)
          key = e.select(exists, key, e.i32(kEmptyKey));
        if (inRegisters)
          llvm::append_range(next, insert(values.drop_front(), key, expert));
        else
          insertInBuffer(e, best, k, key, expert);
        return next;
      },
      /*isFirstPass=*/true);
  if (inRegisters) {
    ValueRange list = ValueRange(state).drop_front();
    best.keys = Places(list.take_front(k));
    best.experts = Places(list.drop_front(k));
  }
  stats.hasNaN = e.compare(arith::CmpIPredicate::eq, state[0], e.i32(kNaNKey));
  stats.max = fromSortableKey(e, best.keys.get(e, Place{0, {}}));
  if (needsRowSum())
    stats.sumExp = sumExp(block, stats.max);
  return best;
}

/// The k best of the staged keys.
BestList TopKKernel::selectStaged(RowStats &stats) {
  BestList best = makeBestList();
  bool inRegisters = best.keys.areRegisters();
  Values carried(best.keys.getRegisters());
  llvm::append_range(carried, best.experts.getRegisters());
  Values state = e.loop(e.index(0), numExperts, 1, carried,
                        [&](Value expert, ValueRange values) -> Values {
                          Value key = e.load(stage, {expert});
                          Value id = e.splat(e.castInt(expert, e.getI32Type()));
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

/// A forced id as i32. A wider one that does not fit becomes -1, which is no
/// expert either: cut off, it could name one.
static Value toExpert(Emitter &e, Value id) {
  Value expert = e.castInt(id, e.getI32Type());
  if (expert == id)
    return id;
  Value fits =
      e.compare(arith::CmpIPredicate::eq, e.castInt(expert, id.getType()), id);
  return e.select(fits, expert, e.constantInt(e.getI32Type(), -1));
}

/// The id that the caller forces at `place`, of each lane's token.
Values TopKKernel::loadForced(const TokenBlock &block, Place place) {
  Values lanes;
  for (Value row : block.rows)
    lanes.push_back(e.load(forced, {row, place.get(e)}));
  return lanes;
}

/// The list that the caller forces. A key says only whether there is an expert.
BestList TopKKernel::readForced(const TokenBlock &block) {
  BestList best{Places(e, k, e.ints()), Places(e, k, e.ints())};
  forEachPlace({}, [&](Place place, ValueRange) {
    Values lanes = loadForced(block, place);
    for (Value &lane : lanes)
      lane = toExpert(e, lane);
    Value experts = vector::FromElementsOp::create(e, e.ints(), lanes);
    Value count = e.splat(e.castInt(numExperts, e.getI32Type()));
    // As unsigned numbers negative indices are large.
    Value isExpert = e.compare(arith::CmpIPredicate::ult, experts, count);
    best.experts.set(e, place, experts);
    best.keys.set(e, place, e.select(isExpert, e.i32(0), e.i32(kEmptyKey)));
    return Values();
  });
  return best;
}

/// The ids to write: forced ones come out as they came in, where the type of
/// the indices holds them.
Places TopKKernel::getIds(const TokenBlock &block, BestList &best) {
  constexpr unsigned kWide = 64;
  auto isWide = [](Value ids) {
    return cast<MemRefType>(ids.getType()).getElementTypeBitWidth() == kWide;
  };
  if (!isForced || !isWide(forced) || !isWide(indices))
    return best.experts;
  VectorType type = e.vectorOf(e.getIntegerType(kWide));
  Places ids(e, k, type);
  forEachPlace({}, [&](Place place, ValueRange) {
    ids.set(e, place,
            vector::FromElementsOp::create(e, type, loadForced(block, place)));
    return Values();
  });
  return ids;
}

//===----------------------------------------------------------------------===//
// Facts about whole rows
//===----------------------------------------------------------------------===//

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
  Values state = forEachExpert(
      block, {e.negInfinity(), noNaN},
      [&](Value, Value, Value x, ValueRange values) -> Values {
        return {e.maxOrRhs(x, values[0]), e.either(values[1], e.isNaN(x))};
      });
  RowStats stats{state[1], state[0], {}};
  if (needsRowSum())
    stats.sumExp = sumExp(block, stats.max);
  return stats;
}

//===----------------------------------------------------------------------===//
// Staged keys: bias and groups
//===----------------------------------------------------------------------===//

/// Stages the key of c = s + select_bias of every expert, or of c = x
/// (docs/Spec.md 9.1).
void TopKKernel::stageChoice(const TokenBlock &block, RowStats &stats) {
  stats = computeStats(block);
  bool isGiven = isOrderedByGivenScores(op);
  forEachExpert(
      block, {}, [&](Value expert, Value exists, Value x, ValueRange) {
        Value choice = isGiven ? x : applyScore(x, stats);
        // All lanes of `expert` are equal.
        Value scalar =
            vector::ExtractOp::create(e, expert, ArrayRef<int64_t>{0});
        auto storeChoice = [&] {
          Value position = e.toIndex(scalar);
          Value value = choice;
          if (Value bias = op.getSelectBias())
            value = e.add(value, e.splat(e.toF32(e.load(bias, {position}))));
          e.store(toSortableKey(e, value), stage, {position});
        };
        if (exists)
          e.ifThen(vector::ExtractOp::create(e, exists, ArrayRef<int64_t>{0}),
                   storeChoice);
        else
          storeChoice();
        return Values();
      });
  if (op.getNGroup() > 1)
    ExpertGroups(e, op, stage, numExperts).drop();
}
