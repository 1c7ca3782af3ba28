//===- Input.h - Reading and running IR without crashing --------*- C++ -*-===//

#ifndef MOE_TARGET_INPUT_H
#define MOE_TARGET_INPUT_H

#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/Diagnostics.h"
#include "mlir/IR/OwningOpRef.h"
#include "llvm/ADT/StringMap.h"
#include <optional>
#include <string>
#include <vector>

namespace mlir::moe {

/// What of an input is refused before it is parsed.
struct InputOptions {
  /// Deeper bracket nesting is refused: MLIR's parser, verifier and destructors
  /// recurse, and some thousands of levels overflow the stack.
  unsigned nestingLimit = 256;
  /// MLIR's bytecode reader is not safe against manipulated files.
  bool allowBytecode = false;
};

/// A context with every dialect that the compiler knows, without threads: one
/// context serves one compilation, and diagnostics come in a fixed order.
std::unique_ptr<MLIRContext> createContext();

/// Lets our passes say what they did not do and why: their remarks
/// (mlir/IR/Remarks.h) come as diagnostics of severity remark.
void enableRemarks(MLIRContext &context);

/// Parses and verifies a module from text, or from bytecode when allowed.
/// `name` is the file name in diagnostics. Null after a diagnostic.
OwningOpRef<ModuleOp> parseInput(MLIRContext &context, StringRef source,
                                 StringRef name,
                                 const InputOptions &options = {});

/// Moves what is in `part` to the end of `module`. The functions of a part get
/// names of their own there: the public one `name`, the others names that begin
/// with it.
LogicalResult addModule(ModuleOp module, ModuleOp part, StringRef name);

/// Runs a textual pass pipeline: "moe-to-cpu", "cse,canonicalize" or, with its
/// anchor, "builtin.module(...)". With `dumpDir`, the module is written there
/// after every pass that changed it, as NN-<pass>.mlir.
LogicalResult runPipeline(ModuleOp module, StringRef pipeline,
                          StringRef dumpDir = "");

/// Collects the diagnostics of a context as text while it lives:
/// "file:line:col: error: message", notes and call sites on lines of their own,
/// and the offending line of `source` where it is known.
class DiagnosticCollector {
public:
  explicit DiagnosticCollector(MLIRContext &context);

  /// The text that the locations of file `name` point into.
  void setSource(StringRef text, StringRef name);

  /// Errors, and everything else, in order of emission. What is said again, as
  /// of each copy of a layer, is there once, with the number of times.
  std::vector<std::string> errors, others;

private:
  LogicalResult handle(Diagnostic &diagnostic);
  void add(const std::string &text);
  std::string sourceLine(Location location) const;

  std::string source, sourceName;
  /// The place in `others` of each text, and how often it was said.
  llvm::StringMap<std::pair<size_t, unsigned>> said;
  ScopedDiagnosticHandler handler;
};

} // namespace mlir::moe

#endif // MOE_TARGET_INPUT_H
