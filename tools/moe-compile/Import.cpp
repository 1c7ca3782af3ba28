//===- Import.cpp - torch programs as MLIR --------------------------------===//

#include "Import.h"

#include "llvm/ADT/ScopeExit.h"
#include "llvm/ADT/SmallString.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/Process.h"
#include "llvm/Support/Program.h"
#include <cstdlib>

using namespace llvm;

/// The package beside the tool in a build tree; empty where it is installed.
static std::string findBuildTreePackage(StringRef toolFolder) {
  SmallString<128> package(sys::path::parent_path(toolFolder));
  sys::path::append(package, "python");
  return sys::fs::exists(package + "/moe_mlir") ? package.str().str() : "";
}

/// The interpreter of the environment that the tool is installed in or was
/// built with, else the one in PATH.
static std::string findPython(StringRef toolFolder, bool isBuildTree) {
  if (auto python = sys::findProgramByName("python3", {toolFolder}))
    return *python;
  if (isBuildTree && sys::fs::can_execute(MOE_BUILD_PYTHON))
    return MOE_BUILD_PYTHON;
  if (auto python = sys::findProgramByName("python3"))
    return *python;
  return "";
}

static void addToPythonPath(std::string path) {
  if (auto previous = sys::Process::GetEnv("PYTHONPATH");
      previous && !previous->empty())
    path += ":" + *previous;
  setenv("PYTHONPATH", path.c_str(), /*overwrite=*/1);
}

/// Runs the importer, which writes into `folder`.
static Error runImporter(StringRef python, StringRef path, StringRef folder) {
  std::string message;
  int status = sys::ExecuteAndWait(
      python, {python, "-m", "moe_mlir._import_program", path, folder},
      std::nullopt, {}, /*SecondsToWait=*/0, /*MemoryLimit=*/0, &message);
  if (status == 0)
    return Error::success();
  return createStringError(
      "cannot import '" + path + "' with " + python + ": " +
      // The importer's own errors exit with 1 and say what is wrong.
      (message.empty() ? status == 1 ? "see above"
                                     : "see above; is moe-mlir installed there?"
                       : message));
}

static Expected<std::string> readFile(StringRef folder, StringRef name) {
  SmallString<128> path(folder);
  sys::path::append(path, name);
  auto buffer = MemoryBuffer::getFile(path);
  if (!buffer)
    return createStringError(buffer.getError(),
                             "expected the importer to write " + name +
                                 ", found none");
  return (*buffer)->getBuffer().str();
}

Expected<mlir::moe::InputProgram>
mlir::moe::importTorchProgram(StringRef path, const char *tool) {
  // Python reports an unreadable file with a stack of its own words.
  if (std::error_code code = sys::fs::access(path, sys::fs::AccessMode::Exist))
    return createStringError(code,
                             "cannot read '" + path + "': " + code.message());
  std::string executable = sys::fs::getMainExecutable(
      tool, reinterpret_cast<void *>(&importTorchProgram));
  StringRef toolFolder = sys::path::parent_path(executable);
  std::string package = findBuildTreePackage(toolFolder);
  std::string python = findPython(toolFolder, !package.empty());
  if (python.empty())
    return createStringError("expected python3 in PATH to read '" + path +
                             "', found none");
  if (!package.empty())
    addToPythonPath(package);

  SmallString<128> folder;
  if (std::error_code code =
          sys::fs::createUniqueDirectory("moe-import", folder))
    return createStringError(code, "cannot make a temporary folder: " +
                                       code.message());
  scope_exit cleanup([&] { sys::fs::remove_directories(folder); });
  if (Error error = runImporter(python, path, folder))
    return error;

  InputProgram program;
  auto text = readFile(folder, "program.mlir");
  if (!text)
    return text.takeError();
  program.mlir = std::move(*text);
  for (StringRef name : {"program.json", "weights.safetensors"}) {
    auto content = readFile(folder, name);
    if (!content)
      return content.takeError();
    program.files[name.str()] = std::move(*content);
  }
  return program;
}
