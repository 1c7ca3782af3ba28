//===- ExpertRuns.h - The rows of experts -----------------------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_EXPERTRUNS_H
#define MOE_LIB_CONVERSION_MOETOCPU_EXPERTRUNS_H

#include "Emitter.h"

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

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_EXPERTRUNS_H
