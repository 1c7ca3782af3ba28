//===- MultiplyAdd.h - Bodies of products -----------------------*- C++ -*-===//

#ifndef MOE_SUPPORT_MULTIPLYADD_H
#define MOE_SUPPORT_MULTIPLYADD_H

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"

namespace mlir::moe {

/// Whether the body of an op with two inputs and one output is `out + a * b` in
/// f32, a and b possibly extended.
inline bool isMultiplyAdd(linalg::LinalgOp op) {
  Block *body = op.getBlock();
  auto isArgument = [&](Value value, unsigned position) {
    if (auto extend = value.getDefiningOp<arith::ExtFOp>())
      value = extend.getIn();
    return value == body->getArgument(position);
  };
  auto add =
      body->getTerminator()->getOperand(0).getDefiningOp<arith::AddFOp>();
  if (!add || !add.getType().isF32())
    return false;
  for (auto [sum, product] : {std::pair(add.getLhs(), add.getRhs()),
                              std::pair(add.getRhs(), add.getLhs())}) {
    auto multiply = product.getDefiningOp<arith::MulFOp>();
    if (!multiply || sum != body->getArgument(2))
      continue;
    for (unsigned first : {0u, 1u})
      if (isArgument(multiply.getLhs(), first) &&
          isArgument(multiply.getRhs(), 1 - first))
        return true;
  }
  return false;
}

} // namespace mlir::moe

#endif // MOE_SUPPORT_MULTIPLYADD_H
