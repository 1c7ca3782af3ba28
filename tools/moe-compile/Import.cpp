//===- Import.cpp - torch programs as MLIR text ---------------------------===//

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

/// The interpreter of the environment that the tool is installed in, else the
/// one in PATH.
static std::string findPython(StringRef toolFolder) {
  if (auto python = sys::findProgramByName("python3", {toolFolder}))
    return *python;
  if (auto python = sys::findProgramByName("python3"))
    return *python;
  return "";
}

/// In a build tree the package is not installed but lies at ../python.
static void addBuildTreePackage(StringRef toolFolder) {
  SmallString<128> package(sys::path::parent_path(toolFolder));
  sys::path::append(package, "python");
  if (!sys::fs::exists(package + "/moe_mlir"))
    return;
  std::string path = package.str().str();
  if (auto previous = sys::Process::GetEnv("PYTHONPATH"); previous && !previous->empty())
    path += ":" + *previous;
  setenv("PYTHONPATH", path.c_str(), /*overwrite=*/1);
}

Expected<std::string> mlir::moe::importTorchProgram(StringRef path,
                                                    const char *tool) {
  std::string executable = sys::fs::getMainExecutable(
      tool, reinterpret_cast<void *>(&importTorchProgram));
  StringRef folder = sys::path::parent_path(executable);
  std::string python = findPython(folder);
  if (python.empty())
    return createStringError("expected python3 in PATH to read '" + path +
                             "', found none");
  addBuildTreePackage(folder);

  SmallString<128> output;
  if (std::error_code code =
          sys::fs::createTemporaryFile("moe-import", "mlir", output))
    return createStringError(code, "cannot make a temporary file: " +
                                       code.message());
  scope_exit cleanup([&] { sys::fs::remove(output); });
  std::string message;
  int status = sys::ExecuteAndWait(
      python, {python, "-m", "moe_mlir.export", path, "-o", output},
      std::nullopt, {}, /*SecondsToWait=*/0, /*MemoryLimit=*/0, &message);
  if (status != 0)
    return createStringError(
        "cannot import '" + path + "' with " + python +
        (message.empty() ? ": see above; is moe-mlir installed there?"
                         : ": " + message));
  auto text = MemoryBuffer::getFile(output);
  if (!text)
    return createStringError(text.getError(), "the import wrote no file");
  return (*text)->getBuffer().str();
}
