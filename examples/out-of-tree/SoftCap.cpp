//===- SoftCap.cpp - The softcap dialect ----------------------------------===//

#include "SoftCap.h"

#include "mlir/IR/Builders.h"
#include "mlir/IR/DialectImplementation.h"
#include "mlir/IR/OpImplementation.h"

using namespace mlir;
using namespace softcap;

#include "SoftCapDialect.cpp.inc"

#define GET_OP_CLASSES
#include "SoftCapOps.cpp.inc"

void SoftCapDialect::initialize() {
  addOperations<
#define GET_OP_LIST
#include "SoftCapOps.cpp.inc"
      >();
}

LogicalResult CapOp::verify() {
  // Also refuses NaN, for which no comparison holds.
  if (getCap().isFiniteNonZero() && !getCap().isNegative())
    return success();
  return emitOpError() << "expected cap to be positive and finite, found "
                       << getCapAttr();
}
