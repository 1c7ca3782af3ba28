//===- TopKFilter.cpp - Few experts of many -------------------------------===//
//
// Entering an expert into the sorted list of a token takes some instructions a
// place, and most experts come nowhere near the list. Here they are dropped
// before, a token at a time, lanes being experts:
//
//   1. The maxima of 16 or 32 disjoint groups of experts are sorted: the k-th
//      largest is reached by at least k experts.
//   2. The experts that reach it are written to a short row, in their order;
//      of scores without ties there are about 1.4 k.
//
// What stands in the rows of a block of tokens then enters the lists as all
// experts would. NaN is no maximum and always written, so that a row has the k
// best of any scores; one of many ties is as long as they are.
//
// AVX-512 moves the lanes of a vector that stay to the front by one
// instruction, and the rows are transposed behind it. Other vectors have their
// comparisons gathered to words of 64 bits, whose set bits are counted from the
// lowest on: the work is by what stays, of which a word has few, and each
// expert is written to its token's lane at once.
//
//===----------------------------------------------------------------------===//

#include "TopKKernel.h"

#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// Fewer vectors of experts than this enter the list sooner than the filter.
static constexpr int64_t kMinVectors = 4;
static constexpr int64_t kMinWidenedPlaces = 4;
/// The same without an instruction that compresses lanes, where the filter
/// costs more for each expert that stays.
static constexpr int64_t kMinWords = 1, kMinExpertsOfPlace = 16;

//===----------------------------------------------------------------------===//
// Lanes
//===----------------------------------------------------------------------===//

Value mlir::moe::compressLanes(Emitter &e, Value vector, Value mask) {
  Value rest = arith::ConstantOp::create(
      e, cast<TypedAttr>(e.getZeroAttr(vector.getType())));
  return LLVM::CallIntrinsicOp::create(
             e, vector.getType(),
             e.getStringAttr("llvm.experimental.vector.compress"),
             ValueRange{vector, mask, rest})
      .getResult(0);
}

/// The lanes of `mask` as the bits of an integer of `type`.
static Value packLanes(Emitter &e, Value mask, Type type) {
  Type bits = e.getIntegerType(e.width);
  Value packed = vector::BitCastOp::create(e, VectorType::get({1}, bits), mask);
  packed = vector::ExtractOp::create(e, packed, ArrayRef<int64_t>{0});
  return arith::ExtUIOp::create(e, type, packed);
}

Value mlir::moe::countLanes(Emitter &e, Value mask) {
  return math::CtPopOp::create(e, packLanes(e, mask, e.getI32Type()));
}

/// Exchanges lanes `distance` apart, so that the larger one comes first in the
/// blocks of `block` lanes with even number and last in the others.
static Value exchangeLanes(Emitter &e, Value vector, int64_t distance,
                           int64_t block) {
  SmallVector<int64_t> partners, choices;
  for (int64_t lane = 0; lane < e.width; ++lane) {
    partners.push_back(lane ^ distance);
    bool isFirst = !(lane & distance), isDescending = !(lane & block);
    choices.push_back(isFirst == isDescending ? lane : e.width + lane);
  }
  Value other = vector::ShuffleOp::create(e, vector, vector, partners);
  return vector::ShuffleOp::create(e, e.maxOrRhs(vector, other),
                                   e.minOrRhs(vector, other), choices);
}

/// Lanes that rise and then fall, or the other way round, in descending order.
static Value mergeLanes(Emitter &e, Value vector, int64_t block) {
  for (int64_t distance = block / 2; distance > 0; distance /= 2)
    vector = exchangeLanes(e, vector, distance, block);
  return vector;
}

/// All lanes in descending order: a bitonic sorting network.
static Value sortLanes(Emitter &e, Value vector) {
  for (int64_t block = 2; block <= e.width; block *= 2)
    vector = mergeLanes(e, vector, block);
  return vector;
}

//===----------------------------------------------------------------------===//
// One token
//===----------------------------------------------------------------------===//

namespace {
class ExpertFilter {
public:
  ExpertFilter(Emitter &e, int64_t k, int64_t numExperts);

  /// Writes the experts of `scores[row, ..]` that may be among the k best, and
  /// their scores, to the list of `lane`.
  void filter(Value scores, Value row, Value ahead, Value lane);
  /// Gives a lane the list of another one, where entries come first.
  void repeatLane(Value from, Value to);

  /// By lane and entry where lanes are compressed, or by entry and lane.
  Value scoreLists, expertLists;
  /// How many there are, and whether the token has a score of NaN.
  Value counts, hasNaN;

private:
  using ChunkFn = function_ref<Values(Value first, Value exists, int64_t chunk,
                                      ValueRange carried)>;
  Values forEachChunk(ValueRange carried, ChunkFn body);
  Value findBound(ArrayRef<Value> maxima);
  Value compressStaying(Value scores, Value row, Value bound, Value lane);
  Value findStaying(Value scores, Value row, Value bound, Value first,
                    int64_t count);
  Value listStaying(Value scores, Value row, Value bound, Value lane);

  Emitter &e;
  const int64_t k, numExperts;
  /// Vectors of group maxima.
  const int64_t numGroupVectors;
  /// Experts that are written of each word without a look at how many stay.
  const int64_t wordEntries;
};
} // namespace

/// Bits of a word, one an expert.
static constexpr int64_t kWordBits = 64;

/// Whether one instruction compresses lanes.
static bool compressesLanes(const Emitter &e) { return e.width == 16; }

ExpertFilter::ExpertFilter(Emitter &e, int64_t k, int64_t numExperts)
    : e(e), k(k), numExperts(numExperts),
      numGroupVectors(2 * k > e.width ? 2 : 1),
      // One more than stay on average: few words have more than that.
      wordEntries(llvm::divideCeil(3 * k * kWordBits, 2 * numExperts) + 1) {
  auto allocate = [&](ArrayRef<int64_t> sizes, Type type) {
    return e.scratch(getAsIndexOpFoldResult(e.getContext(), sizes), type);
  };
  // Vectors are written whole, up to one behind the last element.
  int64_t padded = llvm::alignTo(numExperts, e.width) + e.width;
  SmallVector<int64_t> shape{e.width, padded};
  if (!compressesLanes(e))
    shape = {numExperts + wordEntries, e.width};
  scoreLists = allocate(shape, e.getF32Type());
  expertLists = allocate(shape, e.getI32Type());
  counts = allocate({e.width}, e.getI32Type());
  hasNaN = allocate({e.width}, e.getI32Type());
}

/// Calls `body` for each vector of experts, unrolled by the group vectors.
Values ExpertFilter::forEachChunk(ValueRange carried, ChunkFn body) {
  int64_t step = numGroupVectors * e.width;
  int64_t wholeEnd = numExperts - numExperts % step;
  Values state = e.loop(e.index(0), e.index(wholeEnd), step, carried,
                        [&](Value first, ValueRange values) {
                          Values next(values);
                          for (int64_t i = 0; i < numGroupVectors; ++i)
                            next = body(e.add(first, e.index(i * e.width)),
                                        Value(), i, next);
                          return next;
                        });
  for (int64_t first = wholeEnd; first < numExperts; first += e.width) {
    int64_t size = std::min(numExperts - first, e.width);
    Value exists;
    if (size < e.width)
      exists = e.firstLanes(e.index(size));
    state = body(e.index(first), exists, (first - wholeEnd) / e.width, state);
  }
  return state;
}

/// The k-th largest of the group maxima, in every lane.
Value ExpertFilter::findBound(ArrayRef<Value> maxima) {
  Value sorted = sortLanes(e, maxima.front());
  int64_t place = k - 1;
  if (maxima.size() == 2) {
    // The larger one of the i-th largest here and the i-th smallest there: the
    // largest of both. The smaller ones are the rest.
    auto reversed =
        llvm::to_vector(llvm::reverse(llvm::seq<int64_t>(0, e.width)));
    Value other = sortLanes(e, maxima.back());
    other = vector::ShuffleOp::create(e, other, other, reversed);
    Value half =
        place < e.width ? e.maxOrRhs(sorted, other) : e.minOrRhs(sorted, other);
    sorted = mergeLanes(e, half, e.width);
  }
  return e.splat(
      vector::ExtractOp::create(e, sorted, ArrayRef<int64_t>{place % e.width}));
}

/// Writes the experts that reach `bound`; returns how many there are.
Value ExpertFilter::compressStaying(Value scores, Value row, Value bound,
                                    Value lane) {
  return forEachChunk(
      {e.index(0)},
      [&](Value first, Value exists, int64_t, ValueRange carried) -> Values {
        Value x = e.loadFloats(scores, {row, first}, exists, -kInfinity);
        // True for NaN as well.
        Value stays =
            e.both(e.compare(arith::CmpFPredicate::UGE, x, bound), exists);
        Value experts =
            e.add(e.splat(e.castInt(first, e.getI32Type())), e.iota());
        e.storeVector(compressLanes(e, x, stays), scoreLists,
                      {lane, carried[0]});
        e.storeVector(compressLanes(e, experts, stays), expertLists,
                      {lane, carried[0]});
        return {e.add(carried[0], e.toIndex(countLanes(e, stays)))};
      })[0];
}

/// The bits of `count` experts from `first` on, at most a word of them: whether
/// each reaches `bound`.
Value ExpertFilter::findStaying(Value scores, Value row, Value bound,
                                Value first, int64_t count) {
  Type word = e.getI64Type();
  Value bits = e.constantInt(word, 0);
  for (int64_t begin = 0; begin < count; begin += e.width) {
    Value exists;
    if (count - begin < e.width)
      exists = e.firstLanes(e.index(count - begin));
    Value x = e.loadFloats(scores, {row, e.add(first, e.index(begin))}, exists,
                           -kInfinity);
    // True for NaN as well.
    Value stays =
        e.both(e.compare(arith::CmpFPredicate::UGE, x, bound), exists);
    Value moved = arith::ShLIOp::create(e, packLanes(e, stays, word),
                                        e.constantInt(word, begin));
    bits = arith::OrIOp::create(e, bits, moved);
  }
  return bits;
}

/// The same as compressStaying, by the set bits of words.
Value ExpertFilter::listStaying(Value scores, Value row, Value bound,
                                Value lane) {
  Type word = e.getI64Type();
  auto listWord = [&](Value first, int64_t size, Value count) -> Value {
    Value bits = findStaying(scores, row, bound, first, size);
    // Without a bit that is left, the last expert is written in vain.
    Value last = e.constantInt(word, int64_t(uint64_t(1) << (size - 1)));
    auto listLowest = [&](Value left, Value entry) -> Value {
      Value position = math::CountTrailingZerosOp::create(
          e, arith::OrIOp::create(e, left, last));
      Value expert = e.add(first, e.toIndex(position));
      e.store(e.toF32(e.load(scores, {row, expert})), scoreLists,
              {entry, lane});
      e.store(e.castInt(expert, e.getI32Type()), expertLists, {entry, lane});
      Value less = arith::SubIOp::create(e, left, e.constantInt(word, 1));
      return arith::AndIOp::create(e, left, less);
    };
    Value left = bits;
    for (int64_t entry = 0; entry < std::min(wordEntries, size); ++entry)
      left = listLowest(left, e.add(count, e.index(entry)));
    Value number = e.toIndex(math::CtPopOp::create(e, bits));
    e.loop(e.index(wordEntries), number, 1, {left},
           [&](Value entry, ValueRange old) -> Values {
             return {listLowest(old[0], e.add(count, entry))};
           });
    return e.add(count, number);
  };
  int64_t rest = numExperts % kWordBits, whole = numExperts - rest;
  Value count = e.loop(e.index(0), e.index(whole), kWordBits, {e.index(0)},
                       [&](Value first, ValueRange old) -> Values {
                         return {listWord(first, kWordBits, old[0])};
                       })[0];
  return rest ? listWord(e.index(whole), rest, count) : count;
}

void ExpertFilter::repeatLane(Value from, Value to) {
  e.loop(e.index(0), e.toIndex(e.load(counts, {from})), 1, [&](Value entry) {
    for (Value list : {scoreLists, expertLists})
      e.store(e.load(list, {entry, from}), list, {entry, to});
  });
}

void ExpertFilter::filter(Value scores, Value row, Value ahead, Value lane) {
  Value noNaN = e.constantInt(e.vectorOf(e.getI1Type()), 0);
  Values state(1 + numGroupVectors, e.negInfinity());
  state[0] = noNaN;
  state = forEachChunk(
      state, [&](Value first, Value exists, int64_t chunk, ValueRange carried) {
        Values next(carried);
        // Two vectors of AVX2 share a line, which groups of one vector ask for
        // twice.
        if (compressesLanes(e) || chunk % 2 == 0)
          memref::PrefetchOp::create(e, scores, ValueRange{ahead, first},
                                     /*isWrite=*/false, /*localityHint=*/3,
                                     /*isDataCache=*/true);
        Value x = e.loadFloats(scores, {row, first}, exists, -kInfinity);
        next[0] = e.either(next[0], e.isNaN(x));
        next[1 + chunk] = e.maxOrRhs(x, next[1 + chunk]);
        return next;
      });
  Value anyNaN = arith::ExtUIOp::create(e, e.getI32Type(), e.anyLane(state[0]));
  e.store(anyNaN, hasNaN, {lane});

  Value bound = findBound(ArrayRef(state).drop_front());
  Value count = compressesLanes(e) ? compressStaying(scores, row, bound, lane)
                                   : listStaying(scores, row, bound, lane);
  e.store(e.castInt(count, e.getI32Type()), counts, {lane});
}

//===----------------------------------------------------------------------===//
// A block of tokens
//===----------------------------------------------------------------------===//

/// Vectors of four lanes are left to the list. That of few places is quicker
/// where 16-bit scores are widened, which the filter does twice.
bool TopKKernel::paysToFilter() {
  int64_t experts = op.getNumExperts();
  bool isWidened = !getElementTypeOrSelf(op.getScores()).isF32();
  if (k > kMaxRegisterPlaces || k < (isWidened ? kMinWidenedPlaces : 1) ||
      ShapedType::isDynamic(experts) || experts > kMaxFilterExperts)
    return false;
  if (compressesLanes(e))
    return experts >= kMinVectors * e.width;
  return e.width == 8 && experts >= kMinWords * kWordBits &&
         experts >= kMinExpertsOfPlace * k;
}

/// Calls `enter` for each of `end` entries of the lists, whose rows are lanes.
Values TopKKernel::enterTransposed(
    Value scoreLists, Value expertLists, Value end, Value lastLane,
    ValueRange list,
    function_ref<Values(Value, Value, Value, ValueRange)> enter) {
  Value transposedScores = e.scratch({e.getIndexAttr(e.width)}, e.floats());
  Value transposedExperts = e.scratch({e.getIndexAttr(e.width)}, e.ints());
  return e.loop(
      e.index(0), end, e.width, list, [&](Value first, ValueRange carried) {
        for (auto [source, target] :
             {std::pair(scoreLists, transposedScores),
              std::pair(expertLists, transposedExperts)}) {
          Values rows;
          for (int64_t lane = 0; lane < e.width; ++lane)
            rows.push_back(e.loadVector(
                source, {e.minSigned(e.index(lane), lastLane), first}));
          for (auto [i, column] : llvm::enumerate(transposeLanes(e, rows)))
            e.store(column, target, {e.index(i)});
        }
        Value size = e.minSigned(e.sub(end, first), e.index(e.width));
        return e.loop(
            e.index(0), size, 1, carried, [&](Value entry, ValueRange values) {
              return enter(e.add(first, entry),
                           e.load(transposedScores, {entry}),
                           e.load(transposedExperts, {entry}), values);
            });
      });
}

BestList TopKKernel::selectFiltered(const TokenBlock &block, RowStats &stats) {
  ExpertFilter filter(e, k, op.getNumExperts());
  auto type = cast<MemRefType>(scores.getType());
  int64_t rowBytes = op.getNumExperts() * type.getElementTypeBitWidth() / 8;
  Value distance =
      e.index(llvm::divideCeil(e.target.getFetchBytes(), rowBytes));
  // Lanes behind the last token hold it again.
  Value numLanes = e.index(e.width);
  if (block.exists)
    numLanes = e.minSigned(e.sub(numTokens, block.first), numLanes);
  Value lastLane = e.sub(numLanes, e.index(1));
  e.loop(e.index(0), numLanes, 1, [&](Value lane) {
    Value row = e.add(block.first, lane);
    filter.filter(scores, row, e.add(row, distance), lane);
  });
  if (block.exists)
    e.loop(numLanes, e.index(e.width), 1, [&](Value lane) {
      for (Value facts : {filter.counts, filter.hasNaN})
        e.store(e.load(facts, {lastLane}), facts, {lane});
      if (!compressesLanes(e))
        filter.repeatLane(lastLane, lane);
    });

  Value counts = e.loadVector(filter.counts, {e.index(0)});
  Value most =
      vector::ReductionOp::create(e, vector::CombiningKind::MAXSI, counts);
  BestList best = makeBestList();
  Values list(best.keys.getRegisters());
  llvm::append_range(list, best.experts.getRegisters());
  Value end = e.toIndex(most);
  auto enter = [&](Value number, Value entryScores, Value entryExperts,
                   ValueRange values) {
    Value position = e.splat(e.castInt(number, e.getI32Type()));
    Value exists = e.compare(arith::CmpIPredicate::slt, position, counts);
    Value key = toSortableKey(e, entryScores);
    key = e.select(exists, key, e.i32(kEmptyKey));
    return insert(values, key, entryExperts);
  };
  list =
      compressesLanes(e)
          ? enterTransposed(filter.scoreLists, filter.expertLists, end,
                            lastLane, list, enter)
          : e.loop(
                e.index(0), end, 1, list, [&](Value entry, ValueRange values) {
                  Values place{entry, e.index(0)};
                  return enter(entry, e.loadVector(filter.scoreLists, place),
                               e.loadVector(filter.expertLists, place), values);
                });
  best.keys = Places(ValueRange(list).take_front(k));
  best.experts = Places(ValueRange(list).drop_front(k));

  Value hasNaN = e.loadVector(filter.hasNaN, {e.index(0)});
  stats.hasNaN = e.compare(arith::CmpIPredicate::ne, hasNaN, e.i32(0));
  stats.max = fromSortableKey(e, best.keys.get(e, Place{0, {}}));
  if (needsRowSum())
    stats.sumExp = sumExp(block, stats.max);
  return best;
}
