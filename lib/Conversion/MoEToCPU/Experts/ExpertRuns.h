//===- ExpertRuns.h - The rows of experts -----------------------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_EXPERTRUNS_H
#define MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_EXPERTRUNS_H

#include "Product/PanelShape.h"

namespace mlir::moe {

/// The rows [begin, end) of an expert.
struct ExpertRun {
  Value begin, end;
};

/// Reads the run of `expert`, cut to `numRows` rows.
ExpertRun readRun(Emitter &e, Value offsets, Value expert, Value numRows);

/// The row of x that a row of the run reads: `rows[row]`, or `row` without
/// `rows`. An index for which there is no row of x is cut to one that there is;
/// `isMissing` tells.
Value readRow(Emitter &e, Value rows, Value row, Value numSources);
/// Whether `rows[row]` is no row of x; null where there are no `rows`.
Value isMissing(Emitter &e, Value rows, Value row, Value numSources);

/// Calls `body` for blocks of the rows [begin, end) whose sums lie in cache
/// together, and share what is packed of weights.
void forEachBlockOfRows(Emitter &e, Value begin, Value end,
                        function_ref<void(Value first, Value end)> body);
/// A buffer for the sums of a block of rows and the columns of a group.
Value makeBlockSums(Emitter &e, const PanelGroup &group);

/// Columns of a group: the first of them, where it is in the group, and which
/// of them there are (null: all).
struct GroupVector {
  Value column, place, mask;
};
/// Calls `body` for the vectors of a group whose panels have `numVectors`
/// vectors, of `numColumns` columns in all.
void forEachVectorOfGroup(Emitter &e, const PanelGroup &group,
                          int64_t numVectors, Value numColumns,
                          function_ref<void(const GroupVector &vector)> body);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_EXPERTRUNS_H
