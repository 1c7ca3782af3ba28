//===- Transforms.h - What passes share -------------------------*- C++ -*-===//

#ifndef MOE_TRANSFORMS_TRANSFORMS_H
#define MOE_TRANSFORMS_TRANSFORMS_H

#include "mlir/IR/PatternMatch.h"

namespace mlir::moe {

/// The mnemonics of the ops that `moe-decompose` knows and that none of
/// `kernels` starts from: an op that gains a kernel or has none needs no entry
/// anywhere.
SmallVector<std::string> getOpsWithoutKernel(MLIRContext *context,
                                             RewritePatternSet &kernels);

} // namespace mlir::moe

#endif // MOE_TRANSFORMS_TRANSFORMS_H
