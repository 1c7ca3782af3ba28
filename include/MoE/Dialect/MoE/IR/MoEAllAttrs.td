//===- MoEAllAttrs.td - Every attribute of the dialect -----*- tablegen -*-===//
//
// What the dialect parses and prints.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_MOEALLATTRS_TD
#define MOE_DIALECT_MOE_IR_MOEALLATTRS_TD

include "MoE/Dialect/MoE/IR/MoEAttrs.td"
include "MoE/Dialect/MoE/IR/MoEKernelConfig.td"

#endif // MOE_DIALECT_MOE_IR_MOEALLATTRS_TD
