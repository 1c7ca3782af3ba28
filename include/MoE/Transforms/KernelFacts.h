//===- KernelFacts.h - What kernels say of the ops they lower ---*- C++ -*-===//
//
// Which ops have a kernel is read off the patterns of a target. What a pattern
// does not show, its family of kernels says beside it: which forms of its op it
// lowers, and in which configurations, the best one first. The passes that
// prepare ops for kernels ask these facts and know no op.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_TRANSFORMS_KERNELFACTS_H
#define MOE_TRANSFORMS_KERNELFACTS_H

#include "MoE/Dialect/MoE/IR/KernelConfig.h"

#include "mlir/IR/Remarks.h"
#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/DenseSet.h"

#include <functional>

namespace mlir::moe {

class KernelFacts {
public:
  /// The ops that `patterns` start from have a kernel.
  void addKernels(const RewritePatternSet &patterns);
  /// The kernel of `OpTy` lowers the forms for which `hasKernel` holds, those
  /// with what `requirement` says.
  template <typename OpTy, typename CallableT>
  void addForms(CallableT hasKernel, StringRef requirement) {
    forms[TypeID::get<OpTy>()] = {
        [=](Operation *op) { return hasKernel(cast<OpTy>(op)); }, requirement};
  }
  /// The kernel of `OpTy` can run an op in the configurations that `getConfigs`
  /// returns; kernels of other ops have no choice to make.
  template <typename OpTy, typename CallableT>
  void addConfigs(CallableT getConfigs) {
    configs[TypeID::get<OpTy>()] = [=](Operation *op) {
      return getConfigs(cast<OpTy>(op));
    };
  }

  /// Whether a kernel lowers `op`.
  bool hasKernel(Operation *op) const {
    return kinds.contains(op->getName()) && !isFormWithoutKernel(op);
  }
  /// Whether ops of the kind have a kernel, but not `op`.
  bool isFormWithoutKernel(Operation *op) const;
  /// What the kernel of such an op expects.
  StringRef getRequirement(Operation *op) const;
  /// The configurations in which the kernel can run `op`, best first.
  SmallVector<KernelConfigAttr> getConfigs(Operation *op) const;

private:
  /// The ops that patterns lower.
  llvm::DenseSet<OperationName> kinds;
  struct Forms {
    std::function<bool(Operation *)> hasKernel;
    StringRef requirement;
  };
  llvm::DenseMap<TypeID, Forms> forms;
  llvm::DenseMap<TypeID,
                 std::function<SmallVector<KernelConfigAttr>(Operation *)>>
      configs;
};

/// Decomposes the ops of a kind that has a kernel whose form has none, with a
/// missed remark.
void decomposeFormsWithoutKernel(Operation *root, const KernelFacts &facts,
                                 remark::RemarkOpts remark);

} // namespace mlir::moe

#endif // MOE_TRANSFORMS_KERNELFACTS_H
