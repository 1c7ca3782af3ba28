//===- MergeLoops.h - One loop for the ops of a group -----------*- C++ -*-===//

#ifndef MOE_LIB_TRANSFORMS_MERGELOOPS_H
#define MOE_LIB_TRANSFORMS_MERGELOOPS_H

#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/IR/PatternMatch.h"

namespace mlir::moe {

/// Replaces ops whose bodies check their inputs, which common subexpression
/// elimination leaves alone, by an equal one before them: who checks twice
/// finds the same. Returns whether there were any.
bool mergeEqualChecks(RewriterBase &rewriter, Block &block);

/// Makes the loops of a group, in program order, one loop at the place of the
/// last. Loops that cannot join stay as they are.
void mergeLoops(RewriterBase &rewriter, ArrayRef<scf::ForallOp> loops);

} // namespace mlir::moe

#endif // MOE_LIB_TRANSFORMS_MERGELOOPS_H
