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
// The rows of a block of tokens are then transposed, and what stands in them
// enters the lists as all experts would. NaN is no maximum and always written,
// so that a row has the k best of any scores; one of many ties is as long as
// they are.
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

Value mlir::moe::countLanes(Emitter &e, Value mask) {
  Type bits = e.getIntegerType(e.width);
  Value packed = vector::BitCastOp::create(e, VectorType::get({1}, bits), mask);
  packed = vector::ExtractOp::create(e, packed, ArrayRef<int64_t>{0});
  return math::CtPopOp::create(
      e, arith::ExtUIOp::create(e, e.getI32Type(), packed));
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
  /// their scores, to row `lane` of the lists.
  void filter(Value scores, Value row, Value ahead, Value lane);

  Value scoreLists, expertLists;
  /// How many there are, and whether the token has a score of NaN.
  Value counts, hasNaN;

private:
  using ChunkFn = function_ref<Values(Value first, Value exists, int64_t chunk,
                                      ValueRange carried)>;
  Values forEachChunk(ValueRange carried, ChunkFn body);
  Value findBound(ArrayRef<Value> maxima);

  Emitter &e;
  const int64_t k, numExperts;
  /// Vectors of group maxima.
  const int64_t numGroupVectors;
};
} // namespace

ExpertFilter::ExpertFilter(Emitter &e, int64_t k, int64_t numExperts)
    : e(e), k(k), numExperts(numExperts),
      numGroupVectors(2 * k > e.width ? 2 : 1) {
  auto allocate = [&](ArrayRef<int64_t> sizes, Type type) {
    return e.scratch(getAsIndexOpFoldResult(e.getContext(), sizes), type);
  };
  // Vectors are written whole, up to one behind the last element.
  int64_t padded = llvm::alignTo(numExperts, e.width) + e.width;
  scoreLists = allocate({e.width, padded}, e.getF32Type());
  expertLists = allocate({e.width, padded}, e.getI32Type());
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
  if (maxima.size() == 2) {
    // The larger one of the i-th largest here and the i-th smallest there: the
    // largest of both.
    auto reversed =
        llvm::to_vector(llvm::reverse(llvm::seq<int64_t>(0, e.width)));
    Value other = sortLanes(e, maxima.back());
    other = vector::ShuffleOp::create(e, other, other, reversed);
    sorted = mergeLanes(e, e.maxOrRhs(sorted, other), e.width);
  }
  return e.splat(
      vector::ExtractOp::create(e, sorted, ArrayRef<int64_t>{k - 1}));
}

void ExpertFilter::filter(Value scores, Value row, Value ahead, Value lane) {
  Value noNaN = e.constantInt(e.vectorOf(e.getI1Type()), 0);
  Values state(1 + numGroupVectors, e.negInfinity());
  state[0] = noNaN;
  state = forEachChunk(
      state, [&](Value first, Value exists, int64_t chunk, ValueRange carried) {
        Values next(carried);
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
  Value count = forEachChunk(
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
  e.store(e.castInt(count, e.getI32Type()), counts, {lane});
}

//===----------------------------------------------------------------------===//
// A block of tokens
//===----------------------------------------------------------------------===//

/// Compressing lanes is one instruction with AVX-512 alone. The list of few
/// places is quicker where 16-bit scores are widened, which the filter does
/// twice.
bool TopKKernel::paysToFilter() {
  int64_t experts = op.getNumExperts();
  bool isWidened = !getElementTypeOrSelf(op.getScores()).isF32();
  return e.width == 16 && k <= kMaxRegisterPlaces &&
         k >= (isWidened ? kMinWidenedPlaces : 1) &&
         !ShapedType::isDynamic(experts) && experts <= kMaxFilterExperts &&
         experts >= kMinVectors * e.width;
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
    });

  Value counts = e.loadVector(filter.counts, {e.index(0)});
  Value most =
      vector::ReductionOp::create(e, vector::CombiningKind::MAXSI, counts);
  BestList best = makeBestList();
  Values list(best.keys.getRegisters());
  llvm::append_range(list, best.experts.getRegisters());
  Value transposedScores = e.scratch({e.getIndexAttr(e.width)}, e.floats());
  Value transposedExperts = e.scratch({e.getIndexAttr(e.width)}, e.ints());
  Value end = e.toIndex(most);
  list = e.loop(
      e.index(0), end, e.width, list, [&](Value first, ValueRange carried) {
        for (auto [source, target] :
             {std::pair(filter.scoreLists, transposedScores),
              std::pair(filter.expertLists, transposedExperts)}) {
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
              Value position =
                  e.splat(e.castInt(e.add(first, entry), e.getI32Type()));
              Value exists =
                  e.compare(arith::CmpIPredicate::slt, position, counts);
              Value key = toSortableKey(e, e.load(transposedScores, {entry}));
              key = e.select(exists, key, e.i32(kEmptyKey));
              return insert(values, key, e.load(transposedExperts, {entry}));
            });
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
