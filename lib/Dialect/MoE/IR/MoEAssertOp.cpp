//===- MoEAssertOp.cpp - Errors of a call at run time ---------------------===//

#include "MoE/Dialect/MoE/IR/MoE.h"

#include "mlir/IR/Matchers.h"

using namespace mlir;
using namespace mlir::moe;

/// Places are `{0}` to `{7}`; any other brace stands for itself.
static LogicalResult verifyPlaces(AssertOp op, StringRef message) {
  for (size_t at = message.find('{'); at != StringRef::npos;
       at = message.find('{', at + 1)) {
    StringRef place = message.substr(at, 3);
    if (place.size() != 3 || place[2] != '}' || !llvm::isDigit(place[1]))
      continue;
    if (static_cast<size_t>(place[1] - '0') >= op.getValues().size())
      return op.emitOpError()
             << "expected the message to have places for "
             << op.getValues().size() << " values, found " << place;
  }
  return success();
}

LogicalResult AssertOp::verify() {
  if (getValues().size() > kMostValues)
    return emitOpError() << "expected at most " << kMostValues
                         << " values, found " << getValues().size();
  for (Value value : getValues())
    if (auto type = dyn_cast<IntegerType>(value.getType());
        type && type.getWidth() > 64)
      return emitOpError() << "expected values of at most 64 bits, found "
                           << type;
  return verifyPlaces(*this, getMessage());
}

LogicalResult AssertOp::canonicalize(AssertOp op, PatternRewriter &rewriter) {
  if (!matchPattern(op.getCondition(), m_One()))
    return failure();
  rewriter.eraseOp(op);
  return success();
}
