//===- TopKRowSelect.cpp - Many experts of a token ------------------------===//
//
// A list of more than 16 places does not fit in registers, and entering one
// expert after another costs k steps for most of them. Here lanes are experts
// of one token, and a token takes four steps:
//
//   1. Its keys are staged, and the maxima of at least 2k disjoint groups of
//      experts kept: the k-th largest of them is a lower bound of the k-th best
//      key (16 bits of it do).
//   2. The experts that reach the bound enter a list, in their order.
//   3. Where ties left a long list, the k-th best key itself cuts it to k.
//   4. A listed expert's place is the number of those before it in the order of
//      E1: larger keys, and equal ones of lower experts.
//
// Step 1 and 2 are linear in E, step 4 in the square of the list over the
// lanes; for scores without ties the list has about 1.4 k entries.
//
//===----------------------------------------------------------------------===//

#include "TopKKernel.h"

#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// Vectors of group maxima; above that many groups the bound is not worth it.
static constexpr int64_t kMaxGroupVectors = 8;
/// How many more than k a list may hold before it is cut.
static constexpr int64_t kMaxExtra = 64;

namespace {
class RowSelector {
public:
  RowSelector(Emitter &e, int64_t k, int64_t numExperts);

  /// Writes the experts and keys of the k best of `scores[row, ..]`, in order,
  /// to row `lane` of `placedKeys` and `placedExperts`, and the lowest keys of
  /// the row to `lowest`.
  void select(Value scores, Value row, Value lane);

  Value placedKeys, placedExperts, lowest;

private:
  struct Row {
    Value lowest;
    Values groupMaxima;
  };
  using CountAtLeast = function_ref<Values(ArrayRef<Value> thresholds)>;

  Row stageKeys(Value scores, Value row);
  Value findKthKey(CountAtLeast countAtLeast, int64_t bits);
  Value boundKthKey(ArrayRef<Value> groupMaxima);
  Value append(Value keys, Value experts, Value where, Value toKeys,
               Value toExperts, Value count);
  Value listExperts(Value bound);
  Value cutList(Value count);
  void placeListed(Value count, Value lane);

  Value number(int64_t value) { return e.constantInt(e.getI32Type(), value); }

  Emitter &e;
  const int64_t k;
  Value numExperts;
  int64_t numGroupVectors;
  Value keys, listedKeys, listedExperts, keptKeys, keptExperts;
};
} // namespace

RowSelector::RowSelector(Emitter &e, int64_t k, int64_t size)
    : e(e), k(k), numExperts(e.index(size)),
      numGroupVectors(std::min<int64_t>(
          kMaxGroupVectors,
          llvm::PowerOf2Ceil(llvm::divideCeil(2 * k, e.width)))) {
  // Vectors are written whole, up to one behind the last element.
  auto allocate = [&](ArrayRef<int64_t> sizes) {
    return e.scratch(getAsIndexOpFoldResult(e.getContext(), sizes),
                     e.getI32Type());
  };
  int64_t padded = llvm::alignTo(size, e.width) + e.width;
  for (Value *buffer :
       {&keys, &listedKeys, &listedExperts, &keptKeys, &keptExperts})
    *buffer = allocate(padded);
  int64_t places = llvm::alignTo(k, e.width) + e.width;
  placedKeys = allocate({e.width, places});
  placedExperts = allocate({e.width, places});
  lowest = allocate({e.width, e.width});
}

//===----------------------------------------------------------------------===//
// Steps
//===----------------------------------------------------------------------===//

/// Stages the row's keys, and fetches the scores of the next row. Lanes behind
/// the last expert hold the empty key.
RowSelector::Row RowSelector::stageKeys(Value scores, Value row) {
  int64_t wide = numGroupVectors * e.width;
  Value rest = e.rest(numExperts, wide);
  Value wholeEnd = e.sub(numExperts, rest);
  Value nextRow = e.add(row, e.index(1));
  Value none = e.i32(std::numeric_limits<int32_t>::max());
  Values state(1 + numGroupVectors, e.i32(kEmptyKey));
  state[0] = none;
  state = e.loop(
      e.index(0), wholeEnd, wide, state, [&](Value first, ValueRange carried) {
        Values next(carried);
        for (int64_t i = 0; i < numGroupVectors; ++i) {
          Value column = e.add(first, e.index(i * e.width));
          memref::PrefetchOp::create(e, scores, ValueRange{nextRow, column},
                                     /*isWrite=*/false, /*localityHint=*/3,
                                     /*isDataCache=*/true);
          Value key = toSortableKey(e, e.loadFloats(scores, {row, column}));
          e.storeVector(key, keys, {column});
          next[0] = e.minSigned(next[0], key);
          next[1 + i] = e.maxSigned(next[1 + i], key);
        }
        return next;
      });
  state = e.loop(wholeEnd, numExperts, e.width, state,
                 [&](Value column, ValueRange carried) {
                   Values next(carried);
                   Value exists = e.firstLanes(e.sub(numExperts, column));
                   Value key = toSortableKey(
                       e, e.loadFloats(scores, {row, column}, exists));
                   next[0] = e.minSigned(next[0], e.select(exists, key, none));
                   key = e.select(exists, key, e.i32(kEmptyKey));
                   e.storeVector(key, keys, {column});
                   next[1] = e.maxSigned(next[1], key);
                   return next;
                 });
  return {state[0], Values(ArrayRef(state).drop_front())};
}

/// The largest key, as far as its upper `bits` bits tell, that at least k keys
/// reach. Two bits a step: how many of the three next larger prefixes are
/// reached is the digit.
Value RowSelector::findKthKey(CountAtLeast countAtLeast, int64_t bits) {
  // Prefixes grow as unsigned numbers, keys are signed.
  Value sign = number(std::numeric_limits<int32_t>::min());
  Value prefix = e.loop(
      e.index(0), e.index(bits / 2), 1, {number(0)},
      [&](Value step, ValueRange carried) -> Values {
        Value shift = e.sub(number(30),
                            e.mul(e.castInt(step, e.getI32Type()), number(2)));
        Values thresholds;
        for (int64_t digit = 1; digit < 4; ++digit) {
          Value next = arith::ShLIOp::create(e, number(digit), shift);
          next = e.either(carried[0], next);
          thresholds.push_back(arith::XOrIOp::create(e, next, sign));
        }
        Value digit = number(0);
        for (Value count : countAtLeast(thresholds)) {
          Value isReached =
              e.compare(arith::CmpIPredicate::sge, count, number(k));
          digit = e.add(digit,
                        arith::ExtUIOp::create(e, e.getI32Type(), isReached));
        }
        return {e.either(carried[0], arith::ShLIOp::create(e, digit, shift))};
      })[0];
  return arith::XOrIOp::create(e, prefix, sign);
}

/// A lower bound of the k-th best key, above the empty one.
Value RowSelector::boundKthKey(ArrayRef<Value> groupMaxima) {
  if (k > numGroupVectors * e.width)
    return number(kNaNKey);
  Value bound = findKthKey(
      [&](ArrayRef<Value> thresholds) {
        Values counts;
        for (Value threshold : thresholds) {
          Value splat = e.splat(threshold), count = number(0);
          for (Value maxima : groupMaxima)
            count =
                e.add(count, countLanes(e, e.compare(arith::CmpIPredicate::sge,
                                                     maxima, splat)));
          counts.push_back(count);
        }
        return counts;
      },
      /*bits=*/16);
  return arith::MaxSIOp::create(e, bound, number(kNaNKey));
}

/// Appends the lanes of `where` to a list of `count` entries; returns how many
/// it has then. A whole vector is written.
Value RowSelector::append(Value vectorKeys, Value vectorExperts, Value where,
                          Value toKeys, Value toExperts, Value count) {
  e.storeVector(compressLanes(e, vectorKeys, where), toKeys, {count});
  e.storeVector(compressLanes(e, vectorExperts, where), toExperts, {count});
  return e.add(count, e.toIndex(countLanes(e, where)));
}

/// Lists the experts whose keys reach `bound`; returns their number.
Value RowSelector::listExperts(Value bound) {
  Value threshold = e.splat(bound);
  return e.loop(
      e.index(0), numExperts, e.width, {e.index(0)},
      [&](Value first, ValueRange count) -> Values {
        Value key = e.loadVector(keys, {first});
        Value experts =
            e.add(e.splat(e.castInt(first, e.getI32Type())), e.iota());
        Value reaches = e.compare(arith::CmpIPredicate::sge, key, threshold);
        return {
            append(key, experts, reaches, listedKeys, listedExperts, count[0])};
      })[0];
}

/// Keeps the k best of the list: all above the k-th best key, then as many of
/// those equal to it, lower experts first. What is appended behind the k-th is
/// not read.
Value RowSelector::cutList(Value count) {
  e.storeVector(e.i32(kEmptyKey), listedKeys, {count});
  Value zero = e.index(0);
  Value kth = e.splat(findKthKey(
      [&](ArrayRef<Value> thresholds) {
        Values splats = llvm::map_to_vector(
            thresholds, [&](Value value) { return e.splat(value); });
        return e.loop(
            zero, count, e.width, Values(3, number(0)),
            [&](Value first, ValueRange counts) {
              Value key = e.loadVector(listedKeys, {first});
              Values next;
              for (auto [old, splat] : llvm::zip_equal(counts, splats))
                next.push_back(e.add(
                    old, countLanes(e, e.compare(arith::CmpIPredicate::sge, key,
                                                 splat))));
              return next;
            });
      },
      /*bits=*/32));
  Value kept = zero;
  for (auto predicate : {arith::CmpIPredicate::sgt, arith::CmpIPredicate::eq})
    kept = e.loop(zero, count, e.width, {kept},
                  [&](Value first, ValueRange carried) -> Values {
                    Value key = e.loadVector(listedKeys, {first});
                    Value experts = e.loadVector(listedExperts, {first});
                    return {append(key, experts, e.compare(predicate, key, kth),
                                   keptKeys, keptExperts, carried[0])};
                  })[0];
  e.loop(zero, e.index(k), e.width, [&](Value first) {
    e.storeVector(e.loadVector(keptKeys, {first}), listedKeys, {first});
    e.storeVector(e.loadVector(keptExperts, {first}), listedExperts, {first});
  });
  return e.index(k);
}

/// Writes each listed expert to its place; those behind the k-th share one.
void RowSelector::placeListed(Value count, Value lane) {
  e.storeVector(e.i32(kEmptyKey), listedKeys, {count});
  e.loop(e.index(0), count, 1, [&](Value entry) {
    Value key = e.load(listedKeys, {entry}), own = e.splat(key);
    Value position = e.splat(e.castInt(entry, e.getI32Type()));
    Value before =
        e.loop(e.index(0), count, e.width, {number(0)},
               [&](Value first, ValueRange carried) -> Values {
                 Value other = e.loadVector(listedKeys, {first});
                 Value others =
                     e.add(e.splat(e.castInt(first, e.getI32Type())), e.iota());
                 Value ties = arith::AndIOp::create(
                     e, e.compare(arith::CmpIPredicate::eq, other, own),
                     e.compare(arith::CmpIPredicate::slt, others, position));
                 Value isBefore = arith::OrIOp::create(
                     e, ties, e.compare(arith::CmpIPredicate::sgt, other, own));
                 return {e.add(carried[0], countLanes(e, isBefore))};
               })[0];
    Value place = e.minSigned(e.toIndex(before), e.index(k));
    e.store(key, placedKeys, {lane, place});
    e.store(e.load(listedExperts, {entry}), placedExperts, {lane, place});
  });
}

void RowSelector::select(Value scores, Value row, Value lane) {
  Row staged = stageKeys(scores, row);
  e.storeVector(staged.lowest, lowest, {lane, e.index(0)});
  Value count = listExperts(boundKthKey(staged.groupMaxima));
  Value isLong =
      e.compare(arith::CmpIPredicate::sgt, count, e.index(k + kMaxExtra));
  count = e.ifElse(
      isLong, e.getIndexType(), [&]() -> Values { return {cutList(count)}; },
      [&]() -> Values { return {count}; })[0];
  placeListed(count, lane);
}

//===----------------------------------------------------------------------===//
// Blocks of tokens
//===----------------------------------------------------------------------===//

/// The rows of `source` from `column` on, transposed: one vector a column.
static Values loadTransposed(Emitter &e, Value source, Value column) {
  Values rows;
  for (int64_t lane = 0; lane < e.width; ++lane)
    rows.push_back(e.loadVector(source, {e.index(lane), column}));
  return transposeLanes(e, rows);
}

BestList TopKKernel::selectByRow(const TokenBlock &block, RowStats &stats) {
  RowSelector selector(e, k, op.getNumExperts());
  Value last = e.sub(numTokens, e.index(1));
  e.loop(e.index(0), e.index(e.width), 1, [&](Value lane) {
    // In a partial block the last token is taken again.
    selector.select(scores, e.minSigned(e.add(block.first, lane), last), lane);
  });

  int64_t padded = llvm::alignTo(k, e.width);
  BestList best{Places(e, padded, e.ints()), Places(e, padded, e.ints())};
  e.loop(e.index(0), e.index(padded), e.width, [&](Value first) {
    for (auto [source, places] :
         {std::pair(selector.placedKeys, &best.keys),
          std::pair(selector.placedExperts, &best.experts)})
      for (auto [i, vector] : llvm::enumerate(loadTransposed(e, source, first)))
        places->set(e, Place{0, e.add(first, e.index(i))}, vector);
  });

  Values lowest = loadTransposed(e, selector.lowest, e.index(0));
  Value least = lowest.front();
  for (Value other : ArrayRef(lowest).drop_front())
    least = e.minSigned(least, other);
  stats.hasNaN = e.compare(arith::CmpIPredicate::eq, least, e.i32(kNaNKey));
  stats.max = fromSortableKey(e, best.keys.get(e, Place{0, e.index(0)}));
  if (needsRowSum())
    stats.sumExp = sumExp(block, stats.max);
  return best;
}
