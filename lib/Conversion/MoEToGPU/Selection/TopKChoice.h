//===- TopKChoice.h - The experts chosen in a row ---------------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKCHOICE_H
#define MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKCHOICE_H

#include "TopKScores.h"

namespace mlir::moe {

/// Fills the slots of a row with experts.
class ExpertChoice {
public:
  ExpertChoice(RowLanes &row, RowScores &scores, RowSlots &slots)
      : row(row), scores(scores), slots(slots), b(row.b) {}

  /// With those of the highest scores.
  void select();
  /// With those that the caller forces.
  void readForced();

private:
  SmallVector<Value> makePackedKeys();
  SmallVector<Value> makeWideKeys(ArrayRef<Value> choice);
  SmallVector<Value> keepHighestOfLane(ArrayRef<Value> keys);
  void addLane(MutableArrayRef<Value> kept);
  void selectByRounds(SmallVector<Value> keys);
  void takeSlots(ArrayRef<Value> keys);

  RowLanes &row;
  RowScores &scores;
  RowSlots &slots;
  ThreadBuilder &b;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKCHOICE_H
