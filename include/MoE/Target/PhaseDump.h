//===- PhaseDump.h - The module after each pass, as files -------*- C++ -*-===//

#ifndef MOE_TARGET_PHASEDUMP_H
#define MOE_TARGET_PHASEDUMP_H

#include "mlir/IR/OperationSupport.h"
#include "mlir/Pass/PassInstrumentation.h"
#include <string>

namespace mlir::moe {

/// Writes NN-<pass>.mlir into a folder after every pass that changed the
/// module, and NN-<pass>.failed.mlir where one failed; files are complete as
/// soon as they have their name, so a crash leaves what led to it.
class PhaseDump : public PassInstrumentation {
public:
  PhaseDump(StringRef folder, Operation *module);

  void runAfterPass(Pass *pass, Operation *op) override;
  void runAfterPassFailed(Pass *pass, Operation *op) override;

private:
  void write(StringRef stem);

  std::string folder;
  Operation *module;
  OperationFingerPrint last;
  unsigned count = 0;
};

/// Writes one phase file; failure to write is a warning on the module, because
/// a dump must not break the compilation that it shows.
void writePhase(Operation *module, StringRef folder, StringRef file,
                StringRef text);

} // namespace mlir::moe

#endif // MOE_TARGET_PHASEDUMP_H
