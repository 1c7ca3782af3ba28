//===- MoE.h - The moe dialect ----------------------------------*- C++ -*-===//

#ifndef MOE_DIALECT_MOE_IR_MOE_H
#define MOE_DIALECT_MOE_IR_MOE_H

#include "mlir/Bytecode/BytecodeOpInterface.h"
#include "mlir/Dialect/Linalg/IR/LinalgInterfaces.h"
#include "mlir/Dialect/Utils/StructuredOpsUtils.h"
#include "mlir/IR/Builders.h"
#include "mlir/IR/BuiltinTypes.h"
#include "mlir/IR/Dialect.h"
#include "mlir/IR/OpDefinition.h"
#include "mlir/IR/PatternMatch.h"
#include "mlir/Interfaces/DestinationStyleOpInterface.h"
#include "mlir/Interfaces/IndexingMapOpInterface.h"
#include "mlir/Interfaces/InferTypeOpInterface.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"

namespace mlir::moe {

/// A dim of an op's iteration domain.
struct Dim {
  /// The letter that the specification gives the dim.
  StringRef name;
  /// How iterations along the dim relate. Only parallel dims can be cut into
  /// tiles; a sum is cut by tables of its own (SplitReductionOpInterface).
  utils::IteratorType iterator;
  /// A dim that tiling must leave in one piece though its iterations are
  /// parallel, because indices along it are absolute.
  bool whole = false;

  /// Whether a driver may cut the dim into tiles.
  bool isTileable() const {
    return iterator == utils::IteratorType::parallel && !whole;
  }
};

} // namespace mlir::moe

#include "MoE/Dialect/MoE/IR/MoEDialect.h.inc"
#include "MoE/Dialect/MoE/IR/MoEEnums.h.inc"

#define GET_ATTRDEF_CLASSES
#include "MoE/Dialect/MoE/IR/MoEAttrs.h.inc"

#include "MoE/Dialect/MoE/IR/MoEInterfaces.h.inc"

#define GET_OP_CLASSES
#include "MoE/Dialect/MoE/IR/MoEAssertOp.h.inc"
#define GET_OP_CLASSES
#include "MoE/Dialect/MoE/IR/MoEOps.h.inc"

#endif // MOE_DIALECT_MOE_IR_MOE_H
