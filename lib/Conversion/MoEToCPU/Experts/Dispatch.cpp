//===- Dispatch.cpp - moe.dispatch as a counting sort ---------------------===//
//
// Matches moe.dispatch on buffers. Assignments are visited in the order in
// which they ask for a row (all first choices, then all second choices) while
// one counter an expert hands the rows out:
//
//   rank = counts[expert]++          unless the expert is full
//   offsets[e + 1] = offsets[e] + counts[e]
//   slot = offsets[expert] + rank
//
// That is O(N k + E) on integers, and one thread visits all assignments, so the
// result does not depend on the number of threads. A priority reorders the
// tokens, and gates the assignments, by a radix sort of 32-bit keys: four
// passes of one byte, each stable, so that ties stay in order.
//
//===----------------------------------------------------------------------===//

#include "Emit/Emitter.h"
#include "Patterns.h"

#include "MoE/Dialect/MoE/IR/DispatchCapacity.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/Utils/SortableKeys.h"

using namespace mlir;
using namespace mlir::moe;

static constexpr int64_t kDigitBits = 8;
static constexpr int64_t kNumDigits = 1 << kDigitBits;
static constexpr int64_t kKeyBits = 32;

namespace {
/// Sorts by scores, digit by digit of their keys.
class ScoreSort {
public:
  explicit ScoreSort(Emitter &e) : e(e) {}

  /// Memory for so many numbers, which lives until `free`; too large for the
  /// stack.
  Value allocate(Value size);
  void free();
  /// keys[position] = an integer that is smaller, as an unsigned number, the
  /// earlier `score` comes: descending, -0 equal to +0 (E2), NaN behind -inf
  /// (E3).
  void storeKey(Value score, Value keys, Value position);
  /// order = the positions 0 .. count - 1 by ascending key.
  void sort(Value order, Value keys, Value count);

private:
  void sortByDigit(Value from, Value to, Value keys, Value count, int64_t bit);
  Value i32(int64_t value) { return e.constantInt(e.getI32Type(), value); }

  Emitter &e;
  Values allocations;
};

class DispatchKernel {
public:
  DispatchKernel(Emitter &e, DispatchOp op) : e(e), op(op), scores(e) {}
  void emit();

private:
  struct Assignment {
    Value token, place;
  };

  // By score.
  void sortTokens();
  void keepHighestGates();

  // Handing out rows.
  Value readExpert(Assignment a);
  Value readSlot(Assignment a) {
    return e.toIndex(e.load(op.getSlotsInit(), {a.token, a.place}));
  }
  void writeSlot(Value slot, Assignment a) {
    e.store(e.castInt(slot, slotType), op.getSlotsInit(), {a.token, a.place});
  }
  Value readCount(Value expert) {
    return e.toIndex(e.load(op.getCountsInit(), {expert}));
  }
  void writeCount(Value count, Value expert) {
    writeNumber(count, op.getCountsInit(), expert);
  }
  /// As an integer of the elements of `buffer`.
  void writeNumber(Value number, Value buffer, Value at) {
    Type element = cast<MemRefType>(buffer.getType()).getElementType();
    e.store(e.castInt(number, element), buffer, {at});
  }
  Value getCapacity();
  void clearCounts();
  void takeRow(Assignment a, bool onlyMarked);
  void takeRows();
  void computeOffsets();
  void addOffsets();

  Value i32(int64_t value) { return e.constantInt(e.getI32Type(), value); }
  Value isAtLeastZero(Value index) {
    return e.compare(arith::CmpIPredicate::sge, index, e.index(0));
  }

  Emitter &e;
  DispatchOp op;
  ScoreSort scores;
  Type slotType;
  Value numTokens, numPlaces, numExperts;
  /// Rows an expert may have; null without a bound.
  Value capacity;
  /// Tokens by priority; null for token order.
  Value tokenOrder;
};
} // namespace

//===----------------------------------------------------------------------===//
// Sorting by a score
//===----------------------------------------------------------------------===//

Value ScoreSort::allocate(Value size) {
  SmallVector<int64_t> sizes;
  Values dynamicSizes;
  dispatchIndexOpFoldResults({OpFoldResult(size)}, dynamicSizes, sizes);
  allocations.push_back(memref::AllocOp::create(
      e, MemRefType::get(sizes, e.getI32Type()), dynamicSizes));
  return allocations.back();
}

void ScoreSort::free() {
  for (Value memory : allocations)
    memref::DeallocOp::create(e, memory);
}

void ScoreSort::storeKey(Value score, Value keys, Value position) {
  Value key = toSortableKey(e, score);
  // Reversed, and unsigned.
  key = arith::XOrIOp::create(e, key, i32(0x7fffffff));
  e.store(key, keys, {position});
}

/// One stable pass over the digit at `bit`.
void ScoreSort::sortByDigit(Value from, Value to, Value keys, Value count,
                            int64_t bit) {
  Value starts = e.scratch({e.getIndexAttr(kNumDigits)}, e.getI32Type());
  Value digits = e.index(kNumDigits);
  e.loop(e.index(0), digits, 1,
         [&](Value digit) { e.store(i32(0), starts, {digit}); });
  auto readDigit = [&](Value element) {
    Value key = e.load(keys, {element});
    Value shifted = arith::ShRUIOp::create(e, key, i32(bit));
    return e.toIndex(e.both(shifted, i32(kNumDigits - 1)));
  };
  e.loop(e.index(0), count, 1, [&](Value element) {
    Value digit = readDigit(element);
    e.store(e.add(e.load(starts, {digit}), i32(1)), starts, {digit});
  });
  e.loop(e.index(0), digits, 1, {i32(0)},
         [&](Value digit, ValueRange start) -> Values {
           Value size = e.load(starts, {digit});
           e.store(start[0], starts, {digit});
           return {e.add(start[0], size)};
         });
  e.loop(e.index(0), count, 1, [&](Value position) {
    Value element = e.load(from, {position});
    Value digit = readDigit(e.toIndex(element));
    Value target = e.load(starts, {digit});
    e.store(element, to, {e.toIndex(target)});
    e.store(e.add(target, i32(1)), starts, {digit});
  });
}

void ScoreSort::sort(Value order, Value keys, Value count) {
  e.loop(e.index(0), count, 1, [&](Value position) {
    e.store(e.castInt(position, e.getI32Type()), order, {position});
  });
  Value other = allocate(count);
  static_assert(kKeyBits / kDigitBits % 2 == 0, "the last pass fills `order`");
  for (int64_t bit = 0; bit < kKeyBits; bit += 2 * kDigitBits) {
    sortByDigit(order, other, keys, count, bit);
    sortByDigit(other, order, keys, count, bit + kDigitBits);
  }
}

//===----------------------------------------------------------------------===//
// Assignments by score
//===----------------------------------------------------------------------===//

void DispatchKernel::sortTokens() {
  tokenOrder = scores.allocate(numTokens);
  Value keys = scores.allocate(numTokens);
  e.loop(e.index(0), numTokens, 1, [&](Value token) {
    scores.storeKey(e.load(op.getPriority(), {token}), keys, token);
  });
  scores.sort(tokenOrder, keys, numTokens);
}

/// Marks the assignments that their experts keep with slot 0, the others with
/// -1: the `capacity` ones of each expert with the highest gates.
void DispatchKernel::keepHighestGates() {
  Value count = e.mul(numTokens, numPlaces);
  Value order = scores.allocate(count);
  Value keys = scores.allocate(count);
  // Positions count first choices first, so that ties stay in that order.
  e.loop(e.index(0), numPlaces, 1, [&](Value place) {
    Value first = e.mul(place, numTokens);
    e.loop(e.index(0), numTokens, 1, [&](Value token) {
      scores.storeKey(e.load(op.getGates(), {token, place}), keys,
                      e.add(first, token));
    });
  });
  scores.sort(order, keys, count);
  clearCounts();
  e.loop(e.index(0), count, 1, [&](Value position) {
    Value element = e.toIndex(e.load(order, {position}));
    takeRow({arith::RemUIOp::create(e, element, numTokens),
             arith::DivUIOp::create(e, element, numTokens)},
            /*onlyMarked=*/false);
  });
}

//===----------------------------------------------------------------------===//
// Handing out rows
//===----------------------------------------------------------------------===//

/// The physical expert of an assignment, -1 for none.
Value DispatchKernel::readExpert(Assignment a) {
  Type index = e.getIndexType();
  Value none = e.index(-1);
  auto inRange = [&](Value number, Value size) {
    // As an unsigned number a negative one is large.
    return e.compare(arith::CmpIPredicate::ult, number, size);
  };
  Value expert = e.toIndex(e.load(op.getIndices(), {a.token, a.place}));
  if (Value map = op.getExpertMap())
    expert = e.ifElse(
        inRange(expert, e.dim(map, 0)), index,
        [&]() -> Values { return {e.toIndex(e.load(map, {expert}))}; },
        [&]() -> Values { return {none}; })[0];
  Value isExpert = inRange(expert, numExperts);
  if (Value mask = op.getMask())
    isExpert = e.both(isExpert, e.load(mask, {a.token}));
  return e.select(isExpert, expert, none);
}

/// The bound on rows: the operand, or what follows from the factor.
Value DispatchKernel::getCapacity() {
  if (Value given = op.getCapacity())
    return e.toIndex(given);
  return buildCapacity(e, op, numTokens, numExperts, numPlaces);
}

void DispatchKernel::clearCounts() {
  e.loop(e.index(0), numExperts, 1,
         [&](Value expert) { writeCount(e.index(0), expert); });
}

/// slot = counts[expert]++, or -1 for an assignment without an expert, to a
/// full one, or, with `onlyMarked`, with slot -1.
void DispatchKernel::takeRow(Assignment a, bool onlyMarked) {
  Value expert = readExpert(a);
  Value asks = isAtLeastZero(expert);
  if (onlyMarked)
    asks = e.both(asks, isAtLeastZero(readSlot(a)));
  Type index = e.getIndexType();
  Value rank = e.ifElse(
      asks, index,
      [&]() -> Values {
        Value rank = readCount(expert);
        if (!capacity) {
          writeCount(e.add(rank, e.index(1)), expert);
          return {rank};
        }
        Value hasRoom = e.compare(arith::CmpIPredicate::slt, rank, capacity);
        writeCount(e.select(hasRoom, e.add(rank, e.index(1)), rank), expert);
        return {e.select(hasRoom, rank, e.index(-1))};
      },
      [&]() -> Values { return {e.index(-1)}; })[0];
  writeSlot(rank, a);
}

void DispatchKernel::takeRows() {
  bool isMarked = op.getDrop() == DropRule::Probs && capacity;
  if (isMarked)
    keepHighestGates();
  clearCounts();
  e.loop(e.index(0), numPlaces, 1, [&](Value place) {
    e.loop(e.index(0), numTokens, 1, [&](Value position) {
      Value token =
          tokenOrder ? e.toIndex(e.load(tokenOrder, {position})) : position;
      takeRow({token, place}, isMarked);
    });
  });
}

/// offsets[b] = sum of the counts below, each rounded up to the alignment.
void DispatchKernel::computeOffsets() {
  Value end =
      e.loop(e.index(0), numExperts, 1, {e.index(0)},
             [&](Value expert, ValueRange start) -> Values {
               writeNumber(start[0], op.getOffsetsInit(), expert);
               Value rows = readCount(expert);
               if (int64_t alignment = op.getAlignment(); alignment != 1) {
                 Value blocks =
                     arith::CeilDivUIOp::create(e, rows, e.index(alignment));
                 rows = e.mul(blocks, e.index(alignment));
               }
               return {e.add(start[0], rows)};
             })[0];
  writeNumber(end, op.getOffsetsInit(), numExperts);
}

/// slot += offsets[expert]
void DispatchKernel::addOffsets() {
  e.loop(e.index(0), numTokens, 1, [&](Value token) {
    e.loop(e.index(0), numPlaces, 1, [&](Value place) {
      Assignment a{token, place};
      Value rank = readSlot(a);
      e.ifThen(isAtLeastZero(rank), [&] {
        Value start = e.toIndex(e.load(op.getOffsetsInit(), {readExpert(a)}));
        writeSlot(e.add(start, rank), a);
      });
    });
  });
}

void DispatchKernel::emit() {
  slotType = cast<MemRefType>(op.getSlotsInit().getType()).getElementType();
  numTokens = e.dim(op.getIndices(), 0);
  numPlaces = e.dim(op.getIndices(), 1);
  numExperts = e.dim(op.getCountsInit(), 0);
  capacity = getCapacity();
  if (op.getPriority())
    sortTokens();
  takeRows();
  computeOffsets();
  addOffsets();
  scores.free();
}

void mlir::moe::populateDispatchToCPUPatterns(RewritePatternSet &patterns,
                                              const CPUTarget &options) {
  patterns.add<KernelPattern<DispatchOp, DispatchKernel, matchBuffers>>(
      patterns.getContext(), options);
}
