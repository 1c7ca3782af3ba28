//===- moe-compile.cpp - The ahead-of-time compiler -----------------------===//

#include "Import.h"

#include "MoE/Support/Files.h"
#include "MoE/Target/Artifact.h"
#include "MoE/Target/Compile.h"
#include "MoE/Target/Input.h"
#include "MoE/Target/PTX.h"
#include "MoE/Transforms/WantedKernelConfigs.h"
#include "llvm/Config/llvm-config.h"
#include "llvm/Support/CommandLine.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/InitLLVM.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/raw_ostream.h"

#include <algorithm>

using namespace mlir;
using namespace mlir::moe;
namespace cl = llvm::cl;

//===----------------------------------------------------------------------===//
// Options
//===----------------------------------------------------------------------===//

namespace {
enum class Emit { Artifact, MLIR, LLVMIR, Assembly, PTX, Cubin };

struct Options {
  cl::OptionCategory category{"moe-compile options"};
  cl::opt<std::string> input{cl::Positional, cl::Required, cl::value_desc("IN"),
                             cl::desc("<IN: .mlir, .mlirbc or .pt2, or a "
                                      "folder of moe_mlir.save_decoder>"),
                             cl::cat(category)};
  cl::opt<std::string> output{
      "o", cl::Required, cl::value_desc("OUT"), cl::cat(category),
      cl::desc("the artifact folder, or the file of another form; '-' is "
               "standard output")};
  std::string targetHelp = "cpu (default), " + listChips();
  cl::opt<std::string> target{"target", cl::init("cpu"),
                              cl::value_desc("TARGET"), cl::cat(category),
                              cl::desc(targetHelp)};
  cl::opt<Emit> emit{
      "emit", cl::init(Emit::Artifact), cl::cat(category),
      cl::desc("what to write:"),
      cl::values(
          clEnumValN(Emit::Artifact, "artifact",
                     "a folder with manifest.json, the code and, for the "
                     "CPU, a C header (default)"),
          clEnumValN(Emit::MLIR, "mlir", "the imported module, verified"),
          clEnumValN(Emit::LLVMIR, "llvm", "optimised LLVM IR (cpu)"),
          clEnumValN(Emit::Assembly, "asm", "assembly (cpu)"),
          clEnumValN(Emit::PTX, "ptx", "all kernels as PTX (sm_*)"),
          clEnumValN(Emit::Cubin, "cubin",
                     "all kernels assembled by ptxas (sm_*)"))};
  cl::opt<std::string> cpu{
      "cpu", cl::init("native"), cl::value_desc("NAME"), cl::cat(category),
      cl::desc("the CPU for --target=cpu, as LLVM names it (default: the one "
               "of this machine)")};
  cl::opt<bool> pack{
      "pack", cl::init(true), cl::cat(category),
      cl::desc("store the weights of a .pt2 in an artifact for the CPU in the "
               "order in which the kernels read them (default: true)")};
  cl::opt<std::string> tuning{
      "tuning", cl::value_desc("FILE"), cl::cat(category),
      cl::desc("the table of numbers that `moe tune` measured "
               "for --cpu (default: none)")};
  cl::list<std::string> kernelConfigs{
      "kernel-config", cl::value_desc("OP=CONFIG"), cl::cat(category),
      cl::desc("the kernel that ops of a name get where they ask for none "
               "themselves, such as 'softmax_mix=<rows = 64, schedule = mma>'; "
               "once for each name")};
  cl::opt<std::string> dumpDir{
      "dump-phases-to", cl::value_desc("DIR"), cl::cat(category),
      cl::desc("also write the IR after every pass that changed it, and the "
               "generated code, to DIR")};
  cl::opt<bool> allowBytecode{
      "allow-bytecode", cl::cat(category),
      cl::desc("accept MLIR bytecode; only for files that you trust")};
  cl::opt<bool> remarks{
      "remarks", cl::cat(category),
      cl::desc("print missed optimizations and their reasons to standard "
               "error")};
  cl::opt<unsigned> nestingLimit{
      "nesting-limit", cl::init(256), cl::value_desc("N"), cl::cat(category),
      cl::desc("the most levels of brackets in text input (default 256)")};

  bool forCPU() const { return target == "cpu"; }
};
} // namespace

//===----------------------------------------------------------------------===//
// Steps
//===----------------------------------------------------------------------===//

static LogicalResult report(const Twine &message) {
  llvm::errs() << "moe-compile: error: " << message << "\n";
  return failure();
}

static LogicalResult report(llvm::Error error) {
  return report(llvm::toString(std::move(error)));
}

/// Refuses combinations before any work is done on them.
static LogicalResult verifyOptions(const Options &options,
                                   MLIRContext &context) {
  Emit emit = options.emit;
  if (options.forCPU() && (emit == Emit::PTX || emit == Emit::Cubin))
    return report("expected a chip as --target for ptx and cubin, found cpu");
  if (!options.forCPU() && (emit == Emit::LLVMIR || emit == Emit::Assembly))
    return report("expected --target=cpu for llvm and asm, found " +
                  options.target + "; use --emit=ptx");
  if (emit == Emit::Artifact && options.output == "-")
    return report("expected a folder name with -o for an artifact, found '-'");
  if (llvm::sys::fs::equivalent(options.input.getValue(),
                                options.output.getValue()))
    return report("expected another file with -o than the input, found '" +
                  options.output + "' for both");
  if (!options.forCPU() &&
      failed(lookupChip(options.target,
                        FileLineColLoc::get(&context, "moe-compile", 0, 0))))
    return failure();
  if (emit == Emit::Cubin && findPtxas().empty())
    return report(kNoPtxas);
  return success();
}

/// Hands the kernels that the command line asks for to the passes.
static LogicalResult setKernelConfigs(ModuleOp module, const Options &options) {
  auto location =
      FileLineColLoc::get(module.getContext(), "--kernel-config", 0, 0);
  for (StringRef entry : options.kernelConfigs) {
    auto [name, config] = entry.split('=');
    if (failed(setWantedKernelConfig(module, name, config, location)))
      return failure();
  }
  return success();
}

static FailureOr<InputProgram> readInput(const Options &options,
                                         const char *tool) {
  if (StringRef(options.input).ends_with(".pt2")) {
    bool withWeights = options.emit == Emit::Artifact;
    auto program = importTorchProgram(
        options.input, withWeights ? options.output.getValue() : "",
        withWeights && options.forCPU() && options.pack ? options.cpu.getValue()
                                                        : "",
        tool);
    if (!program)
      return report(program.takeError());
    return std::move(*program);
  }
  if (llvm::sys::fs::is_directory(options.input)) {
    auto program = readDecoderPrograms(options.input);
    if (!program)
      return report(program.takeError());
    return std::move(*program);
  }
  auto buffer = llvm::MemoryBuffer::getFileOrSTDIN(options.input);
  if (!buffer)
    return report("cannot read '" + options.input +
                  "': " + buffer.getError().message());
  InputProgram program;
  program.mlir = (*buffer)->getBuffer().str();
  return program;
}

/// Writes a file as a whole or not at all.
static LogicalResult writeOutput(StringRef path, StringRef content) {
  if (path == "-") {
    llvm::outs() << content;
    return success();
  }
  if (std::error_code code = ::moe::writeFile(path.str(), content))
    return report("cannot write '" + path + "': " + code.message());
  return success();
}

static std::vector<std::string> kernelNames(StringRef ptx) {
  std::vector<std::string> names;
  constexpr StringLiteral marker = ".entry ";
  for (size_t at = ptx.find(marker); at != StringRef::npos;
       at = ptx.find(marker)) {
    ptx = ptx.drop_front(at + marker.size()).ltrim();
    names.push_back(
        ptx.take_until([](char c) { return c == '(' || isspace(c); }).str());
  }
  return names;
}

static LogicalResult compileCPU(ModuleOp module, const Options &options,
                                const InputProgram &program) {
  CompileOptions compile;
  compile.cpu = options.cpu;
  if (!options.tuning.empty()) {
    auto table = llvm::MemoryBuffer::getFile(options.tuning);
    if (!table)
      return report("cannot read '" + options.tuning +
                    "': " + table.getError().message());
    compile.tuning = (*table)->getBuffer().str();
  }
  compile.dumpDir = options.dumpDir;
  HostCodeForm form = options.emit == Emit::LLVMIR     ? HostCodeForm::LLVMIR
                      : options.emit == Emit::Assembly ? HostCodeForm::Assembly
                                                       : HostCodeForm::Object;
  FailureOr<HostCode> code = compileForHost(module, form, compile);
  if (failed(code))
    return failure();
  if (options.emit != Emit::Artifact)
    return writeOutput(options.output, code->code);

  Artifact artifact;
  artifact.target = "cpu";
  artifact.cpu =
      options.cpu == "native" ? hostCPUName() : options.cpu.getValue();
  artifact.features = codeFeatures(options.cpu);
  artifact.functions = std::move(code->signatures);
  artifact.files = program.files;
  artifact.storedFiles = program.storedFiles;
  artifact.files["kernel.h"] = writeCHeader(artifact.functions);
  artifact.files["kernel.o"] = std::move(code->code);
  if (llvm::Error error = writeArtifact(artifact, options.output))
    return report(std::move(error));
  return success();
}

static LogicalResult compileGPU(ModuleOp module, const Options &options,
                                const InputProgram &program) {
  FailureOr<DeviceCode> code =
      compileForDevice(module, options.target, options.dumpDir);
  if (failed(code))
    return failure();
  if (options.emit == Emit::PTX)
    return writeOutput(options.output, code->ptx);
  if (options.emit == Emit::Cubin) {
    FailureOr<std::string> cubin =
        assembleCubin(code->ptx, options.target, module.getLoc());
    return failed(cubin) ? failure() : writeOutput(options.output, *cubin);
  }
  Artifact artifact;
  artifact.target = options.target;
  artifact.deviceFunctions = std::move(code->functions);
  artifact.kernels = kernelNames(code->ptx);
  artifact.files = program.files;
  artifact.storedFiles = program.storedFiles;
  artifact.files["kernel.ptx"] = std::move(code->ptx);
  if (llvm::Error error = writeArtifact(artifact, options.output))
    return report(std::move(error));
  return success();
}

/// One module of all functions that there are to compile. Null after a
/// diagnostic.
static OwningOpRef<ModuleOp> parsePrograms(const Options &options,
                                           MLIRContext &context,
                                           const InputProgram &program) {
  InputOptions input;
  input.allowBytecode = options.allowBytecode;
  input.nestingLimit = options.nestingLimit;
  if (program.programs.empty())
    return parseInput(context, program.mlir, options.input, input);
  OwningOpRef<ModuleOp> module =
      ModuleOp::create(FileLineColLoc::get(&context, options.input, 0, 0));
  for (const auto &[name, text] : program.programs) {
    OwningOpRef<ModuleOp> part =
        parseInput(context, text, options.input + "/" + name + ".mlir", input);
    if (!part || failed(addModule(*module, *part, name)))
      return nullptr;
  }
  return module;
}

static LogicalResult compile(const Options &options, MLIRContext &context,
                             const InputProgram &program) {
  OwningOpRef<ModuleOp> module = parsePrograms(options, context, program);
  if (!module || failed(setKernelConfigs(*module, options)))
    return failure();
  if (options.emit == Emit::MLIR) {
    std::string text;
    llvm::raw_string_ostream stream(text);
    module->print(stream);
    return writeOutput(options.output, text);
  }
  return options.forCPU() ? compileCPU(*module, options, program)
                          : compileGPU(*module, options, program);
}

/// The first of OUT.failed.mlir, OUT.failed-2.mlir and so on that is free.
static std::string chooseFailedPath(StringRef output) {
  std::string stem =
      (output == "-" ? "moe-compile" : output.rtrim('/')).str() + ".failed";
  std::string path = stem + ".mlir";
  for (unsigned i = 2;
       llvm::sys::fs::access(path, llvm::sys::fs::AccessMode::Exist) ==
       std::error_code();
       ++i)
    path = stem + "-" + std::to_string(i) + ".mlir";
  return path;
}

/// Keeps the module of a torch program that did not compile: the importer's
/// output is gone otherwise, and it is what reproduces the failure.
static void keepImported(const Options &options, const InputProgram &program) {
  std::string path = chooseFailedPath(options.output);
  if (succeeded(writeOutput(path, program.mlir))) {
    llvm::errs() << "moe-compile: note: the imported module is in " << path
                 << "; compile it again with `moe-compile " << path << " -o "
                 << options.output << " --target=" << options.target;
    for (StringRef entry : options.kernelConfigs)
      llvm::errs() << " --kernel-config='" << entry << "'";
    llvm::errs() << "`\n";
  }
}

/// Everything after the command line; diagnostics go to `diagnostics`.
static LogicalResult run(const Options &options, MLIRContext &context,
                         const char *tool, DiagnosticCollector &diagnostics) {
  if (failed(verifyOptions(options, context)))
    return failure();
  FailureOr<InputProgram> program = readInput(options, tool);
  if (failed(program))
    return failure();
  diagnostics.setSource(program->mlir, options.input);
  LogicalResult result = compile(options, context, *program);
  if (failed(result) && StringRef(options.input).ends_with(".pt2"))
    keepImported(options, *program);
  return result;
}

/// Remarks that name an op of the dialect come last, where they are seen, and
/// their number after them: a model has many more.
static void printOthers(std::vector<std::string> &others, bool remarks) {
  auto isAboutRouting = [](StringRef text) {
    return text.split('\n').first.contains("moe.");
  };
  auto routing =
      std::stable_partition(others.begin(), others.end(), [&](StringRef text) {
        return !isAboutRouting(text);
      });
  for (const std::string &text : others)
    llvm::errs() << text << "\n";
  if (remarks)
    llvm::errs() << "remarks: " << others.size() << " different ones, "
                 << others.end() - routing
                 << " of them about moe ops, at the end\n";
}

int main(int argc, char **argv) {
  llvm::InitLLVM init(argc, argv);
  Options options;
  cl::HideUnrelatedOptions(options.category);
  cl::SetVersionPrinter([](llvm::raw_ostream &stream) {
    stream << "moe-compile " MOE_VERSION ", LLVM " LLVM_VERSION_STRING "\n";
  });
  cl::ParseCommandLineOptions(
      argc, argv,
      "moe-compile: mixture-of-experts routing to machine code\n\n"
      "  moe-compile router.mlir -o router.moe\n"
      "  moe-compile router.mlir -o router.ptx --target=sm_90 --emit=ptx\n"
      "  moe-compile model.pt2 -o model.moe --dump-phases-to=phases\n");

  std::unique_ptr<MLIRContext> context = createContext();
  if (options.remarks)
    enableRemarks(*context);
  DiagnosticCollector diagnostics(*context);
  LogicalResult result = run(options, *context, argv[0], diagnostics);
  printOthers(diagnostics.others, options.remarks);
  for (const std::string &text : diagnostics.errors)
    llvm::errs() << text << "\n";
  return failed(result) ? EXIT_FAILURE : EXIT_SUCCESS;
}
