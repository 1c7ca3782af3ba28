//===- CoSelections.cpp - Tokens that chose two experts -------------------===//
//
// Where the counts fit into workgroup memory, a block takes tokens, a tile at a
// time:
//
//   words[expert, word] = a bit for each token of the tile that chose it
//   C[row, column]     += popcount(words[row, ..] & words[column, ..])
//
// The second step costs the same however many experts a token chose, and a bit
// that is set twice drops repeated ones. A thread has pairs of its own, which
// no atomics need to protect. In global memory, every pair of a token adds 1.
//
//===----------------------------------------------------------------------===//

#include "CoSelections.h"

#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "llvm/Support/MathExtras.h"

#include <numeric>

using namespace mlir;
using namespace mlir::moe;
using arith::CmpIPredicate;

/// Choices of a token and pairs of a thread whose loads are under way together.
static constexpr int64_t kChoicesAtATime = 8, kPairsAtATime = 4;

// Row r of the triangle and row E - 1 - r have E + 1 pairs together, so that
// their counts lie as a row of a rectangle, those of the longer one first. The
// shorter one runs backwards.

Value mlir::moe::getPairPosition(ThreadBuilder &b, int64_t experts, Value one,
                                 Value other) {
  Value row = b.op<arith::MaxUIOp>(one, other);
  Value column = b.op<arith::MinUIOp>(one, other);
  Value mirrored = b.sub(b.i32(experts - 1), row);
  Value isLonger = b.compare(CmpIPredicate::ule, mirrored, row);
  Value before = b.mul(b.select(isLonger, mirrored, row), b.i32(experts + 1));
  return b.add(before,
               b.select(isLonger, column, b.sub(b.i32(experts), column)));
}

/// The row and the column of the pair whose counts lie at `position`.
static std::pair<Value, Value> getPair(ThreadBuilder &b, int64_t experts,
                                       Value position) {
  Value width = b.i32(experts + 1);
  Value shorter = b.op<arith::DivUIOp>(position, width);
  Value place = b.sub(position, b.mul(shorter, width));
  Value longer = b.sub(b.i32(experts - 1), shorter);
  Value isLonger = b.compare(CmpIPredicate::ule, place, longer);
  return {b.select(isLonger, longer, shorter),
          b.select(isLonger, place, b.sub(b.i32(experts), place))};
}

/// The expert at a place of a token as i32, and whether it exists. An index is
/// compared as given, for an i64 may be far out of range.
static std::pair<Value, Value>
readExpert(ThreadBuilder &b, AdjacencyUpdateOp op, Value token, Value place) {
  Value expert = memref::LoadOp::create(b, op.getIndices(),
                                        ValueRange{token, b.toIndex(place)});
  Value limit = b.constantInt(expert.getType(), getNumExperts(op));
  Value isExpert = b.compare(CmpIPredicate::ult, expert, limit);
  return {b.toI32(expert), isExpert};
}

//===----------------------------------------------------------------------===//
// Counting in workgroup memory
//===----------------------------------------------------------------------===//

/// Sets the bits of `bits` in element `position`, an i32, of a contiguous
/// buffer. Orders no other access.
static void atomicOr(ThreadBuilder &b, Value memref, Value position,
                     Value bits) {
  constexpr int64_t bytes = 4;
  Value address = memref::ExtractAlignedPointerAsIndexOp::create(b, memref);
  address = b.add(address, b.mul(b.toIndex(position), b.index(bytes)));
  Value pointer =
      LLVM::IntToPtrOp::create(b, LLVM::LLVMPointerType::get(b.getContext()),
                               b.castInt(address, b.getI64Type()));
  LLVM::AtomicRMWOp::create(b, LLVM::AtomicBinOp::_or, pointer, bits,
                            LLVM::AtomicOrdering::monotonic, "device", bytes);
}

namespace {
/// Emits how a block adds the pairs of its tokens to counts that no other block
/// touches. A thread has a token of a tile, a warp a word of each expert.
class PairCounts {
public:
  PairCounts(ThreadBuilder &b, AdjacencyUpdateOp op, BlockShape block,
             Value counts)
      : b(b), op(op), counts(counts), block(block),
        workers(Workers::ofBlock(b, block)), experts(getNumExperts(op)),
        numPairs(getNumPairs(experts)), numWords(block.numThreads / kWarpSize),
        width(std::gcd(numWords, 4)) {
    words = memref::AllocOp::create(
        b, MemRefType::get({experts * numWords}, b.getI32Type()));
    Value thread = b.toI32(workers.thread);
    lane = b.op<arith::RemUIOp>(thread, b.i32(kWarpSize));
    warp = b.op<arith::DivUIOp>(thread, b.i32(kWarpSize));
  }

  /// Counts the tokens begin .. end.
  void emit(Value begin, Value end);

private:
  void clear(Value buffer, int64_t size) {
    b.loop(workers.thread, b.index(size), workers.count,
           [&](Value i) { memref::StoreOp::create(b, b.i32(0), buffer, i); });
  }
  void markChoices(Value token, Value isToken);
  Value markSome(Value token, Value isToken, Value first, Value numPlaces);
  void addPairs(Value first);
  Value countCommon(Value row, Value column);

  ThreadBuilder &b;
  AdjacencyUpdateOp op;
  Value counts;
  BlockShape block;
  Workers workers;
  int64_t experts, numPairs, numWords, width;
  /// words[expert, warp], a bit for each lane.
  Value words, lane, warp;
};
} // namespace

/// Marks `kChoicesAtATime` choices of the lane's token from place `first` on;
/// returns whether one of them is an expert.
Value PairCounts::markSome(Value token, Value isToken, Value first,
                           Value numPlaces) {
  SmallVector<std::pair<Value, Value>> choices;
  Value last = b.sub(numPlaces, b.i32(1));
  for (int64_t i = 0; i < kChoicesAtATime; ++i) {
    Value place = b.add(first, b.i32(i));
    auto [expert, isExpert] =
        readExpert(b, op, token, b.minSigned(place, last));
    Value exists = b.compare(CmpIPredicate::slt, place, numPlaces);
    choices.emplace_back(expert, b.both(exists, isExpert));
  }
  Value any = b.boolean(false), bit = b.op<arith::ShLIOp>(b.i32(1), lane);
  for (auto [expert, isExpert] : choices) {
    isExpert = b.both(isExpert, isToken);
    b.ifThen(isExpert, [&, expert = expert] {
      Value place = b.add(b.mul(expert, b.i32(numWords)), warp);
      atomicOr(b, words, place, bit);
    });
    any = b.either(any, isExpert);
  }
  return any;
}

void PairCounts::markChoices(Value token, Value isToken) {
  if (Value mask = op.getMask())
    isToken = b.both(isToken, memref::LoadOp::create(b, mask, token));
  Value places = memref::DimOp::create(b, op.getIndices(), b.index(1));
  Value any =
      b.loop(b.index(0), places, kChoicesAtATime, ValueRange{b.boolean(false)},
             [&](Value first, ValueRange any) -> SmallVector<Value> {
               Value some =
                   markSome(token, isToken, b.toI32(first), b.toI32(places));
               return {b.either(any[0], some)};
             })[0];
  Value numTokens = b.countBits(b.ballot(any));
  b.ifThen(b.compare(CmpIPredicate::eq, lane, b.i32(0)),
           [&] { b.atomicAdd(counts, b.i32(numPairs), numTokens); });
}

/// The tokens of the tile that chose both experts.
Value PairCounts::countCommon(Value row, Value column) {
  auto type = VectorType::get({width}, b.getI32Type());
  auto readWords = [&](Value expert, int64_t first) -> Value {
    Value place = b.add(b.mul(expert, b.i32(numWords)), b.i32(first));
    return vector::LoadOp::create(b, type, words, b.toIndex(place),
                                  /*nontemporal=*/false,
                                  llvm::MaybeAlign(width * sizeof(int32_t)));
  };
  Value sum = b.i32(0);
  for (int64_t first = 0; first < numWords; first += width) {
    Value common = b.both(readWords(row, first), readWords(column, first));
    for (int64_t i = 0; i < width; ++i)
      sum = b.add(sum, b.countBits(vector::ExtractOp::create(b, common, i)));
  }
  return sum;
}

/// Adds the tile's tokens to `kPairsAtATime` pairs of the thread.
void PairCounts::addPairs(Value first) {
  SmallVector<std::array<Value, 3>> found;
  for (int64_t i = 0; i < kPairsAtATime; ++i) {
    Value position = b.add(first, b.i32(i * workers.count));
    Value isPair = b.compare(CmpIPredicate::slt, position, b.i32(numPairs));
    // No other pair, which another thread may be writing.
    position = b.select(isPair, position, first);
    auto [row, column] = getPair(b, experts, position);
    if (!op.getDiagonal())
      isPair = b.both(isPair, b.compare(CmpIPredicate::ne, row, column));
    Value old = memref::LoadOp::create(b, counts, b.toIndex(position));
    found.push_back({isPair, position, b.add(old, countCommon(row, column))});
  }
  for (auto [isPair, position, count] : found)
    b.ifThen(isPair, [&, position = position, count = count] {
      memref::StoreOp::create(b, count, counts, b.toIndex(position));
    });
}

void PairCounts::emit(Value begin, Value end) {
  clear(counts, numPairs + 1);
  b.loop(begin, end, block.numThreads, [&](Value first) {
    clear(words, experts * numWords);
    gpu::BarrierOp::create(b);
    Value token = b.add(first, workers.thread);
    Value isToken = b.compare(CmpIPredicate::ult, token, end);
    token = b.op<arith::MinUIOp>(token, b.sub(end, b.index(1)));
    markChoices(token, isToken);
    gpu::BarrierOp::create(b);
    b.loop(workers.thread, b.index(numPairs), kPairsAtATime * workers.count,
           [&](Value first) { addPairs(b.toI32(first)); });
    gpu::BarrierOp::create(b);
  });
}

//===----------------------------------------------------------------------===//
// Counting in global memory
//===----------------------------------------------------------------------===//

namespace {
/// Emits what one lane does for the tokens of its group: G >= k lanes take a
/// token, lane a holds its a-th expert, and every pair of experts adds 1.
class PairAtomics {
public:
  PairAtomics(ThreadBuilder &b, AdjacencyUpdateOp op, Value counts,
              Workers workers)
      : b(b), op(op), counts(counts),
        numSelected(cast<MemRefType>(op.getIndices().getType()).getDimSize(1)),
        lanes(std::min<int64_t>(llvm::PowerOf2Ceil(numSelected), kWarpSize)),
        workers(workers) {}

  /// Counts the tokens begin .. end.
  void emit(Value begin, Value end);

private:
  void readExperts(Value token, Value isToken);
  void dropRepeated();
  void addPairs();
  /// The value of lane `place % lanes` of the group in slot `place / lanes`.
  Value fromPlace(ArrayRef<Value> slots, int64_t place) {
    Value source = b.add(firstLane, b.i32(place % lanes));
    return b.shuffleFrom(slots[place / lanes], source);
  }
  void addOne(Value condition, Value position) {
    b.ifThen(condition, [&] { b.atomicAdd(counts, position, b.i32(1)); });
  }
  Value isNone(Value expert) {
    return b.compare(CmpIPredicate::slt, expert, b.i32(0));
  }

  ThreadBuilder &b;
  AdjacencyUpdateOp op;
  Value counts;
  int64_t numSelected, lanes;
  Workers workers;
  /// The lane in its group and the group's first lane in the warp.
  Value lane, firstLane;
  /// The experts of the places lane, lane + lanes, ... of the token; -1 for
  /// none.
  SmallVector<Value> experts;
};
} // namespace

void PairAtomics::readExperts(Value token, Value isToken) {
  experts.clear();
  if (Value mask = op.getMask())
    isToken = b.both(isToken, memref::LoadOp::create(b, mask, token));
  for (int64_t first = 0; first < numSelected; first += lanes) {
    Value place = b.add(lane, b.i32(first));
    Value exists = isToken;
    if (first + lanes > numSelected) {
      exists = b.both(exists,
                      b.compare(CmpIPredicate::slt, place, b.i32(numSelected)));
      place = b.minSigned(place, b.i32(numSelected - 1));
    }
    auto [expert, isExpert] = readExpert(b, op, token, place);
    experts.push_back(b.select(b.both(exists, isExpert), expert, b.i32(-1)));
  }
}

/// An expert that the token selected at an earlier place is no further element
/// of the set.
void PairAtomics::dropRepeated() {
  SmallVector<Value> distinct(experts);
  for (int64_t place = 0; place + 1 < numSelected; ++place) {
    Value earlier = fromPlace(experts, place);
    for (int64_t slot = place / lanes; slot < int64_t(experts.size()); ++slot) {
      Value isLater = b.compare(CmpIPredicate::sgt,
                                b.add(lane, b.i32(slot * lanes)), b.i32(place));
      Value isSame = b.compare(CmpIPredicate::eq, experts[slot], earlier);
      distinct[slot] =
          b.select(b.both(isLater, isSame), b.i32(-1), distinct[slot]);
    }
  }
  experts = distinct;
}

void PairAtomics::addPairs() {
  Value hasExpert = b.boolean(false);
  for (int64_t place = 0; place < numSelected; ++place) {
    Value other = fromPlace(experts, place);
    Value isOther = b.negate(isNone(other));
    hasExpert = b.either(hasExpert, isOther);
    for (Value expert : experts) {
      // Each pair once: by the lane of its larger expert.
      CmpIPredicate isLarger =
          op.getDiagonal() ? CmpIPredicate::sge : CmpIPredicate::sgt;
      Value counted = b.both(isOther, b.compare(isLarger, expert, other));
      addOne(counted, getPairPosition(b, getNumExperts(op), expert, other));
    }
  }
  Value isFirst = b.compare(CmpIPredicate::eq, lane, b.i32(0));
  addOne(b.both(isFirst, hasExpert), b.i32(getNumPairs(getNumExperts(op))));
}

/// for base in begin..end step groups:
///   token = base + group      (all lanes stay in the loop: shuffles)
void PairAtomics::emit(Value begin, Value end) {
  Value laneInWarp =
      b.toI32(b.op<arith::RemUIOp>(workers.thread, b.index(kWarpSize)));
  lane = b.op<arith::RemUIOp>(laneInWarp, b.i32(lanes));
  firstLane = b.sub(laneInWarp, lane);
  Value group = b.op<arith::DivUIOp>(workers.thread, b.index(lanes));
  b.loop(begin, end, workers.count / lanes, [&](Value base) {
    Value token = b.add(base, group);
    Value isToken = b.compare(CmpIPredicate::ult, token, end);
    token = b.op<arith::MinUIOp>(token, b.sub(end, b.index(1)));
    readExperts(token, isToken);
    dropRepeated();
    addPairs();
  });
}

//===----------------------------------------------------------------------===//
// Entry points
//===----------------------------------------------------------------------===//

void mlir::moe::countInBlock(ThreadBuilder &b, AdjacencyUpdateOp op,
                             BlockShape block, Value counts, Value begin,
                             Value end) {
  PairCounts(b, op, block, counts).emit(begin, end);
}

void mlir::moe::countByAtomics(ThreadBuilder &b, AdjacencyUpdateOp op,
                               Workers workers, Value counts) {
  Value end = memref::DimOp::create(b, op.getIndices(), b.index(0));
  PairAtomics(b, op, counts, workers).emit(b.index(0), end);
}
