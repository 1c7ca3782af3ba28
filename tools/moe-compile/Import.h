//===- Import.h - torch programs as MLIR ------------------------*- C++ -*-===//

#ifndef MOE_TOOLS_MOE_COMPILE_IMPORT_H
#define MOE_TOOLS_MOE_COMPILE_IMPORT_H

#include "llvm/Support/Error.h"
#include <map>
#include <string>

namespace mlir::moe {

/// What there is to compile.
struct InputProgram {
  std::string mlir;
  /// What an artifact carries besides code: file name to content.
  std::map<std::string, std::string> files;
};

/// Imports a file of torch.export.save through the Python package: `python3 -m
/// moe_mlir._import_program`. `tool` is argv[0], beside which the interpreter
/// and the package are looked for first.
llvm::Expected<InputProgram> importTorchProgram(llvm::StringRef path,
                                                const char *tool);

} // namespace mlir::moe

#endif // MOE_TOOLS_MOE_COMPILE_IMPORT_H
