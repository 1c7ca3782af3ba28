//===- Transforms.h - What passes share -------------------------*- C++ -*-===//

#ifndef MOE_TRANSFORMS_TRANSFORMS_H
#define MOE_TRANSFORMS_TRANSFORMS_H

#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/Interfaces/TilingInterface.h"

namespace mlir::moe {

/// The mnemonics of the ops that `moe-decompose` knows and that none of
/// `kernels` starts from: an op that gains a kernel or has none needs no entry
/// anywhere.
SmallVector<std::string> getOpsWithoutKernel(MLIRContext *context,
                                             RewritePatternSet &kernels);

/// The dims along which the rows of `op` lie, outermost first: parallel, part
/// of every result, and not the innermost dim of the results, which is kept
/// contiguous unless it alone tells the rows of a batched product apart, or
/// `op` asks for tiles of its own size. Dims of size 1 are left out where
/// others remain and `keepUnitDims` is false. Empty if `op` has no such dims.
SmallVector<unsigned> getRowDims(TilingInterface op, bool keepUnitDims);

/// The number of threads that a loop may use, asked at run time; null in a
/// module where moe-declare-thread-count did not run.
Value buildThreadCount(ImplicitLocOpBuilder &builder);

} // namespace mlir::moe

#endif // MOE_TRANSFORMS_TRANSFORMS_H
