//===- AttachTarget.cpp - The chips that kernels are compiled for ---------===//

#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Conversion/Passes.h"

#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/NVVMDialect.h"
#include "mlir/IR/BuiltinOps.h"
#include "llvm/ADT/STLExtras.h"

namespace mlir::moe {
#define GEN_PASS_DEF_MOEATTACHNVVMTARGETPASS
#include "MoE/Conversion/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;

ArrayRef<NVVMChip> mlir::moe::getNVVMChips() {
  static constexpr NVVMChip chips[] = {
      {"sm_80", "+ptx70"},  {"sm_86", "+ptx71"},  {"sm_89", "+ptx78"},
      {"sm_90", "+ptx78"},  {"sm_90a", "+ptx80"}, {"sm_100", "+ptx86"},
      {"sm_120", "+ptx87"},
  };
  return chips;
}

const NVVMChip *mlir::moe::findNVVMChip(StringRef name) {
  const NVVMChip *found = llvm::find_if(
      getNVVMChips(), [&](const NVVMChip &chip) { return chip.name == name; });
  return found == getNVVMChips().end() ? nullptr : found;
}

std::string mlir::moe::getNVVMChipNames() {
  return llvm::join(llvm::map_range(getNVVMChips(), [](const NVVMChip &chip) {
                      return chip.name.str();
                    }),
                    ", ");
}

namespace {
struct AttachNVVMTargetPass
    : public mlir::moe::impl::MoEAttachNVVMTargetPassBase<
          AttachNVVMTargetPass> {
  using Base::Base;

  LogicalResult initialize(MLIRContext *context) override {
    if (findNVVMChip(chip))
      return success();
    return emitError(UnknownLoc::get(context))
           << "expected chip to be one of " << getNVVMChipNames()
           << ", found '" << chip << "'";
  }

  void runOnOperation() override {
    const NVVMChip *target = findNVVMChip(chip);
    auto attribute = NVVM::NVVMTargetAttr::get(
        &getContext(), /*optLevel=*/3, "nvptx64-nvidia-cuda", target->name,
        target->features);
    for (auto module : getOperation().getOps<gpu::GPUModuleOp>())
      module.setTargetsAttr(ArrayAttr::get(&getContext(), {attribute}));
  }
};
} // namespace
