//===- moe-opt.cpp - mlir-opt with the moe dialect ------------------------===//

#include "MoE/InitAll.h"

#include "mlir/IR/DialectRegistry.h"
#include "mlir/Tools/mlir-opt/MlirOptMain.h"
#include "llvm/ADT/STLExtras.h"

/// Whether an argument is the option `name` or starts with it.
static bool hasOption(llvm::ArrayRef<char *> arguments, llvm::StringRef name) {
  return llvm::any_of(arguments, [&](llvm::StringRef argument) {
    return argument.consume_front("-") &&
           (argument.consume_front("-"), argument.starts_with(name));
  });
}

int main(int argc, char **argv) {
  llvm::SmallVector<char *> arguments(argv, argv + argc);
  // mlir-opt accepts a folder for phases and then writes none unless it is told
  // which ones. Those that changed something are what a reader wants.
  static char afterAll[] = "--mlir-print-ir-after-all";
  static char afterChange[] = "--mlir-print-ir-after-change";
  if (hasOption(arguments, "mlir-print-ir-tree-dir") &&
      !hasOption(arguments, "mlir-print-ir-before") &&
      !hasOption(arguments, "mlir-print-ir-after"))
    arguments.append({afterAll, afterChange});
  arguments.push_back(nullptr);

  mlir::DialectRegistry registry;
  mlir::moe::registerEverything(registry);
  return mlir::asMainReturnCode(mlir::MlirOptMain(
      arguments.size() - 1, arguments.data(),
      "moe-opt: optimise and lower mixture-of-experts routing\n", registry));
}
