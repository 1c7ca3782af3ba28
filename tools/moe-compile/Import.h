//===- Import.h - torch programs as MLIR ------------------------*- C++ -*-===//

#ifndef MOE_TOOLS_MOE_COMPILE_IMPORT_H
#define MOE_TOOLS_MOE_COMPILE_IMPORT_H

#include "MoE/Target/Artifact.h"

#include "llvm/Support/Error.h"
#include <map>
#include <memory>
#include <string>

namespace mlir::moe {

/// A new folder, removed with this.
class TemporaryFolder {
public:
  /// Beside `path`, and named after it.
  static llvm::Expected<std::unique_ptr<TemporaryFolder>>
  create(llvm::StringRef path);
  TemporaryFolder(const TemporaryFolder &) = delete;
  ~TemporaryFolder();

  std::string getFile(llvm::StringRef name) const;

private:
  explicit TemporaryFolder(std::string path) : path(std::move(path)) {}
  std::string path;
};

/// What there is to compile.
struct InputProgram {
  std::string mlir;
  /// Of a decoder instead: the text of each program by its name.
  std::map<std::string, std::string> programs;
  /// What an artifact carries besides code: file name to content.
  std::map<std::string, std::string> files;
  /// The same of files that lie on disk still.
  std::map<std::string, StoredFile> storedFiles;
  std::unique_ptr<TemporaryFolder> folder;
};

/// Imports a file of torch.export.save through the Python package: `python3 -m
/// moe_mlir.frontends.import_program`. `tool` is argv[0], beside which the
/// interpreter and the package are looked for first. The weights come along
/// where the artifact's place is known: they are written beside it and are
/// moved into it, so that they are never in this process's memory.
/// With the name of a CPU in `packFor`, they are packed for it.
llvm::Expected<InputProgram> importTorchProgram(llvm::StringRef path,
                                                llvm::StringRef artifact,
                                                llvm::StringRef packFor,
                                                const char *tool);

/// Reads the folder in which `moe_mlir.save_decoder` leaves the programs of a
/// decoder: NAME.mlir with one public function each, decoder.json, and weights,
/// which are moved from there into an artifact.
llvm::Expected<InputProgram> readDecoderPrograms(llvm::StringRef folder);

} // namespace mlir::moe

#endif // MOE_TOOLS_MOE_COMPILE_IMPORT_H
