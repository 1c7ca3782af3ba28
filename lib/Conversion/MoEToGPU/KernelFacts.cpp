//===- KernelFacts.cpp - What kernels say of the ops they lower -----------===//

#include "KernelFacts.h"

using namespace mlir;
using namespace mlir::moe;

KernelFacts::KernelFacts(MLIRContext *context) {
  RewritePatternSet kernels(context);
  populateToThreadsPatterns(kernels, BlockShape());
  populateToGridPatterns(kernels, BlockShape());
  for (const std::unique_ptr<RewritePattern> &pattern :
       kernels.getNativePatterns())
    if (std::optional<OperationName> root = pattern->getRootKind())
      kinds.insert(*root);
  addAdjacencyFacts(*this);
  addDispersionFacts(*this);
  addRouterLogitsFacts(*this);
  addSoftmaxMixBackwardFacts(*this);
  addSoftmaxMixFacts(*this);
  addTopKRenormFacts(*this);
}

bool KernelFacts::isFormWithoutKernel(Operation *op) const {
  auto found = forms.find(op->getName().getTypeID());
  return found != forms.end() && !found->second.hasKernel(op);
}

StringRef KernelFacts::getRequirement(Operation *op) const {
  return forms.find(op->getName().getTypeID())->second.requirement;
}

std::optional<int64_t> KernelFacts::askForRows(const RowsOfKind &rows,
                                               Operation *op,
                                               BlockShape block) {
  auto found = rows.find(op->getName().getTypeID());
  return found == rows.end() ? std::nullopt : found->second(op, block);
}

std::optional<int64_t> KernelFacts::getThreads(Operation *op,
                                               BlockShape block) const {
  auto found = threads.find(op->getName().getTypeID());
  if (found == threads.end())
    return std::nullopt;
  return found->second(op, block);
}
