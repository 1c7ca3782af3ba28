//===- SoftCap.h - The softcap dialect and its passes -----------*- C++ -*-===//

#ifndef SOFTCAP_H
#define SOFTCAP_H

#include "mlir/Bytecode/BytecodeOpInterface.h"
#include "mlir/IR/BuiltinTypes.h"
#include "mlir/IR/Dialect.h"
#include "mlir/IR/OpDefinition.h"
#include "mlir/Interfaces/InferTypeOpInterface.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"
#include "mlir/Pass/Pass.h"

#include "SoftCapDialect.h.inc"

#define GET_OP_CLASSES
#include "SoftCapOps.h.inc"

namespace softcap {

#define GEN_PASS_DECL
#include "SoftCapPasses.h.inc"

#define GEN_PASS_REGISTRATION
#include "SoftCapPasses.h.inc"

} // namespace softcap

#endif // SOFTCAP_H
