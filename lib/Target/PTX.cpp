//===- PTX.cpp - GPU binaries to PTX and cubin ----------------------------===//

#include "MoE/Target/PTX.h"

#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/GPU/Transforms/Passes.h"
#include "mlir/Pass/PassManager.h"
#include "llvm/ADT/ScopeExit.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringSet.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/Path.h"
#include "llvm/Support/Process.h"
#include "llvm/Support/Program.h"
#include "llvm/Target/TargetMachine.h"
#include <dlfcn.h>

using namespace mlir;
using namespace mlir::moe;

namespace fs = llvm::sys::fs;

//===----------------------------------------------------------------------===//
// PTX text
//===----------------------------------------------------------------------===//

/// Serialises what is left of gpu.module, in the text form that needs no CUDA.
static LogicalResult serialiseModules(ModuleOp module) {
  if (module.getOps<gpu::GPUModuleOp>().empty())
    return success();
  PassManager passes(module.getContext());
  GpuModuleToBinaryPassOptions options;
  options.compilationTarget = "isa";
  passes.addPass(createGpuModuleToBinaryPass(options));
  return passes.run(module);
}

namespace {
/// PTX with its three header directives apart.
struct PTXParts {
  StringRef version, target;
  std::string body;
};
} // namespace

static PTXParts split(StringRef text) {
  PTXParts parts;
  while (!text.empty()) {
    auto [line, rest] = text.split('\n');
    text = rest;
    StringRef trimmed = line.trim();
    if (trimmed.consume_front(".version "))
      parts.version = trimmed.trim();
    else if (trimmed.consume_front(".target "))
      parts.target = trimmed.trim();
    else if (!trimmed.starts_with(".address_size"))
      parts.body += (line + "\n").str();
  }
  return parts;
}

static LogicalResult addBinary(gpu::BinaryOp binary, PTXParts &all) {
  for (auto object : binary.getObjects().getAsRange<gpu::ObjectAttr>()) {
    if (object.getFormat() != gpu::CompilationTarget::Assembly)
      continue;
    // The object may carry the terminating NUL of the printer.
    PTXParts parts = split(object.getObject().getValue().rtrim('\0'));
    if (!all.target.empty() &&
        (parts.target != all.target || parts.version != all.version))
      return binary.emitError()
             << "expected all kernels of a module to have one target, found "
             << all.target << " with PTX " << all.version << " and "
             << parts.target << " with PTX " << parts.version;
    all.version = parts.version;
    all.target = parts.target;
    all.body += parts.body;
    return success();
  }
  return binary.emitError()
         << "expected a gpu.binary that holds assembly, found "
            "none in '"
         << binary.getName() << "'; serialise with format=isa";
}

/// Two modules may use one kernel name; in one text they may not.
static LogicalResult verifyEntryNames(ModuleOp module, StringRef body) {
  llvm::StringSet<> seen;
  constexpr StringLiteral marker = ".entry ";
  while (size_t at = body.find(marker)) {
    if (at == StringRef::npos)
      break;
    body = body.drop_front(at + marker.size()).ltrim();
    StringRef name =
        body.take_until([](char c) { return c == '(' || isspace(c); });
    if (!seen.insert(name).second)
      return module.emitError() << "expected one kernel named '" << name
                                << "', found two; rename one of them";
  }
  return success();
}

FailureOr<std::string> mlir::moe::translateToPTX(ModuleOp module) {
  if (failed(serialiseModules(module)))
    return failure();
  PTXParts all;
  for (gpu::BinaryOp binary : module.getOps<gpu::BinaryOp>())
    if (failed(addBinary(binary, all)))
      return failure();
  if (all.target.empty())
    return module.emitError()
           << "expected a module with GPU kernels, found no gpu.binary";
  if (failed(verifyEntryNames(module, all.body)))
    return failure();
  return (".version " + all.version + "\n.target " + all.target +
          "\n.address_size 64\n" + all.body)
      .str();
}

//===----------------------------------------------------------------------===//
// ptxas
//===----------------------------------------------------------------------===//

/// site-packages/nvidia/cu13/bin/ptxas, seen from site-packages/llvm/lib.
static std::string findPtxasWheel() {
  Dl_info info;
  if (!dladdr(reinterpret_cast<void *>(&llvm::CodeGenOpt::getLevel), &info) ||
      !info.dli_fname)
    return "";
  SmallString<128> root(info.dli_fname);
  for (int level = 0; level < 3; ++level)
    llvm::sys::path::remove_filename(root);
  llvm::sys::path::append(root, "nvidia");
  std::error_code code;
  for (fs::directory_iterator entry(root, code), end; !code && entry != end;
       entry.increment(code)) {
    SmallString<128> path(entry->path());
    llvm::sys::path::append(path, "bin", "ptxas");
    if (fs::can_execute(path))
      return path.str().str();
  }
  return "";
}

std::string mlir::moe::findPtxas() {
  if (auto named = llvm::sys::Process::GetEnv("MOE_MLIR_PTXAS"))
    return fs::can_execute(*named) ? *named : "";
  if (auto path = llvm::sys::findProgramByName("ptxas")) {
    SmallString<128> absolute(*path);
    if (!fs::make_absolute(absolute))
      return absolute.str().str();
  }
  if (std::string path = findPtxasWheel(); !path.empty())
    return path;
  for (const char *variable : {"CUDA_ROOT", "CUDA_HOME", "CUDA_PATH"})
    if (auto root = llvm::sys::Process::GetEnv(variable)) {
      SmallString<128> path(*root);
      llvm::sys::path::append(path, "bin", "ptxas");
      if (fs::can_execute(path))
        return path.str().str();
    }
  return "";
}

static std::string readFile(StringRef path) {
  auto buffer = llvm::MemoryBuffer::getFile(path);
  return buffer ? (*buffer)->getBuffer().str() : "";
}

FailureOr<std::string> mlir::moe::assembleCubin(StringRef ptx, StringRef chip,
                                                Location location) {
  std::string ptxas = findPtxas();
  if (ptxas.empty())
    return emitError(location) << kNoPtxas;

  SmallString<128> folder;
  if (std::error_code code = fs::createUniqueDirectory("moe-ptxas", folder))
    return emitError(location)
           << "cannot make a temporary folder: " << code.message();
  llvm::scope_exit cleanup([&] { fs::remove_directories(folder); });
  auto file = [&](StringRef name) {
    SmallString<128> path(folder);
    llvm::sys::path::append(path, name);
    return path;
  };
  SmallString<128> input = file("kernel.ptx"), output = file("kernel.cubin"),
                   log = file("log");
  if (llvm::Error error = llvm::writeToOutput(input, [&](raw_ostream &stream) {
        stream << ptx;
        return llvm::Error::success();
      }))
    return emitError(location) << "cannot write PTX for ptxas: "
                               << llvm::toString(std::move(error));

  std::string arch = ("-arch=" + chip).str(), message;
  constexpr unsigned timeoutSeconds = 120;
  int status = llvm::sys::ExecuteAndWait(
      ptxas, {ptxas, arch, input, "-o", output}, std::nullopt,
      {StringRef(), StringRef(log), StringRef(log)}, timeoutSeconds, 0,
      &message);
  if (status != 0)
    return emitError(location)
           << "ptxas refused the kernels for " << chip << ": "
           << (message.empty() ? StringRef(readFile(log)).trim().str()
                               : message);
  return readFile(output);
}
