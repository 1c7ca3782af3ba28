//===- Chips.cpp - The GPUs that kernels are compiled for -----------------===//

#include "MoE/Conversion/Chips.h"
#include "MoE/Transforms/Transforms.h"

#include "mlir/Dialect/LLVMIR/NVVMDialect.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"

using namespace mlir;
using namespace mlir::moe;

static auto getTargets() {
  return llvm::make_filter_range(
      ::moe::kChips, [](const Chip &chip) { return chip.isTarget(); });
}

const Chip *mlir::moe::findChip(StringRef name) {
  for (const Chip &chip : getTargets())
    if (name == StringRef(chip.name))
      return &chip;
  return nullptr;
}

Chip mlir::moe::getChip(Operation *op) {
  auto target = dyn_cast_or_null<NVVM::NVVMTargetAttr>(getTarget(op));
  const Chip *chip = target ? findChip(target.getChip()) : nullptr;
  return chip ? *chip : Chip();
}

FailureOr<Chip> mlir::moe::lookupChip(StringRef name, Location location) {
  if (const Chip *chip = findChip(name))
    return *chip;
  return emitError(location) << "expected a chip out of " << listChips()
                             << ", found '" << name << "'";
}

std::string mlir::moe::listChips() {
  return llvm::join(
      llvm::map_range(getTargets(),
                      [](const Chip &chip) { return StringRef(chip.name); }),
      ", ");
}
