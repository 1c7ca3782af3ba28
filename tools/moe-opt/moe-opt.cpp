//===- moe-opt.cpp - mlir-opt with the moe dialect ------------------------===//

#include "MoE/InitAll.h"

#include "mlir/IR/DialectRegistry.h"
#include "mlir/Tools/mlir-opt/MlirOptMain.h"

int main(int argc, char **argv) {
  mlir::DialectRegistry registry;
  mlir::moe::registerEverything(registry);
  return mlir::asMainReturnCode(mlir::MlirOptMain(
      argc, argv, "moe-opt: optimise and lower mixture-of-experts routing\n",
      registry));
}
