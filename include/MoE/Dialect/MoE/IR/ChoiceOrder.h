//===- ChoiceOrder.h - What orders the experts ------------------*- C++ -*-===//

#ifndef MOE_DIALECT_MOE_IR_CHOICEORDER_H
#define MOE_DIALECT_MOE_IR_CHOICEORDER_H

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// Whether `op` orders experts and groups by its scores as they are given, and
/// not by a function of them. The score functions grow with the score, so that
/// the order is theirs, but it does not hang on how they are rounded: it is the
/// same on every machine. A bias, and the sum of two scores as the value of a
/// group, need the function.
bool isOrderedByGivenScores(TopKRenormOp op);

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_IR_CHOICEORDER_H
