//===- SliceBroadcasts.h - Read what is broadcast in tiles ------*- C++ -*-===//

#ifndef MOE_LIB_TRANSFORMS_SLICEBROADCASTS_H
#define MOE_LIB_TRANSFORMS_SLICEBROADCASTS_H

#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/IR/PatternMatch.h"

namespace mlir::moe {

/// Makes the tiles of `loop` that take a slice of a broadcast tensor, one along
/// each dim that it is repeated along, take it of the tensor that is repeated:
///
///   %b = linalg.generic ins(%x : tensor<1x2x1x?x64>) .. -> tensor<1x2x4x?x64>
///   %k = tensor.collapse_shape %b : tensor<1x8x?x64>
///   %t = tensor.extract_slice %k[0, %h, 0, 0] [1, 1, %n, 64]
///
/// becomes
///
///   %t = tensor.extract_slice %x[0, %h floordiv 4, 0, 0, 0] [1, 1, 1, %n, 64]
///
/// Heads of attention share keys that way, and need no copy of them each.
/// Broadcasts without other users are erased; returns them.
SmallVector<Operation *> sliceBroadcasts(RewriterBase &rewriter,
                                         scf::ForallOp loop);

} // namespace mlir::moe

#endif // MOE_LIB_TRANSFORMS_SLICEBROADCASTS_H
