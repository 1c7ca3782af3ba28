//===- TopKScores.h - The scores of a row -----------------------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKSCORES_H
#define MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKSCORES_H

#include "TopKSelection.h"

namespace mlir::moe {

/// The scores of a row that a lane has, and what is known of the whole row.
class RowScores {
public:
  explicit RowScores(RowLanes &row) : row(row), b(row.b) {}

  /// Loads the scores, and reduces the row where its softmax is needed.
  void load();
  /// Finds out whether the row holds a NaN.
  void findNaN();

  /// Condition that the expert of the lane's key `j` exists; null if it always
  /// does.
  Value exists(int64_t j) const;
  /// The score function at x.
  Value score(Value x) const;
  /// The score of any expert of the row.
  Value loadScore(Value expert) const;
  /// By what the experts of the lane are chosen.
  SmallVector<Value> getChoiceScores() const;

  ArrayRef<Value> getExperts() const { return experts; }
  /// Words of packed scores, negated.
  ArrayRef<Value> getNegated() const { return negated; }
  Value getHasNaN() const { return hasNaN; }

private:
  void loadScores();
  void widenWords();
  void computeRowSoftmax();

  RowLanes &row;
  ThreadBuilder &b;
  /// Two neighbouring 16-bit scores each, or one in the lower half; their
  /// negated form.
  SmallVector<Value> words, negated;
  /// For each key of the lane: its expert and its score.
  SmallVector<Value> experts, scores;
  /// The row holds a NaN; the maximum and the sum of exponentials of the row.
  Value hasNaN, rowMax, rowSum;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SELECTION_TOPKSCORES_H
