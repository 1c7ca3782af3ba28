//===- CoSelections.h - Tokens that chose two experts -----------*- C++ -*-===//
//
// The counts of a graph lie in one buffer of i32:
//
//   pairs of experts, E (E + 1) / 2 | tokens that chose an expert, 1
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_STATISTICS_COSELECTIONS_H
#define MOE_LIB_CONVERSION_MOETOGPU_STATISTICS_COSELECTIONS_H

#include "Emit/ThreadBuilder.h"
#include "ThreadLowerings.h"

namespace mlir::moe {

inline int64_t getNumExperts(AdjacencyUpdateOp op) {
  return cast<ShapedType>(op.getA().getType()).getDimSize(0);
}
inline int64_t getNumPairs(int64_t experts) {
  return experts * (experts + 1) / 2;
}
/// Where the count of the pair of experts `one` and `other` lies.
Value getPairPosition(ThreadBuilder &b, int64_t experts, Value one,
                      Value other);

/// Emits how a block counts the tokens begin .. end in `counts`, a workgroup
/// buffer, which it clears. Its threads must meet before they read it.
void countInBlock(ThreadBuilder &b, AdjacencyUpdateOp op, BlockShape block,
                  Value counts, Value begin, Value end);

/// Emits how `workers` add all tokens to `counts`, which may lie in global
/// memory. The number of choices is static.
void countByAtomics(ThreadBuilder &b, AdjacencyUpdateOp op, Workers workers,
                    Value counts);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_STATISTICS_COSELECTIONS_H
