//===- moe-reduce.cpp - Reduction of failing moe IR -----------------------===//

#include "MoE/InitAll.h"
#include "MoE/Support/Files.h"

#include "mlir/IR/DialectRegistry.h"
#include "mlir/IR/MLIRContext.h"
#include "mlir/Tools/mlir-reduce/MlirReduceMain.h"
#include "llvm/ADT/SmallString.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/FileUtilities.h"
#include "llvm/Support/raw_ostream.h"

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

/// Takes the file that -o names out of the arguments, and puts `replacement`
/// in its place; empty where there is none.
static std::string replaceOutput(std::vector<std::string> &arguments,
                                 llvm::StringRef replacement) {
  for (size_t i = 1; i < arguments.size(); ++i) {
    llvm::StringRef argument = arguments[i];
    if (!argument.consume_front("--o") && !argument.consume_front("-o"))
      continue;
    if (argument.consume_front("=")) {
      std::string output = argument.str();
      arguments[i] = ("-o=" + replacement).str();
      return output;
    }
    if (argument.empty() && i + 1 < arguments.size())
      return std::exchange(arguments[i + 1], replacement.str());
  }
  return "";
}

static int report(const llvm::Twine &message) {
  llvm::errs() << "moe-reduce: error: " << message << "\n";
  return EXIT_FAILURE;
}

/// As mlir-reduce, which empties its output before it reads its input: the user
/// would lose a file of that name, which may be the input.
int main(int argc, char **argv) {
  llvm::SmallString<128> staged;
  if (std::error_code code =
          llvm::sys::fs::createTemporaryFile("moe-reduce", "mlir", staged))
    return report("cannot create a temporary file: " + code.message());
  llvm::FileRemover remover(staged);
  std::vector<std::string> arguments(argv, argv + argc);
  std::string output = replaceOutput(arguments, staged);
  std::vector<char *> pointers;
  for (std::string &argument : arguments)
    pointers.push_back(argument.data());
  pointers.push_back(nullptr);

  mlir::DialectRegistry registry;
  mlir::moe::registerEverything(registry);
  mlir::MLIRContext context(registry);
  if (mlir::failed(mlir::mlirReduceMain(argc, pointers.data(), context)))
    return EXIT_FAILURE;
  if (output.empty())
    return EXIT_SUCCESS;
  std::string text;
  std::error_code code = moe::readFile(staged.str().str(), text);
  if (!code && output == "-")
    llvm::outs() << text;
  else if (!code)
    code = moe::writeFile(output, text);
  return code ? report("cannot write '" + output + "': " + code.message())
              : EXIT_SUCCESS;
}
