//===- PhaseDump.cpp - The module after each pass, as files ---------------===//

#include "MoE/Target/PhaseDump.h"

#include "MoE/Support/Files.h"

#include "mlir/IR/AsmState.h"
#include "mlir/IR/Diagnostics.h"
#include "mlir/Pass/Pass.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/raw_ostream.h"

using namespace mlir;
using namespace mlir::moe;

void mlir::moe::writePhase(Operation *module, StringRef folder, StringRef file,
                           StringRef text) {
  SmallString<128> path(folder);
  llvm::sys::path::append(path, file);
  std::error_code code = llvm::sys::fs::create_directories(folder);
  if (!code)
    code = ::moe::writeFile(path.str().str(), text);
  if (code)
    emitWarning(module->getLoc())
        << "cannot write phase file '" << path << "': " << code.message();
}

PhaseDump::PhaseDump(StringRef folder, Operation *module)
    : folder(folder), module(module), last(module) {
  write("input");
}

void PhaseDump::write(StringRef stem) {
  std::string text;
  llvm::raw_string_ostream stream(text);
  // A pass that failed may leave IR that the pretty printers cannot take.
  OpPrintingFlags flags;
  flags.elideLargeElementsAttrs(64);
  if (stem.ends_with(".failed"))
    flags.printGenericOpForm();
  module->print(stream, flags);
  writePhase(module, folder,
             llvm::formatv("{0,0+2}-{1}.mlir", count++, stem).str(), text);
}

/// The flag of a pass; anonymous passes are drivers of nested pipelines, whose
/// own passes have been seen already.
static StringRef nameOf(Pass *pass) { return pass->getArgument(); }

void PhaseDump::runAfterPass(Pass *pass, Operation *op) {
  if (nameOf(pass).empty())
    return;
  OperationFingerPrint now(module);
  if (now == last)
    return;
  last = now;
  write(nameOf(pass));
}

void PhaseDump::runAfterPassFailed(Pass *pass, Operation *op) {
  if (!nameOf(pass).empty())
    write((nameOf(pass) + ".failed").str());
}
