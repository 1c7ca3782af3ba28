//===- Import.h - torch programs as MLIR text -------------------*- C++ -*-===//

#ifndef MOE_TOOLS_MOE_COMPILE_IMPORT_H
#define MOE_TOOLS_MOE_COMPILE_IMPORT_H

#include "llvm/Support/Error.h"
#include <string>

namespace mlir::moe {

/// The MLIR text of a torch.export program, made by the Python package:
/// `python3 -m moe_mlir.export FILE.pt2 -o OUT.mlir`. `tool` is argv[0], beside
/// which the interpreter and the package are looked for first.
llvm::Expected<std::string> importTorchProgram(llvm::StringRef path,
                                               const char *tool);

} // namespace mlir::moe

#endif // MOE_TOOLS_MOE_COMPILE_IMPORT_H
