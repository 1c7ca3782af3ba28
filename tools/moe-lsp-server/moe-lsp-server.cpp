//===- moe-lsp-server.cpp - Editor support for moe IR ---------------------===//

#include "MoE/InitAll.h"

#include "mlir/IR/DialectRegistry.h"
#include "mlir/Tools/mlir-lsp-server/MlirLspServerMain.h"

#include <cstdlib>

int main(int argc, char **argv) {
  mlir::DialectRegistry registry;
  mlir::moe::registerEverything(registry);
  return mlir::failed(mlir::MlirLspServerMain(argc, argv, registry))
             ? EXIT_FAILURE
             : EXIT_SUCCESS;
}
