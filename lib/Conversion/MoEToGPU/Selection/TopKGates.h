//===- TopKGates.h - The gates of a row -------------------------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKGATES_H
#define MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKGATES_H

#include "TopKScores.h"

namespace mlir::moe {

/// Computes the gates of a row's slots, each by the lane that the slot was
/// dealt to, and stores them.
class SlotGates {
public:
  SlotGates(RowLanes &row, const RowScores &scores, const RowSlots &slots)
      : row(row), scores(scores), slots(slots), b(row.b) {}

  SmallVector<Value> compute();
  /// Stores `gates` and the experts where `isRow` holds.
  void store(ArrayRef<Value> gates, Value isRow);

private:
  SmallVector<Value> renormalise(ArrayRef<Value> values, Value floor);
  Value asIndex(Value id, Type type);
  void storeEach(ArrayRef<Value> values, Value memref, Value isRow);
  bool hasWideStores();

  RowLanes &row;
  const RowScores &scores;
  const RowSlots &slots;
  ThreadBuilder &b;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKGATES_H
