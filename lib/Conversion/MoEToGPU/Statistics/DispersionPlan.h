//===- DispersionPlan.h - How mad_dispersion is cut -------------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_STATISTICS_DISPERSIONPLAN_H
#define MOE_LIB_CONVERSION_MOETOGPU_STATISTICS_DISPERSIONPLAN_H

#include "Emit/ThreadBuilder.h"
#include "ThreadLowerings.h"

namespace mlir::moe {

/// How the work is cut.
struct DispersionPlan {
  DispersionPlan(ThreadBuilder &b, MadDispersionOp op, BlockShape block);

  /// Whether the first loop does everything.
  Value isOnePart(ThreadBuilder &b) const {
    return b.compare(arith::CmpIPredicate::eq, parts, b.index(1));
  }
  bool mayHaveParts() const { return getConstantIntValue(numParts) != 1; }

  /// Clusters of a range, columns of a slab, parts of a block that have tables
  /// of their own, and the tokens that a block may have.
  int64_t range, slab, subparts, maxTokens;
  /// The blocks of the loops over the rows.
  BlockShape block;
  OpFoldResult numRanges, numSlabs, numParts;
  /// Clusters that the loop over the deviations has along the parts, and blocks
  /// of those that combine parts: 0 with one part, so that they are no
  /// launches.
  OpFoldResult numDeviating, numCombining;
  /// numSlabs, numParts and numCombining.
  Value slabs, parts, combining;

private:
  int64_t getMinTokens(MadDispersionOp op, int64_t clusters) const;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_STATISTICS_DISPERSIONPLAN_H
