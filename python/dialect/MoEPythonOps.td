//===- MoEPythonOps.td - What becomes Python classes -------*- tablegen -*-===//

include "MoE/Dialect/MoE/IR/MoEAllAttrs.td"
include "MoE/Dialect/MoE/IR/MoEAssertOp.td"
include "MoE/Dialect/MoE/IR/MoEOps.td"
