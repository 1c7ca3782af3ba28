//===- Transforms.h - What passes share -------------------------*- C++ -*-===//

#ifndef MOE_TRANSFORMS_TRANSFORMS_H
#define MOE_TRANSFORMS_TRANSFORMS_H

#include "mlir/Dialect/Linalg/IR/LinalgInterfaces.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/Interfaces/TilingInterface.h"

namespace mlir::moe {

/// The attribute of a module that says for which GPU its loops become kernels,
/// an #nvvm.target; without it they run on a CPU.
inline constexpr llvm::StringLiteral kTargetAttrName = "moe.target";

/// The target of the module around `op`, or of the module `op`; null for a CPU.
Attribute getTarget(Operation *op);

/// Whether loops around or in `op` become kernels of a GPU.
bool isForGPU(Operation *op);

/// The strides of a buffer of these sizes without gaps.
SmallVector<OpFoldResult> getContiguousStrides(ImplicitLocOpBuilder &b,
                                               ArrayRef<OpFoldResult> sizes);

/// Decomposes the ops in `root` for which `condition` holds.
void decomposeIf(Operation *root,
                 function_ref<bool(linalg::AggregatedOpInterface)> condition);

/// The mnemonics of the ops that `moe-decompose` knows and that none of
/// `kernels` starts from: an op that gains a kernel or has none needs no entry
/// anywhere.
SmallVector<std::string> getOpsWithoutKernel(MLIRContext *context,
                                             RewritePatternSet &kernels);

/// Whether the body of `op`, such as a linalg.generic, may have effects: the
/// assertions in it come before what later ops write, so that a call that ends
/// with an error has updated nothing.
bool hasEffectsInBody(Operation *op);

/// The dims along which the rows of `op` lie, outermost first: parallel, part
/// of every result, and not the innermost dim of the results, which is kept
/// contiguous unless it alone tells the rows of a batched product apart, or the
/// op's kernel has a loop of its own. On a CPU dims of size 1 are left out
/// where others remain. Empty if `op` has no such dims, or on a CPU effects in
/// its body.
SmallVector<unsigned> getRowDims(TilingInterface op);

/// Whether `op` is a contraction whose rows lie along several dims of its input
/// and its result, which may be seen as one: all of them meet the same weight.
bool canJoinRows(linalg::LinalgOp op);

/// Results of a reduction up to which they are too few to keep the blocks of a
/// grid busy: a long reduction is then cut along what it sums over.
inline constexpr int64_t kFewResults = 1024;

/// The number of threads that a loop may use, asked at run time; null in a
/// module where moe-declare-thread-count did not run.
Value buildThreadCount(ImplicitLocOpBuilder &builder);

} // namespace mlir::moe

#endif // MOE_TRANSFORMS_TRANSFORMS_H
