//===- Chips.h - The GPUs that kernels are compiled for ---------*- C++ -*-===//

#ifndef MOE_CONVERSION_CHIPS_H
#define MOE_CONVERSION_CHIPS_H

#include "MoE/Support/Chips.h"
#include "mlir/IR/Diagnostics.h"
#include "mlir/IR/Operation.h"
#include "mlir/Support/LLVM.h"
#include <string>

namespace mlir::moe {

using ::moe::Chip;

/// The chip that the module of `op` is compiled for; without one, what every
/// chip has.
Chip getChip(Operation *op);

/// The chip of that name that kernels are compiled for; null if there is none.
const Chip *findChip(StringRef name);

/// Likewise; an error at `location`, which lists them, if there is none.
FailureOr<Chip> lookupChip(StringRef name, Location location);

/// "sm_80, sm_86, ..": the chips that kernels are compiled for.
std::string listChips();

} // namespace mlir::moe

#endif // MOE_CONVERSION_CHIPS_H
