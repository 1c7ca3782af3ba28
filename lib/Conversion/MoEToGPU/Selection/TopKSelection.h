//===- TopKSelection.h - Selection in one row -------------------*- C++ -*-===//
//
// A row of scores belongs to a group of G neighbouring lanes of one warp, which
// hold its experts as sortable keys in registers. Every lane keeps the P >= k
// highest of its own, P a power of two, and then the lanes exchange them:
//
//   for each P keys of the lane:   sort them        (Batcher's network)
//                                  kept = highest P of kept and them
//   for distance in 1, 2, .. < G:  kept = highest P of kept and the kept of
//                                         the lane at `distance`
//
// where the highest P of two sorted lists are the larger of kept[i] and
// other[P - 1 - i], a bitonic list that log P steps sort. No step branches or
// reads memory, and every lane ends with the same list.
//
// A key orders values as E1 to E5 say and then indices upwards, so that one
// unsigned comparison decides everything: NaN is below -inf, and 0, the key of
// no expert, below every key. 16-bit scores and the index share 32 bits; f32
// choice scores take 64.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKSELECTION_H
#define MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKSELECTION_H

#include "Emit/ThreadBuilder.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

//===----------------------------------------------------------------------===//
// The form of the selection
//===----------------------------------------------------------------------===//

/// What of topk_renorm's definition an op asks for.
struct SelectionForm {
  explicit SelectionForm(TopKRenormOp op);

  ScoreFunction function;
  /// The choice scores are the scores as given.
  bool choosesByScores;
  /// The scores as given have 16 bits and decide alone: keys are packed.
  bool hasPackedKeys;
  /// The gates are a softmax over the chosen experts of x (softmax) or of
  /// ln sigmoid(x) (sigmoid): nothing under- or overflows.
  bool gatesFromLogits;
  /// The maximum and the sum of exponentials of the whole row are needed.
  bool needsRowSoftmax;
};

/// How many lanes share a row and what each of them holds.
struct LaneShape {
  /// `availableLanes` is how many lanes the block has for each of its rows.
  LaneShape(TopKRenormOp op, int64_t availableLanes);

  /// The first expert of the lane's j-th place; the lane's is `lane * width`
  /// further.
  int64_t getFirstExpert(int64_t j) const {
    return j / width * lanes * width + j % width;
  }

  int64_t lanes;
  /// Experts that lie side by side in a lane: those of a 16-byte load, or 1.
  int64_t width;
  int64_t keysPerLane;
  /// Slot s of lane l is choice l * slotsPerLane + s.
  int64_t slotsPerLane;
};

//===----------------------------------------------------------------------===//
// Keys
//===----------------------------------------------------------------------===//

/// Keys of 64 bits: an f32 choice score, then the index inverted.
struct WideKeys {
  static Value make(ThreadBuilder &b, Value score, Value expert);
  static Value expertOf(ThreadBuilder &b, Value key);
  /// The score; 0 for a NaN.
  static Value scoreOf(ThreadBuilder &b, Value key);
  /// Whether the score is -inf.
  static Value isExcluded(ThreadBuilder &b, Value key);
  /// x as an unsigned integer of the same order (E1, E2, E3).
  static Value ordered(ThreadBuilder &b, Value x);
};

/// Keys of 32 bits: a score of 16 bits, then the index inverted.
class PackedKeys {
public:
  /// `type` is bf16 or f16.
  PackedKeys(ThreadBuilder &b, Type type) : b(b), type(type) {}

  /// Minus the two scores in a word, canonical: no -0, one NaN. The order of
  /// scores is that of falling values.
  Value negate(Value word);
  /// Keys' upper halves from a negated word.
  Value order(Value negated);
  /// The key of the lower or the upper half of an ordered word, for an expert
  /// that is a constant.
  Value make(Value orderedWord, bool upper, int64_t expert);
  Value expertOf(Value key);
  Value scoreOf(Value key);
  /// NaN if either half of `seen` or of the word is one; the others may change.
  Value mergeNaN(Value seen, Value negated);
  /// Whether a half of the word is a NaN.
  Value hasNaN(Value word);

private:
  Value assembly(StringRef text, ValueRange operands);

  ThreadBuilder &b;
  Type type;
};

/// Sorts `keys` downwards; their number is a power of two.
void sortKeys(ThreadBuilder &b, MutableArrayRef<Value> keys);
/// `kept` becomes the highest of both lists, sorted downwards like they are.
void keepHighest(ThreadBuilder &b, MutableArrayRef<Value> kept,
                 ArrayRef<Value> others);

//===----------------------------------------------------------------------===//
// One row
//===----------------------------------------------------------------------===//

/// Emits what one lane does for one row.
class RowSelection {
public:
  RowSelection(ThreadBuilder &b, TopKRenormOp op, LaneShape shape, Value lane)
      : b(b), op(op), form(op), shape(shape), numExperts(op.getNumExperts()),
        numSelected(op.getNumSelected()), lane(lane) {}

  /// Selects in row `row`; stores only where `isRow` holds.
  void emit(Value row, Value isRow);

private:
  // Scores
  void loadScores();
  void widenWords();
  void findNaN();
  void computeRowSoftmax();
  Value exists(int64_t place);

  // Choice
  SmallVector<Value> getChoiceScores();
  SmallVector<Value> findDropped(ArrayRef<Value> choice);
  SmallVector<Value> findDroppedOfWarp(ArrayRef<Value> choice, int64_t lanes);
  /// How many lanes share a group in each of their accesses, where these are
  /// lanes of a warp that has the row alone; 0 otherwise.
  int64_t getLanesOfGroup();
  SmallVector<Value> getGroupValues(ArrayRef<Value> choice);
  /// Condition that the lane's j-th expert belongs to `group`; null if it
  /// cannot.
  Value isInGroup(int64_t j, int64_t group);
  SmallVector<Value> makePackedKeys();
  SmallVector<Value> makeWideKeys(ArrayRef<Value> choice);
  SmallVector<Value> keepHighestOfLane(ArrayRef<Value> keys);
  void addLane(MutableArrayRef<Value> kept);
  void select();
  void selectByRounds(SmallVector<Value> keys);
  void takeSlots(ArrayRef<Value> keys);
  void readForced();

  // Gates
  SmallVector<Value> computeGates();
  SmallVector<Value> renormalise(ArrayRef<Value> values, Value floor);
  Value asIndex(Value id, Type type);
  void storeSlots(ArrayRef<Value> gates, Value isRow);
  void storeEach(ArrayRef<Value> values, Value memref, Value isRow);
  bool hasWideStores();

  /// The score function at x.
  Value score(Value x);
  Value loadScore(Value expert);
  Value maximum(Value lhs, Value rhs) { return b.maximumNumber(lhs, rhs); }
  Value reduceMax(Value x) {
    return b.reduceLanes(x, shape.lanes,
                         [&](Value l, Value r) { return maximum(l, r); });
  }
  Value reduceSum(Value x) {
    return b.reduceLanes(x, shape.lanes,
                         [&](Value l, Value r) { return b.add(l, r); });
  }
  /// Whether a condition holds in any lane of the group.
  Value anyLane(Value condition);
  /// -inf becomes 0, so that subtracting it from -inf does not make a NaN.
  Value finiteOrZero(Value x) {
    Value empty = b.compare(arith::CmpFPredicate::OEQ, x, b.negInfinity());
    return b.select(empty, b.f32(0.0), x);
  }
  SmallVector<Value> at(Value memref, int64_t numInner, Value inner);
  /// The choice that a slot of the lane holds.
  Value rankOf(int64_t slot) {
    return b.add(b.mul(lane, b.i32(shape.slotsPerLane)), b.i32(slot));
  }

  ThreadBuilder &b;
  TopKRenormOp op;
  SelectionForm form;
  LaneShape shape;
  int64_t numExperts, numSelected;
  Value lane, row;

  /// Two neighbouring 16-bit scores each, or one in the lower half; their
  /// negated form.
  SmallVector<Value> words, negated;
  /// For each key of the lane: its expert and its score.
  SmallVector<Value> experts, scores;
  /// The row holds a NaN; the maximum and the sum of exponentials of the row.
  Value hasNaN, rowMax, rowSum;
  /// For each slot of the lane: whether it is one of the k (null if always),
  /// the expert, its score where known, and whether it has a gate (null if
  /// always).
  SmallVector<Value> isSlot, chosen, chosenScores, hasGate;
  /// The ids that the caller forces, as given.
  SmallVector<Value> forced;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKSELECTION_H
