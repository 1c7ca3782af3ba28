//===- MoEDialect.cpp - The moe dialect -----------------------------------===//

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Bufferization/IR/BufferizableOpInterface.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/DialectImplementation.h"
#include "mlir/Interfaces/RuntimeVerifiableOpInterface.h"
#include "mlir/Interfaces/TilingInterface.h"
#include "llvm/ADT/TypeSwitch.h"

using namespace mlir;
using namespace mlir::moe;

#include "MoE/Dialect/MoE/IR/MoEDialect.cpp.inc"
#include "MoE/Dialect/MoE/IR/MoEEnums.cpp.inc"

#define GET_ATTRDEF_CLASSES
#include "MoE/Dialect/MoE/IR/MoEAttrs.cpp.inc"

#include "MoE/Dialect/MoE/IR/MoEInterfaces.cpp.inc"

#define GET_OP_CLASSES
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"

void MoEDialect::initialize() {
  addAttributes<
#define GET_ATTRDEF_LIST
#include "MoE/Dialect/MoE/IR/MoEAttrs.cpp.inc"
      >();
  addOperations<
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"
      >();
  // A tool that forgets to link Dialect/MoE/Interfaces gets an error that says
  // so instead of a driver that quietly does nothing.
  declarePromisedInterfaces<TilingInterface,
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"
                            >();
  declarePromisedInterface<PartialReductionOpInterface, AdjacencyUpdateOp>();
  declarePromisedInterfaces<bufferization::BufferizableOpInterface,
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"
                            >();
  declarePromisedInterfaces<RuntimeVerifiableOpInterface,
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"
                            >();
}
