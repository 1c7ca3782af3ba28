//===- moe-opt.cpp - mlir-opt with the moe dialect ------------------------===//

#include "MoE/InitAll.h"
#include "MoE/Support/Files.h"

#include "mlir/IR/DialectRegistry.h"
#include "mlir/Support/FileUtilities.h"
#include "mlir/Tools/mlir-opt/MlirOptMain.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/Support/InitLLVM.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/raw_ostream.h"

/// Whether an argument is the option `name` or starts with it.
static bool hasOption(llvm::ArrayRef<char *> arguments, llvm::StringRef name) {
  return llvm::any_of(arguments, [&](llvm::StringRef argument) {
    return argument.consume_front("-") &&
           (argument.consume_front("-"), argument.starts_with(name));
  });
}

/// As mlir-opt, which opens its output first and removes it where a pass fails:
/// the user would lose a file of that name, which may be the input.
static llvm::LogicalResult runIntoFile(llvm::StringRef input,
                                       llvm::StringRef output,
                                       mlir::DialectRegistry &registry) {
  std::string message, text;
  auto buffer = mlir::openInputFile(input, &message);
  if (!buffer) {
    llvm::errs() << message << "\n";
    return llvm::failure();
  }
  llvm::raw_string_ostream stream(text);
  if (llvm::failed(
          mlir::MlirOptMain(stream, std::move(buffer), registry,
                            mlir::MlirOptMainConfig::createFromCLOptions())))
    return llvm::failure();
  std::error_code code = moe::writeFile(output.str(), text);
  if (code)
    llvm::errs() << "moe-opt: error: cannot write '" << output
                 << "': " << code.message() << "\n";
  return llvm::failure(static_cast<bool>(code));
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
  auto [input, output] = mlir::registerAndParseCLIOptions(
      arguments.size() - 1, arguments.data(),
      "moe-opt: optimise and lower mixture-of-experts routing\n", registry);
  auto config = mlir::MlirOptMainConfig::createFromCLOptions();
  if (output == "-" || config.shouldShowDialects() || config.shouldListPasses())
    return mlir::asMainReturnCode(
        mlir::MlirOptMain(argc, argv, input, output, registry));
  llvm::InitLLVM init(argc, argv);
  return mlir::asMainReturnCode(runIntoFile(input, output, registry));
}
