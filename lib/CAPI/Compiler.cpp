//===- Compiler.cpp - The compiler as a C library -------------------------===//

#include "MoE-c/Compiler.h"

#include "MoE/Target/CPUModels.h"
#include "MoE/Target/Compile.h"
#include "MoE/Target/Executable.h"
#include "MoE/Target/Input.h"
#include "MoE/Target/PTX.h"
#include "MoE/Transforms/WantedKernelConfigs.h"
#include "mlir/Bytecode/BytecodeWriter.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Config/llvm-config.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/JSON.h"

using namespace mlir;
using namespace mlir::moe;

struct MoEOpaqueError {
  std::vector<std::string> diagnostics;
};

struct MoEOpaqueBytes {
  std::string bytes;
  std::vector<std::string> remarks = {};
};

struct MoEOpaqueModule {
  std::unique_ptr<MLIRContext> context;
  OwningOpRef<ModuleOp> module;
  std::vector<std::string> remarks;
};

namespace {
struct ElementTypeName {
  StringRef name;
  MoEElementType type;
};
} // namespace

struct MoEOpaqueFunction {
  const Executable::Function *function;
  /// With the shapes of `function`'s signature behind them.
  std::vector<MoEValueType> values;
};

struct MoEOpaqueExecutable {
  std::unique_ptr<Executable> executable;
  std::vector<MoEOpaqueFunction> functions;
};

static StringRef unwrap(MoEStringRef text) { return {text.data, text.length}; }
static MoEStringRef wrap(StringRef text) { return {text.data(), text.size()}; }

static MoEError makeError(std::vector<std::string> diagnostics,
                          StringRef fallback) {
  if (diagnostics.empty())
    diagnostics.push_back(fallback.str());
  return new MoEOpaqueError{std::move(diagnostics)};
}

static MoEError makeError(llvm::Error error) {
  return makeError({llvm::toString(std::move(error))}, "");
}

static MoEBytes makeBytes(std::string bytes) {
  return new MoEOpaqueBytes{std::move(bytes)};
}

//===----------------------------------------------------------------------===//
// Errors and bytes
//===----------------------------------------------------------------------===//

size_t moeErrorGetNumDiagnostics(MoEError error) {
  return error->diagnostics.size();
}

MoEStringRef moeErrorGetDiagnostic(MoEError error, size_t index) {
  return wrap(error->diagnostics[index]);
}

void moeErrorDestroy(MoEError error) { delete error; }

MoEStringRef moeBytesGet(MoEBytes bytes) { return wrap(bytes->bytes); }

size_t moeBytesGetNumRemarks(MoEBytes bytes) { return bytes->remarks.size(); }

MoEStringRef moeBytesGetRemark(MoEBytes bytes, size_t index) {
  return wrap(bytes->remarks[index]);
}

void moeBytesDestroy(MoEBytes bytes) { delete bytes; }

//===----------------------------------------------------------------------===//
// Modules
//===----------------------------------------------------------------------===//

static MoEError parse(StringRef source, StringRef filename,
                      const InputOptions &options, MoEModule *result) {
  auto module = std::make_unique<MoEOpaqueModule>();
  module->context = createContext();
  enableRemarks(*module->context);
  DiagnosticCollector diagnostics(*module->context);
  diagnostics.setSource(source, filename);
  module->module = parseInput(*module->context, source, filename, options);
  if (!module->module)
    return makeError(std::move(diagnostics.errors), "cannot parse the module");
  module->remarks = std::move(diagnostics.others);
  *result = module.release();
  return nullptr;
}

static std::string bytecodeOf(ModuleOp module) {
  std::string bytes;
  llvm::raw_string_ostream stream(bytes);
  // Fails only for an unsupported version of the format, and none is asked for.
  (void)writeBytecodeToFile(module, stream);
  return bytes;
}

MoEError moeModuleParse(MoEStringRef source, MoEStringRef filename,
                        bool allowBytecode, MoEModule *module) {
  InputOptions options;
  options.allowBytecode = allowBytecode;
  return parse(unwrap(source), unwrap(filename), options, module);
}

MoEError moeModuleClone(MoEModule module, MoEModule *clone) {
  // Through bytecode into a context of its own, so that the copies can go to
  // different threads.
  InputOptions options;
  options.allowBytecode = true;
  return parse(bytecodeOf(*module->module), "<clone>", options, clone);
}

void moeModuleDestroy(MoEModule module) { delete module; }

MoEBytes moeModulePrint(MoEModule module, bool debugInfo) {
  std::string result;
  llvm::raw_string_ostream stream(result);
  OpPrintingFlags flags;
  if (debugInfo)
    flags.enableDebugInfo(true, /*prettyForm=*/false);
  module->module->print(stream, flags);
  return makeBytes(std::move(result));
}

MoEBytes moeModuleBytecode(MoEModule module) {
  return makeBytes(bytecodeOf(*module->module));
}

MoEError moeModuleRun(MoEModule module, MoEStringRef pipeline) {
  DiagnosticCollector diagnostics(*module->context);
  LogicalResult result = runPipeline(*module->module, unwrap(pipeline));
  module->remarks = std::move(diagnostics.others);
  if (failed(result))
    return makeError(std::move(diagnostics.errors), "a pass failed");
  return nullptr;
}

MoEError moeModuleSetKernelConfig(MoEModule module, MoEStringRef opName,
                                  MoEStringRef config) {
  DiagnosticCollector diagnostics(*module->context);
  auto location =
      FileLineColLoc::get(module->context.get(), "kernel_configs", 0, 0);
  if (failed(setWantedKernelConfig(*module->module, unwrap(opName),
                                   unwrap(config), location)))
    return makeError(std::move(diagnostics.errors), "no such configuration");
  return nullptr;
}

size_t moeModuleGetNumRemarks(MoEModule module) {
  return module->remarks.size();
}

MoEStringRef moeModuleGetRemark(MoEModule module, size_t index) {
  return wrap(module->remarks[index]);
}

//===----------------------------------------------------------------------===//
// Compilation
//===----------------------------------------------------------------------===//

/// Parses and compiles in a context of its own; `compile` returns a
/// FailureOr<std::string>.
template <typename Compile>
static MoEError compileSource(MoEStringRef source, MoEStringRef filename,
                              MoEBytes *result, Compile compile) {
  std::unique_ptr<MLIRContext> context = createContext();
  enableRemarks(*context);
  DiagnosticCollector diagnostics(*context);
  diagnostics.setSource(unwrap(source), unwrap(filename));
  OwningOpRef<ModuleOp> module =
      parseInput(*context, unwrap(source), unwrap(filename));
  if (!module)
    return makeError(std::move(diagnostics.errors), "cannot parse the module");
  FailureOr<std::string> code = compile(*module);
  if (failed(code))
    return makeError(std::move(diagnostics.errors), "the compilation failed");
  *result = makeBytes(std::move(*code));
  (*result)->remarks = std::move(diagnostics.others);
  return nullptr;
}

MoEError moeCompileObject(MoEStringRef source, MoEStringRef filename,
                          MoEStringRef pipeline, MoEStringRef cpu,
                          MoEStringRef dumpDir, MoEBytes *object) {
  CompileOptions options;
  options.pipeline = unwrap(pipeline).str();
  options.cpu = unwrap(cpu).str();
  options.dumpDir = unwrap(dumpDir).str();
  return compileSource(
      source, filename, object, [&](ModuleOp module) -> FailureOr<std::string> {
        FailureOr<HostCode> code =
            compileForHost(module, HostCodeForm::Object, options);
        if (failed(code))
          return failure();
        return std::move(code->code);
      });
}

MoEError moeCompilePTX(MoEStringRef source, MoEStringRef filename,
                       MoEStringRef chip, MoEStringRef dumpDir, MoEBytes *ptx) {
  return compileSource(
      source, filename, ptx, [&](ModuleOp module) -> FailureOr<std::string> {
        FailureOr<DeviceCode> code =
            compileForDevice(module, unwrap(chip), unwrap(dumpDir));
        if (failed(code))
          return failure();
        return std::move(code->ptx);
      });
}

MoEError moeCompileKernels(MoEStringRef source, MoEStringRef filename,
                           MoEStringRef chip, MoEStringRef dumpDir,
                           MoEBytes *kernels) {
  return compileSource(
      source, filename, kernels,
      [&](ModuleOp module) -> FailureOr<std::string> {
        FailureOr<DeviceCode> code =
            compileForDevice(module, unwrap(chip), unwrap(dumpDir));
        if (failed(code))
          return failure();
        llvm::json::Object object{{"ptx", std::move(code->ptx)},
                                  {"functions", std::move(code->functions)}};
        return llvm::formatv("{0}", llvm::json::Value(std::move(object))).str();
      });
}

MoEError moeAssembleCubin(MoEStringRef ptx, MoEStringRef chip,
                          MoEBytes *cubin) {
  MLIRContext context(MLIRContext::Threading::DISABLED);
  DiagnosticCollector diagnostics(context);
  Location location = UnknownLoc::get(&context);
  if (succeeded(lookupChip(unwrap(chip), location)))
    if (FailureOr<std::string> code =
            assembleCubin(unwrap(ptx), unwrap(chip), location);
        succeeded(code)) {
      *cubin = makeBytes(std::move(*code));
      return nullptr;
    }
  return makeError(std::move(diagnostics.errors), "ptxas failed");
}

//===----------------------------------------------------------------------===//
// Executables
//===----------------------------------------------------------------------===//

static MoEElementType elementTypeOf(StringRef name) {
  static constexpr ElementTypeName names[] = {
      {"i1", MoEElementType_I1},   {"i8", MoEElementType_I8},
      {"i16", MoEElementType_I16}, {"i32", MoEElementType_I32},
      {"i64", MoEElementType_I64}, {"index", MoEElementType_Index},
      {"f16", MoEElementType_F16}, {"bf16", MoEElementType_BF16},
      {"f32", MoEElementType_F32}, {"f64", MoEElementType_F64}};
  for (const ElementTypeName &entry : names)
    if (entry.name == name)
      return entry.type;
  llvm_unreachable("collectSignatures passes no other element type");
}

static MoEOpaqueFunction describe(const Executable::Function &function) {
  MoEOpaqueFunction described{&function, {}};
  auto add = [&](ArrayRef<ValueSignature> values, bool isResult) {
    for (const ValueSignature &value : values)
      described.values.push_back(
          {elementTypeOf(value.elementType), value.isTensor, isResult,
           static_cast<int64_t>(value.shape.size()), value.shape.data()});
  };
  add(function.signature.arguments, /*isResult=*/false);
  add(function.signature.results, /*isResult=*/true);
  return described;
}

MoEError moeExecutableLoad(MoEStringRef object, MoEExecutable *executable) {
  auto loaded = Executable::load(unwrap(object));
  if (!loaded)
    return makeError(loaded.takeError());
  auto result = std::make_unique<MoEOpaqueExecutable>();
  result->executable = std::move(*loaded);
  for (const Executable::Function &function :
       result->executable->getFunctions())
    result->functions.push_back(describe(function));
  *executable = result.release();
  return nullptr;
}

void moeExecutableDestroy(MoEExecutable executable) { delete executable; }

size_t moeExecutableGetNumFunctions(MoEExecutable executable) {
  return executable->functions.size();
}

MoEFunction moeExecutableGetFunction(MoEExecutable executable, size_t index) {
  return &executable->functions[index];
}

MoEStringRef moeFunctionGetName(MoEFunction function) {
  return wrap(function->function->signature.name);
}

size_t moeFunctionGetNumValues(MoEFunction function) {
  return function->values.size();
}

MoEValueType moeFunctionGetValue(MoEFunction function, size_t index) {
  return function->values[index];
}

MoEPackedFunction moeFunctionGetEntry(MoEFunction function) {
  return function->function->entry;
}

//===----------------------------------------------------------------------===//
// The machine and the toolchain
//===----------------------------------------------------------------------===//

const char *moeLLVMVersion() { return LLVM_VERSION_STRING; }

MoEBytes moeHostCPUName() { return makeBytes(hostCPUName()); }

MoEBytes moeHostCPUFeatures() { return makeBytes(hostCPUFeatures()); }

MoEBytes moeCodeFeatures(MoEStringRef cpu) {
  return makeBytes(codeFeatures(unwrap(cpu)));
}

MoEBytes moeDescribeCPU(MoEStringRef cpu) {
  return makeBytes(describeCPU(unwrap(cpu)));
}

MoEError moeCPUPipeline(MoEStringRef cpu, MoEStringRef tuning,
                        MoEBytes *pipeline) {
  llvm::Expected<std::string> text =
      getCPUPipeline(unwrap(cpu), unwrap(tuning));
  if (!text)
    return makeError(text.takeError());
  *pipeline = makeBytes(std::move(*text));
  return nullptr;
}

MoEBytes moeFindPtxas() { return makeBytes(findPtxas()); }

MoEBytes moeKnownChips() {
  llvm::json::Array chips;
  for (const Chip &chip : ::moe::kChips)
    chips.push_back(llvm::json::Object{
        {"name", StringRef(chip.name)},
        {"is_target", chip.isTarget()},
        {"shared_bytes", chip.sharedBytes},
        {"cluster_blocks", chip.clusterBlocks},
        {"has_wgmma", chip.hasWgmma},
    });
  return makeBytes(llvm::formatv("{0}", llvm::json::Value(std::move(chips))));
}
