//===- RowGroups.h - The rows of experts, in groups -------------*- C++ -*-===//
//
// The kernels of moe.grouped_linear take the rows of one expert in groups of so
// many. Which expert's a group is follows from the offsets alone. Between the
// runs of the experts, and after the last one, there may be rows of none: all
// rows are cut into E + 2 runs, that of expert e being run e + 1, and the
// groups of all runs are numbered in their order.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_ROWGROUPS_H
#define MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_ROWGROUPS_H

#include "Emit/WarpBuilder.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// Rows of one expert, or rows that no expert has.
struct RowGroup {
  /// i32, and whether there are any.
  Value expert, begin, end, exists;
  /// Whether an expert has them.
  Value isOfExpert;
};

/// Finds groups, by the lanes of a warp together.
class RowGroups {
public:
  /// Groups of `rows` rows (a power of two).
  RowGroups(WarpBuilder &b, GroupedLinearOp op, int64_t rows);

  /// The rows of group `number`.
  RowGroup find(Value number);
  /// How many groups there are. Those who find many of them count first: what
  /// the lanes know from it need not be found again.
  Value count();
  /// How many there may be, by the sizes of the buffers: as many as rows where
  /// there are few, else one of each run that is not whole, and the whole ones.
  static Value getBound(ThreadBuilder &b, GroupedLinearOp op, int64_t rows);

private:
  Value getBegin(Value run);
  Value countGroups(Value begin, Value end);
  /// Those of the runs of the lane, and of all lanes before it.
  std::pair<Value, Value> countOwnAndBefore();

  WarpBuilder &b;
  const int64_t rows;
  Value offsets, numExperts, numRows;
  Value numRuns, perLane, firstRun;
  /// The groups of the lanes before this one, once they are counted.
  Value counted;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_ROWGROUPS_H
