//===- KernelFacts.cpp - What kernels say of the ops they lower -----------===//

#include "MoE/Transforms/KernelFacts.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/Linalg/IR/LinalgInterfaces.h"
#include "mlir/IR/BuiltinOps.h"

using namespace mlir;
using namespace mlir::moe;

void KernelFacts::addKernels(const RewritePatternSet &patterns) {
  for (const std::unique_ptr<RewritePattern> &pattern :
       const_cast<RewritePatternSet &>(patterns).getNativePatterns())
    if (std::optional<OperationName> root = pattern->getRootKind())
      kinds.insert(*root);
}

bool KernelFacts::isFormWithoutKernel(Operation *op) const {
  auto found = forms.find(op->getName().getTypeID());
  return found != forms.end() && !found->second.hasKernel(op);
}

StringRef KernelFacts::getRequirement(Operation *op) const {
  return forms.find(op->getName().getTypeID())->second.requirement;
}

SmallVector<KernelConfigAttr> KernelFacts::getConfigs(Operation *op) const {
  auto found = configs.find(op->getName().getTypeID());
  if (found == configs.end() || isFormWithoutKernel(op))
    return {};
  return found->second(op);
}

Attribute mlir::moe::getTarget(Operation *op) {
  auto module = dyn_cast<ModuleOp>(op);
  if (!module)
    module = op->getParentOfType<ModuleOp>();
  return module ? module->getAttr(kTargetAttrName) : Attribute();
}

bool mlir::moe::isForGPU(Operation *op) { return getTarget(op) != nullptr; }

void mlir::moe::decomposeIf(
    Operation *root,
    function_ref<bool(linalg::AggregatedOpInterface)> condition) {
  SmallVector<linalg::AggregatedOpInterface> ops;
  root->walk([&](linalg::AggregatedOpInterface op) {
    if (condition(op))
      ops.push_back(op);
  });
  IRRewriter rewriter(root->getContext());
  for (linalg::AggregatedOpInterface op : ops) {
    rewriter.setInsertionPoint(op);
    FailureOr<SmallVector<Value>> results = op.decomposeOperation(rewriter);
    if (succeeded(results))
      rewriter.replaceOp(op, *results);
  }
}

void mlir::moe::decomposeFormsWithoutKernel(Operation *root,
                                            const KernelFacts &facts,
                                            remark::RemarkOpts remark) {
  decomposeIf(root, [&](linalg::AggregatedOpInterface op) {
    if (!facts.isFormWithoutKernel(op))
      return false;
    // The user may have expected the kernel, and its memory.
    remark::missed(op->getLoc(), remark)
        << (op->getName().getStringRef() +
            " runs as separate steps, with buffers between them")
               .str()
        << remark::reason("its kernel expects {0}", facts.getRequirement(op));
    return true;
  });
}
