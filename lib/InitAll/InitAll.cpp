//===- InitAll.cpp - Registration of everything moe -----------------------===//

#include "MoE/InitAll.h"

#include "mlir/InitAllDialects.h"
#include "mlir/InitAllExtensions.h"
#include "mlir/InitAllPasses.h"
#include "mlir/Target/LLVMIR/Dialect/All.h"

using namespace mlir;

void mlir::moe::registerEverything(DialectRegistry &registry) {
  registerAllDialects(registry);
  registerAllExtensions(registry);
  registerAllToLLVMIRTranslations(registry);
  registerDialect(registry);
  // Registering a pipeline twice aborts the process.
  [[maybe_unused]] static bool once = [] {
    registerAllPasses();
    registerPassesAndPipelines();
    return true;
  }();
}
