//===- Import.cpp - torch programs as MLIR --------------------------------===//

#include "Import.h"

#include "llvm/ADT/SmallString.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/Process.h"
#include "llvm/Support/Program.h"
#include <cstdlib>

using namespace llvm;
using mlir::moe::InputProgram;
using mlir::moe::TemporaryFolder;

Expected<std::unique_ptr<TemporaryFolder>>
TemporaryFolder::create(StringRef path) {
  // A relative path would become one in the system's temporary folder, which
  // may have no room for the weights of a model.
  SmallString<128> folder, beside(path);
  if (std::error_code code = sys::fs::make_absolute(beside))
    return createStringError(code, "cannot find the folder of '" + path +
                                       "': " + code.message());
  sys::fs::createUniquePath(beside + ".import-%%%%%%%%", folder,
                            /*MakeAbsolute=*/true);
  if (std::error_code code = sys::fs::create_directory(folder))
    return createStringError(code, "cannot create a folder beside '" + path +
                                       "': " + code.message());
  return std::unique_ptr<TemporaryFolder>(
      new TemporaryFolder(folder.str().str()));
}

TemporaryFolder::~TemporaryFolder() { sys::fs::remove_directories(path); }

std::string TemporaryFolder::getFile(StringRef name) const {
  SmallString<128> file(path);
  sys::path::append(file, name);
  return file.str().str();
}

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
static Error runImporter(StringRef python, StringRef path, StringRef folder,
                         bool withWeights, StringRef packFor) {
  std::string message;
  // -P: nothing in the working folder takes the place of a module.
  SmallVector<StringRef> arguments = {
      python, "-P", "-m", "moe_mlir.frontends.import_program", path, folder};
  if (!withWeights)
    arguments.push_back("--without-weights");
  std::string pack = ("--pack-for=" + packFor).str();
  if (!packFor.empty())
    arguments.push_back(pack);
  int status =
      sys::ExecuteAndWait(python, arguments, std::nullopt, {},
                          /*SecondsToWait=*/0, /*MemoryLimit=*/0, &message);
  if (status == 0)
    return Error::success();
  return createStringError(
      "cannot import '" + path + "' with " + python + ": " +
      // The importer's own errors exit with 1 and say what is wrong.
      (message.empty() ? status == 1 ? "see above"
                                     : "see above; is moe-mlir installed there?"
                       : message));
}

static std::string join(StringRef folder, StringRef name) {
  SmallString<128> file(folder);
  sys::path::append(file, name);
  return file.str().str();
}

static Expected<std::string> readFile(StringRef folder, StringRef name) {
  auto buffer = MemoryBuffer::getFile(join(folder, name));
  if (!buffer)
    return createStringError(buffer.getError(), "expected '" + name + "' in '" +
                                                    folder + "', found none");
  return (*buffer)->getBuffer().str();
}

/// What describes the program in an artifact; the weights, where they were
/// left, and what is said of them.
static Error addProgramFiles(InputProgram &program, StringRef folder,
                             StringRef descriptionName) {
  auto description = readFile(folder, descriptionName);
  if (!description)
    return description.takeError();
  program.files[descriptionName.str()] = std::move(*description);
  auto files = readFile(folder, "files.json");
  if (!files)
    return files.takeError();
  auto entries = json::parse(*files);
  if (!entries)
    return entries.takeError();
  const json::Object *list = entries->getAsObject();
  if (!list)
    return createStringError("expected an object in files.json of '" + folder +
                             "', found something else");
  for (const auto &[name, entry] : *list)
    program.storedFiles[name.str()] = {join(folder, StringRef(name)), entry};
  return Error::success();
}

Expected<InputProgram> mlir::moe::readDecoderPrograms(StringRef folder) {
  InputProgram program;
  std::error_code code;
  for (sys::fs::directory_iterator at(folder, code), end; at != end && !code;
       at.increment(code)) {
    StringRef name = sys::path::filename(at->path());
    if (sys::path::extension(name) != ".mlir")
      continue;
    auto text = readFile(folder, name);
    if (!text)
      return text.takeError();
    program.programs[sys::path::stem(name).str()] = std::move(*text);
  }
  if (code)
    return createStringError(code, "cannot read the folder '" + folder +
                                       "': " + code.message());
  if (Error error = addProgramFiles(program, folder, "decoder.json"))
    return error;
  return program;
}

Expected<mlir::moe::InputProgram>
mlir::moe::importTorchProgram(StringRef path, StringRef artifact,
                              StringRef packFor, const char *tool) {
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

  bool withWeights = !artifact.empty();
  SmallString<128> place(artifact.rtrim('/'));
  if (!withWeights) {
    sys::path::system_temp_directory(/*ErasedOnReboot=*/true, place);
    sys::path::append(place, "moe");
  }
  auto folder = TemporaryFolder::create(place);
  if (!folder)
    return folder.takeError();
  InputProgram program;
  program.folder = std::move(*folder);
  if (Error error = runImporter(python, path, program.folder->getFile(""),
                                withWeights, packFor))
    return error;
  std::string imported = program.folder->getFile("");
  auto text = readFile(imported, "program.mlir");
  if (!text)
    return text.takeError();
  program.mlir = std::move(*text);
  if (withWeights)
    if (Error error = addProgramFiles(program, imported, "program.json"))
      return error;
  return program;
}
