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
// The scores of a row are read by RowScores, its experts chosen by
// ExpertChoice, which ExpertGroups helps where groups of experts drop out
// first, and gates computed and stored by SlotGates. Here is what all of them
// know.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKSELECTION_H
#define MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKSELECTION_H

#include "Emit/ThreadBuilder.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

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

/// The lanes that share a row, as one of them sees them.
struct RowLanes {
  RowLanes(ThreadBuilder &b, TopKRenormOp op, LaneShape shape, Value lane,
           Value row)
      : b(b), op(op), form(op), shape(shape), numExperts(op.getNumExperts()),
        numSelected(op.getNumSelected()), lane(lane), row(row) {}

  Value maximum(Value lhs, Value rhs) const {
    return b.maximumNumber(lhs, rhs);
  }
  Value reduceMax(Value x) const {
    return b.reduceLanes(x, shape.lanes,
                         [&](Value l, Value r) { return maximum(l, r); });
  }
  Value reduceSum(Value x) const {
    return b.reduceLanes(x, shape.lanes,
                         [&](Value l, Value r) { return b.add(l, r); });
  }
  /// Whether a condition holds in any of the lanes.
  Value anyLane(Value condition) const;
  /// Where the row's element `inner` lies in `memref`, or, with no inner dim,
  /// the row's own.
  SmallVector<Value> at(Value memref, int64_t numInner, Value inner) const;
  /// The choice that a slot of the lane holds.
  Value rankOf(int64_t slot) const {
    return b.add(b.mul(lane, b.i32(shape.slotsPerLane)), b.i32(slot));
  }

  ThreadBuilder &b;
  TopKRenormOp op;
  SelectionForm form;
  LaneShape shape;
  int64_t numExperts, numSelected;
  Value lane, row;
};

/// -inf becomes 0, so that subtracting it from -inf does not make a NaN.
inline Value finiteOrZero(ThreadBuilder &b, Value x) {
  Value empty = b.compare(arith::CmpFPredicate::OEQ, x, b.negInfinity());
  return b.select(empty, b.f32(0.0), x);
}

/// What is known of each slot of the lane.
struct RowSlots {
  explicit RowSlots(RowLanes &row);

  /// Whether it is one of the k (null if always), the expert, its score where
  /// known, and whether it has a gate (null if always).
  SmallVector<Value> isSlot, chosen, chosenScores, hasGate;
  /// The ids that the caller forces, as given.
  SmallVector<Value> forced;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKSELECTION_H
