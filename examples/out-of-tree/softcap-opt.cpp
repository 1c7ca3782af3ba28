//===- softcap-opt.cpp - moe-opt with the softcap dialect -----------------===//

#include "SoftCap.h"

#include "MoE/InitAll.h"

#include "mlir/Tools/mlir-opt/MlirOptMain.h"

int main(int argc, char **argv) {
  mlir::DialectRegistry registry;
  // The dialects and passes of MLIR and of moe-mlir, then our own.
  mlir::moe::registerEverything(registry);
  registry.insert<softcap::SoftCapDialect>();
  softcap::registerSoftCapPasses();
  return mlir::asMainReturnCode(mlir::MlirOptMain(
      argc, argv, "softcap-opt: moe-opt with soft capping\n", registry));
}
