//===- TopKGroups.h - Groups of experts that drop out -----------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKGROUPS_H
#define MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKGROUPS_H

#include "TopKScores.h"

namespace mlir::moe {

/// The groups of a row's experts, of which the best stay.
class ExpertGroups {
public:
  ExpertGroups(RowLanes &row, const RowScores &scores, ArrayRef<Value> choice)
      : row(row), scores(scores), b(row.b), choice(choice) {}

  /// Whether each expert of the lane is outside of the topk_group best groups.
  SmallVector<Value> findDropped();

private:
  SmallVector<Value> findDroppedOfWarp(int64_t lanesOfGroup);
  /// How many lanes share a group in each of their accesses, where these are
  /// lanes of a warp that has the row alone; 0 otherwise.
  int64_t getLanesOfGroup() const;
  SmallVector<Value> getGroupValues();
  /// Condition that the lane's j-th expert belongs to `group`; null if it
  /// cannot.
  Value isInGroup(int64_t j, int64_t group);

  RowLanes &row;
  const RowScores &scores;
  ThreadBuilder &b;
  /// By what the experts of the lane are chosen.
  ArrayRef<Value> choice;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKGROUPS_H
