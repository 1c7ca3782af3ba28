//===- MoECanonicalize.h - Rewrites that several ops share ------*- C++ -*-===//

#ifndef LIB_DIALECT_MOE_IR_MOECANONICALIZE_H
#define LIB_DIALECT_MOE_IR_MOECANONICALIZE_H

#include "MoEConstants.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// Drops an optional operand that `isNeutral` says changes nothing, such as a
/// mask of trues. `get` names the operand by its mutable accessor.
template <typename OpTy>
struct DropNeutralOperand : OpRewritePattern<OpTy> {
  using Accessor = MutableOperandRange (OpTy::*)();

  DropNeutralOperand(MLIRContext *context, Accessor get,
                     bool (*isNeutral)(Value))
      : OpRewritePattern<OpTy>(context), get(get), isNeutral(isNeutral) {}

  LogicalResult matchAndRewrite(OpTy op,
                                PatternRewriter &rewriter) const override {
    MutableOperandRange operand = (op.*get)();
    if (operand.size() != 1)
      return rewriter.notifyMatchFailure(op, "the operand is absent");
    if (!isNeutral(operand[0].get()))
      return rewriter.notifyMatchFailure(op, "the operand has an effect");
    rewriter.modifyOpInPlace(op, [&] { (op.*get)().clear(); });
    return success();
  }

  Accessor get;
  bool (*isNeutral)(Value);
};

/// A mask that hides nothing.
inline bool isAllTrue(Value mask) { return getSplatInteger(mask) == 1; }
/// A term that adds nothing.
inline bool isAllZero(Value term) { return getSplatFloat(term) == 0.0; }

} // namespace mlir::moe

#endif // LIB_DIALECT_MOE_IR_MOECANONICALIZE_H
