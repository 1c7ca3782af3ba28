//===- DecompositionInterfaceImpl.cpp - Ops in terms of smaller ones ------===//
//
// The interfaces whose answers are other ops, by the functions of
// Dialect/MoE/Decompositions.
//
//===----------------------------------------------------------------------===//

#include "AttachToAllOps.h"

#include "MoE/Dialect/MoE/Decompositions/Decompositions.h"
#include "MoE/Dialect/MoE/IR/MoEDims.h"
#include "MoE/Dialect/MoE/Interfaces/AllInterfaces.h"

using namespace mlir;
using namespace mlir::moe;

namespace {
template <typename OpTy>
struct Decomposition
    : linalg::AggregatedOpInterface::ExternalModel<Decomposition<OpTy>, OpTy> {
  FailureOr<SmallVector<Value>> decomposeOperation(Operation *op,
                                                   OpBuilder &builder) const {
    return decompose(cast<OpTy>(op), builder);
  }
};

template <typename OpTy>
struct Mixing : MixingOpInterface::ExternalModel<Mixing<OpTy>, OpTy> {
  FailureOr<SmallVector<Value>> convertToSoftmaxMix(Operation *op,
                                                    OpBuilder &builder) const {
    return moe::convertToSoftmaxMix(cast<OpTy>(op), builder);
  }
};

struct AdjacencyUpdateSplit
    : SplitReductionOpInterface::ExternalModel<AdjacencyUpdateSplit,
                                               AdjacencyUpdateOp> {
  unsigned getSplitDim(Operation *) const { return adjacency::n; }
  Value buildEmptyTables(Operation *op, OpBuilder &builder,
                         OpFoldResult numParts) const {
    return moe::buildEmptyTables(cast<AdjacencyUpdateOp>(op), builder,
                                 numParts);
  }
  Operation *foldIntoTable(Operation *op, OpBuilder &builder,
                           ValueRange operands, Value table) const {
    return moe::foldIntoTable(cast<AdjacencyUpdateOp>(op), builder, operands,
                              table);
  }
  Value finishTables(Operation *op, OpBuilder &builder, Value tables) const {
    return moe::finishTables(cast<AdjacencyUpdateOp>(op), builder, tables);
  }
};
} // namespace

void mlir::moe::registerDecompositionExternalModels(DialectRegistry &registry) {
  attachToAllOps<Decomposition>(registry);
  registry.addExtension(+[](MLIRContext *context, MoEDialect *) {
    attachToOps<Mixing, SimilarityInformOp, SimilarityInformBackwardOp,
                AttentionPosteriorOp, AttentionPosteriorBackwardOp,
                AttentionEntropyOp>(context);
    AdjacencyUpdateOp::attachInterface<AdjacencyUpdateSplit>(*context);
  });
}
