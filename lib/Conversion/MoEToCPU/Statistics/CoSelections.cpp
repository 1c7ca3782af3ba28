//===- CoSelections.cpp - moe.co_selections -------------------------------===//
//
// Matches moe.co_selections on buffers: one is added to the count of every pair
// of distinct experts that a token selected, in one of two ways.
//
//   few tokens   token by token, k x k increments each
//   many tokens  every expert's tokens as bits, then a pair of experts at a
//                time: the bits that both have. That costs e x e / 2 pairs a
//                block of tokens, and next to nothing a token
//
// Counts are integers, so that no order of the tokens changes a bit.
//
//===----------------------------------------------------------------------===//

#include "Emit/Emitter.h"
#include "Patterns.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
class CoSelectionsKernel {
public:
  CoSelectionsKernel(Emitter &e, CoSelectionsOp op) : e(e), op(op) {}
  void emit();

private:
  void countTokens(Value first, Value end);
  void countToken(Value token);
  void readSelection(Value token);
  void increment(Value memref, ValueRange position) {
    Value one = e.constantInt(e.getI32Type(), 1);
    e.store(e.add(e.load(memref, position), one), memref, position);
  }

  Emitter &e;
  CoSelectionsOp op;
  Value numSelected, numExperts, counts;
  /// The experts of the token at hand as indices, -1 for none.
  Value selection;
};

/// Counts blocks of tokens as bits.
class BitCounter {
public:
  BitCounter(Emitter &e, CoSelectionsOp op);

  /// From how many tokens of a block on this is the quicker way; null where no
  /// block has as many.
  std::optional<int64_t> getFewestTokens();
  int64_t getBlockTokens() const { return kWordBits * numWords; }
  void allocate();
  void countBlock(Value first, Value count);

private:
  static constexpr int64_t kWordBits = 64;

  void setBits(Value first, Value count);
  void countPairs();
  Value countPair(Value row, Value column);
  VectorType words() {
    return VectorType::get({wordsPerVector}, e.getI64Type());
  }

  Emitter &e;
  CoSelectionsOp op;
  int64_t numExperts, numPlaces, wordsPerVector, numWords = 0;
  /// `[e + 1, numWords]`; the last row takes what is no expert.
  Value bits;
};
} // namespace

//===----------------------------------------------------------------------===//
// Token by token
//===----------------------------------------------------------------------===//

/// The distinct experts of a token. One that is out of range or repeated is no
/// element of the set.
void CoSelectionsKernel::readSelection(Value token) {
  e.loop(e.index(0), numSelected, 1, [&](Value place) {
    Value expert = e.toIndex(e.load(op.getIndices(), {token, place}));
    Value isExpert = e.compare(arith::CmpIPredicate::ult, expert, numExperts);
    Value isNew = e.loop(
        e.index(0), place, 1, {isExpert},
        [&](Value earlier, ValueRange valid) -> Values {
          return {e.both(valid[0],
                         e.compare(arith::CmpIPredicate::ne,
                                   e.load(selection, {earlier}), expert))};
        })[0];
    e.store(e.select(isNew, expert, e.index(-1)), selection, {place});
  });
}

void CoSelectionsKernel::countToken(Value token) {
  readSelection(token);
  Value none = e.index(0);
  auto isExpert = [&](Value expert) {
    return e.compare(arith::CmpIPredicate::sge, expert, none);
  };
  e.loop(none, numSelected, 1, [&](Value first) {
    Value row = e.load(selection, {first});
    e.ifThen(isExpert(row), [&] {
      e.loop(none, numSelected, 1, [&](Value second) {
        Value column = e.load(selection, {second});
        e.ifThen(isExpert(column), [&] { increment(counts, {row, column}); });
      });
    });
  });
}

void CoSelectionsKernel::countTokens(Value first, Value end) {
  e.loop(first, end, 1, [&](Value token) {
    if (Value mask = op.getMask())
      e.ifThen(e.load(mask, {token}), [&] { countToken(token); });
    else
      countToken(token);
  });
}

//===----------------------------------------------------------------------===//
// As bits
//===----------------------------------------------------------------------===//

BitCounter::BitCounter(Emitter &e, CoSelectionsOp op)
    : e(e), op(op),
      numExperts(cast<MemRefType>(op.getOuts()[0].getType()).getDimSize(0)),
      numPlaces(cast<MemRefType>(op.getIndices().getType()).getDimSize(1)),
      wordsPerVector(e.width / 2) {
  // Half of the bits of all experts fit into the first cache.
  constexpr int64_t blockBytes = 32 * 1024;
  if (!ShapedType::isDynamic(numExperts))
    numWords = std::max<int64_t>(
        wordsPerVector,
        llvm::alignDown(blockBytes / 8 / std::max<int64_t>(numExperts, 1),
                        wordsPerVector));
}

std::optional<int64_t> BitCounter::getFewestTokens() {
  if (ShapedType::isDynamic(numExperts) || ShapedType::isDynamic(numPlaces))
    return std::nullopt;
  // Instructions: an increment takes two, with the search for repetitions; a
  // bit takes three; a vector of a pair takes three and its sum twelve.
  int64_t saved = numPlaces * (2 * numPlaces - 3);
  int64_t pairs =
      numExperts * (numExperts + 1) / 2 * (3 * numWords / wordsPerVector + 12);
  if (saved <= 0)
    return std::nullopt;
  int64_t fewest = llvm::divideCeil(pairs, saved);
  FailureOr<int64_t> most = ValueBoundsConstraintSet::computeConstantBound(
      presburger::BoundType::UB, {op.getIndices(), int64_t(0)},
      /*stopCondition=*/nullptr, /*closedUB=*/true);
  int64_t available =
      succeeded(most) ? std::min(*most, getBlockTokens()) : getBlockTokens();
  return fewest <= available ? std::optional(fewest) : std::nullopt;
}

void BitCounter::allocate() {
  bits = e.scratch({e.getIndexAttr(numExperts + 1), e.getIndexAttr(numWords)},
                   e.getI64Type());
}

void BitCounter::countBlock(Value first, Value count) {
  e.loop(e.index(0), e.index(numExperts), 1, [&](Value expert) {
    e.loop(e.index(0), e.index(numWords), wordsPerVector, [&](Value word) {
      e.storeVector(e.constantInt(words(), 0), bits, {expert, word});
    });
  });
  setBits(first, count);
  countPairs();
}

void BitCounter::setBits(Value first, Value count) {
  Value wordBits = e.index(kWordBits), none = e.index(numExperts);
  e.loop(e.index(0), count, 1, [&](Value slot) {
    Value token = e.add(first, slot);
    Value word = arith::DivUIOp::create(e, slot, wordBits);
    Value place =
        e.castInt(arith::RemUIOp::create(e, slot, wordBits), e.getI64Type());
    Value bit = e.constantInt(e.getI64Type(), 1);
    if (Value mask = op.getMask())
      bit = arith::ExtUIOp::create(e, e.getI64Type(), e.load(mask, {token}));
    bit = arith::ShLIOp::create(e, bit, place);
    e.loop(e.index(0), e.index(numPlaces), 1, [&](Value place) {
      Value expert = e.toIndex(e.load(op.getIndices(), {token, place}));
      Value isExpert = e.compare(arith::CmpIPredicate::ult, expert, none);
      Values position{e.select(isExpert, expert, none), word};
      e.store(e.either(e.load(bits, position), bit), bits, position);
    });
  });
}

void BitCounter::countPairs() {
  Value counts = op.getOuts()[0], one = e.index(1);
  auto add = [&](Value count, ValueRange position) {
    e.store(e.add(e.load(counts, position), count), counts, position);
  };
  e.loop(e.index(0), e.index(numExperts), 1, [&](Value row) {
    add(countPair(row, row), {row, row});
    e.loop(e.add(row, one), e.index(numExperts), 1, [&](Value column) {
      Value count = countPair(row, column);
      add(count, {row, column});
      add(count, {column, row});
    });
  });
}

/// The tokens of the block that selected both experts.
Value BitCounter::countPair(Value row, Value column) {
  Value zero = e.constantInt(words(), 0);
  Value sums = e.loop(e.index(0), e.index(numWords), wordsPerVector, {zero},
                      [&](Value word, ValueRange sums) -> Values {
                        auto load = [&](Value expert) -> Value {
                          return vector::LoadOp::create(
                              e, words(), bits, ValueRange{expert, word});
                        };
                        Value both = e.both(load(row), load(column));
                        return {e.add(sums[0], math::CtPopOp::create(e, both))};
                      })[0];
  Value sum = vector::ReductionOp::create(e, vector::CombiningKind::ADD, sums);
  return arith::TruncIOp::create(e, e.getI32Type(), sum);
}

//===----------------------------------------------------------------------===//
// Both
//===----------------------------------------------------------------------===//

void CoSelectionsKernel::emit() {
  counts = op.getOuts()[0];
  numSelected = e.dim(op.getIndices(), 1);
  numExperts = e.dim(counts, 0);
  Value numTokens = e.dim(op.getIndices(), 0);
  OpFoldResult places = getSize(e, op.getIndices(), 1);
  BitCounter bits(e, op);
  std::optional<int64_t> fewest = bits.getFewestTokens();
  e.withScratch(isa<Value>(places), [&] {
    selection = e.scratch({places}, e.getIndexType());
    if (!fewest)
      return countTokens(e.index(0), numTokens);
    bits.allocate();
    int64_t block = bits.getBlockTokens();
    e.loop(e.index(0), numTokens, block, [&](Value first) {
      Value count = e.minSigned(e.sub(numTokens, first), e.index(block));
      Value areMany =
          e.compare(arith::CmpIPredicate::sge, count, e.index(*fewest));
      e.ifElse(
          areMany, TypeRange(),
          [&]() -> Values { return bits.countBlock(first, count), Values(); },
          [&]() -> Values {
            return countTokens(first, e.add(first, count)), Values();
          });
    });
  });
}

void mlir::moe::populateCoSelectionsToCPUPatterns(RewritePatternSet &patterns,
                                                  const CPUTarget &options) {
  patterns.add<KernelPattern<CoSelectionsOp, CoSelectionsKernel, matchBuffers>>(
      patterns.getContext(), options);
}
