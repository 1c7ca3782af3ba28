//===- AttachTarget.cpp - Say for which chip kernels are compiled ---------===//

#include "MoE/Conversion/Chips.h"
#include "MoE/Conversion/Passes.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/LLVMIR/NVVMDialect.h"
#include "mlir/IR/BuiltinOps.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEATTACHNVVMTARGETPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

namespace {
struct AttachNVVMTargetPass
    : public mlir::moe::impl::MoEAttachNVVMTargetPassBase<
          AttachNVVMTargetPass> {
  using Base::Base;

  LogicalResult initialize(MLIRContext *context) override {
    return lookupChip(chip, UnknownLoc::get(context));
  }

  void runOnOperation() override {
    FailureOr<Chip> target = lookupChip(chip, getOperation().getLoc());
    if (failed(target))
      return signalPassFailure();
    auto attribute = NVVM::NVVMTargetAttr::get(
        &getContext(), /*optLevel=*/3, "nvptx64-nvidia-cuda", target->name,
        target->features());
    getOperation()->setAttr(kTargetAttrName, attribute);
  }
};
} // namespace
