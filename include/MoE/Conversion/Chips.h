//===- Chips.h - The GPUs that kernels are compiled for ---------*- C++ -*-===//

#ifndef MOE_CONVERSION_CHIPS_H
#define MOE_CONVERSION_CHIPS_H

#include "mlir/IR/Diagnostics.h"
#include "mlir/Support/LLVM.h"
#include <string>

namespace mlir::moe {

/// A chip that the compiler makes kernels for, with the lowest PTX version that
/// has all its instructions: old drivers load the result too, and LLVM's own
/// default can be a version that no assembler knows yet.
struct Chip {
  StringRef name;
  /// In tenths: 80 is PTX 8.0.
  unsigned ptxVersion;
  /// The most shared memory that a block may have.
  int64_t sharedBytes;
  /// Blocks of a cluster that every launch may have; 1 if there are none.
  int64_t clusterBlocks;
  /// Whether it has wgmma: no chip before sm_90a, and none after it.
  bool hasWgmma;

  /// "+ptx80", the form that nvvm.target takes.
  std::string features() const { return "+ptx" + std::to_string(ptxVersion); }
};

ArrayRef<Chip> knownChips();

/// The chip of that name, or an error at `location` that lists the known ones.
FailureOr<Chip> lookupChip(StringRef name, Location location);

} // namespace mlir::moe

#endif // MOE_CONVERSION_CHIPS_H
