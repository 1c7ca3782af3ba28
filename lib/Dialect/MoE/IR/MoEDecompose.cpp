//===- MoEDecompose.cpp - The meaning of the ops in smaller ops -----------===//

#include "MoE/Dialect/MoE/IR/MoE.h"

using namespace mlir;
using namespace mlir::moe;

#define MOE_NO_DECOMPOSITION(OP)                                               \
  FailureOr<SmallVector<Value>> OP::decomposeOperation(OpBuilder &) {          \
    return failure();                                                          \
  }
MOE_NO_DECOMPOSITION(RouterLogitsOp)
MOE_NO_DECOMPOSITION(TopKRenormOp)
MOE_NO_DECOMPOSITION(SimilarityInformOp)
MOE_NO_DECOMPOSITION(AttentionPosteriorOp)
MOE_NO_DECOMPOSITION(SoftmaxMixOp)
MOE_NO_DECOMPOSITION(MadDispersionOp)
MOE_NO_DECOMPOSITION(AdjacencyGateOp)
MOE_NO_DECOMPOSITION(AdjacencyUpdateOp)

FailureOr<SmallVector<Value>>
SimilarityInformOp::convertToSoftmaxMix(OpBuilder &) {
  return failure();
}
FailureOr<SmallVector<Value>>
AttentionPosteriorOp::convertToSoftmaxMix(OpBuilder &) {
  return failure();
}
