//===- MoEDialect.td - What the page of the dialect shows ----*- tablegen -*-===//
//
// The ops, and with them the attributes that only passes use.
//
//===----------------------------------------------------------------------===//

include "MoE/Dialect/MoE/IR/MoEAllAttrs.td"
include "MoE/Dialect/MoE/IR/MoEAssertOp.td"
include "MoE/Dialect/MoE/IR/MoEOps.td"
