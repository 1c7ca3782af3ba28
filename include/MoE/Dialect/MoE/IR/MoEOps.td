//===- MoEOps.td - Operations of the moe dialect -----------*- tablegen -*-===//
//
// One file a family. Constraints that the verifiers check are labelled
// `<op>_c<n>` and edge rules E<n>, as in docs/Spec.md; the tests are named after
// the labels.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_IR_MOEOPS_TD
#define MOE_DIALECT_MOE_IR_MOEOPS_TD

include "MoE/Dialect/MoE/IR/MoEBackwardOps.td"
include "MoE/Dialect/MoE/IR/MoEDispatchOps.td"
include "MoE/Dialect/MoE/IR/MoEExpertOps.td"
include "MoE/Dialect/MoE/IR/MoELogitsOps.td"
include "MoE/Dialect/MoE/IR/MoELossOps.td"
include "MoE/Dialect/MoE/IR/MoEMixingOps.td"
include "MoE/Dialect/MoE/IR/MoESelectionOps.td"
include "MoE/Dialect/MoE/IR/MoEStatisticsOps.td"

#endif // MOE_DIALECT_MOE_IR_MOEOPS_TD
