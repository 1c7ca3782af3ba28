//===- FewTokenRouters.h - Routers of few tokens on all blocks --*- C++ -*-===//
//
// Where a router has few tokens, blocks that take all weights each are few as
// well. Its products are then cut along the features and the experts, and what
// the cuts leave is added up by the kernel of the selection.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_FEWTOKENROUTERS_H
#define MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_FEWTOKENROUTERS_H

#include "ThreadLowerings.h"

#include "mlir/Dialect/Func/IR/FuncOps.h"

namespace mlir::moe {

/// Tokens up to which a router is cut.
inline constexpr int64_t kFewTokens = 256;

/// Whether `op`, on tensors or buffers, is known to have no more.
bool hasFewTokens(RouterLogitsOp op);
/// Whether `op` may have so few tokens, and its products can be cut.
bool canSplitFewTokens(RouterLogitsOp op, BlockShape block);
/// Rows of a tile of the kernel that adds up: each gets a block.
inline constexpr int64_t kSummedRows = 1;

/// Puts beside each loop over tiles of a router of the schedule mma_split two
/// loops for few tokens, the cut products and their sums. As many iterations as
/// the number of tokens asks for are left to each of the three.
void cutRoutersOfFewTokens(func::FuncOp function, BlockShape block);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_PRODUCT_FEWTOKENROUTERS_H
