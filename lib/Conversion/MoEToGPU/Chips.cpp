//===- Chips.cpp - The GPUs that kernels are compiled for -----------------===//

#include "MoE/Conversion/Chips.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"

using namespace mlir;
using namespace mlir::moe;

ArrayRef<Chip> mlir::moe::knownChips() {
  static constexpr Chip chips[] = {
      {"sm_80", 70, 163 * 1024, 1, false}, {"sm_86", 71, 99 * 1024, 1, false},
      {"sm_89", 78, 99 * 1024, 1, false},  {"sm_90", 78, 227 * 1024, 8, false},
      {"sm_90a", 80, 227 * 1024, 8, true}, {"sm_100", 86, 227 * 1024, 8, false},
      {"sm_120", 87, 99 * 1024, 8, false},
  };
  return chips;
}

FailureOr<Chip> mlir::moe::lookupChip(StringRef name, Location location) {
  for (const Chip &chip : knownChips())
    if (chip.name == name)
      return chip;
  return emitError(location)
         << "expected a chip out of "
         << llvm::join(llvm::map_range(knownChips(),
                                       [](Chip chip) { return chip.name; }),
                       ", ")
         << ", found '" << name << "'";
}
