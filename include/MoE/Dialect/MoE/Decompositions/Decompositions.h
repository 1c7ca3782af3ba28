//===- Decompositions.h - Ops in terms of smaller ones ----------*- C++ -*-===//
//
// What interfaces say of an op by building other ops. The ops themselves hold
// facts only; the models that attach these functions to them are in
// Dialect/MoE/Interfaces. A new op adds its overload of `decompose` here and
// its definition to the file of its family.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_DIALECT_MOE_DECOMPOSITIONS_DECOMPOSITIONS_H
#define MOE_DIALECT_MOE_DECOMPOSITIONS_DECOMPOSITIONS_H

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

using Replacements = FailureOr<SmallVector<Value>>;

// The meaning of each op in `linalg` and ops of the dialect that are closer to
// it: one value a result, none on buffers, or failure with nothing built.
Replacements decompose(RouterLogitsOp op, OpBuilder &builder);
Replacements decompose(CosineLogitsOp op, OpBuilder &builder);
Replacements decompose(HyperRouterOp op, OpBuilder &builder);
Replacements decompose(ACLogitsOp op, OpBuilder &builder);
Replacements decompose(TopKRenormOp op, OpBuilder &builder);
Replacements decompose(ThresholdRenormOp op, OpBuilder &builder);
Replacements decompose(DensifyOp op, OpBuilder &builder);
Replacements decompose(MakeFiniteOp op, OpBuilder &builder);
Replacements decompose(DispatchOp op, OpBuilder &builder);
Replacements decompose(CombineOp op, OpBuilder &builder);
Replacements decompose(TokenRowsOp op, OpBuilder &builder);
Replacements decompose(GroupedLinearOp op, OpBuilder &builder);
Replacements decompose(GroupedOuterOp op, OpBuilder &builder);
Replacements decompose(SoftDispatchOp op, OpBuilder &builder);
Replacements decompose(BalanceLossOp op, OpBuilder &builder);
Replacements decompose(ZLossOp op, OpBuilder &builder);
Replacements decompose(BiasUpdateOp op, OpBuilder &builder);
Replacements decompose(SimilarityInformOp op, OpBuilder &builder);
Replacements decompose(AttentionPosteriorOp op, OpBuilder &builder);
Replacements decompose(AttentionEntropyOp op, OpBuilder &builder);
Replacements decompose(SoftmaxMixOp op, OpBuilder &builder);
Replacements decompose(SoftmaxMixSelfOp op, OpBuilder &builder);
Replacements decompose(MadDispersionOp op, OpBuilder &builder);
Replacements decompose(DispersionWeightsOp op, OpBuilder &builder);
Replacements decompose(AdjacencyGateOp op, OpBuilder &builder);
Replacements decompose(AdjacencyUpdateOp op, OpBuilder &builder);
Replacements decompose(CoSelectionsOp op, OpBuilder &builder);
Replacements decompose(AttentionPosteriorBackwardOp op, OpBuilder &builder);
Replacements decompose(SimilarityInformBackwardOp op, OpBuilder &builder);
Replacements decompose(SoftmaxMixBackwardDqOp op, OpBuilder &builder);
Replacements decompose(SoftmaxMixBackwardDkvOp op, OpBuilder &builder);
Replacements decompose(SoftmaxMixBackwardSelfOp op, OpBuilder &builder);
Replacements decompose(TopKRenormBackwardOp op, OpBuilder &builder);

// The ops that are a softmax over tokens, or the gradient of one, by
// `moe.softmax_mix` or its backward ops and smaller ones.
Replacements convertToSoftmaxMix(SimilarityInformOp op, OpBuilder &builder);
Replacements convertToSoftmaxMix(AttentionPosteriorOp op, OpBuilder &builder);
Replacements convertToSoftmaxMix(AttentionEntropyOp op, OpBuilder &builder);
Replacements convertToSoftmaxMix(AttentionPosteriorBackwardOp op,
                                 OpBuilder &builder);
Replacements convertToSoftmaxMix(SimilarityInformBackwardOp op,
                                 OpBuilder &builder);

// What SplitReductionOpInterface asks for.
Value buildEmptyTables(AdjacencyUpdateOp op, OpBuilder &builder,
                       OpFoldResult numParts);
Operation *foldIntoTable(AdjacencyUpdateOp op, OpBuilder &builder,
                         ValueRange operands, Value table);
Value finishTables(AdjacencyUpdateOp op, OpBuilder &builder, Value tables);

} // namespace mlir::moe

#endif // MOE_DIALECT_MOE_DECOMPOSITIONS_DECOMPOSITIONS_H
