//===- HostCode.cpp - LLVM dialect to code for a CPU ----------------------===//
//
// Translate, add the packed entry points, optimise, emit: one function each,
// put together at the end.
//
//===----------------------------------------------------------------------===//

#include "MoE/Target/HostCode.h"

#include "MaskedStores.h"
#include "MoE/Runtime/TileState.h"
#include "NarrowFloats.h"

#include "mlir/IR/BuiltinOps.h"
#include "mlir/Target/LLVMIR/Export.h"
#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringSet.h"
#include "llvm/Analysis/TargetTransformInfo.h"
#include "llvm/IR/DiagnosticInfo.h"
#include "llvm/IR/DiagnosticPrinter.h"
#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/LegacyPassManager.h"
#include "llvm/IR/Module.h"
#include "llvm/IR/Verifier.h"
#include "llvm/MC/MCSubtargetInfo.h"
#include "llvm/MC/TargetRegistry.h"
#include "llvm/Object/ObjectFile.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Support/TargetSelect.h"
#include "llvm/Target/TargetMachine.h"
#include "llvm/TargetParser/Host.h"
#include "llvm/Transforms/IPO/Internalize.h"

using namespace mlir;
using namespace mlir::moe;

static constexpr llvm::StringLiteral kInterfacePrefix = "_mlir_ciface_";
static constexpr llvm::StringLiteral kOwnPrefix = "__moe_";

//===----------------------------------------------------------------------===//
// The machine
//===----------------------------------------------------------------------===//

std::string mlir::moe::hostCPUName() {
  return llvm::sys::getHostCPUName().str();
}

/// What LLVM detects, without tiles where the system does not keep them.
static llvm::StringMap<bool> detectFeatures() {
  llvm::StringMap<bool> features = llvm::sys::getHostCPUFeatures();
  if (features.lookup("amx-tile") && !::moe::runtime::requestTileState())
    for (auto &feature : features)
      if (feature.first().starts_with("amx-"))
        feature.second = false;
  return features;
}

std::string mlir::moe::hostCPUFeatures() {
  std::vector<std::string> features;
  for (const auto &feature : detectFeatures())
    features.push_back(((feature.second ? "+" : "-") + feature.first()).str());
  // A StringMap has no order, and the text is part of cache keys.
  llvm::sort(features);
  return llvm::join(features, ",");
}

/// LLVM's code generator for this machine's architecture.
static const llvm::Target *hostTarget(std::string &message) {
  [[maybe_unused]] static bool initialised = [] {
    return !llvm::InitializeNativeTarget() &&
           !llvm::InitializeNativeTargetAsmPrinter() &&
           !llvm::InitializeNativeTargetAsmParser();
  }();
  return llvm::TargetRegistry::lookupTarget(
      llvm::Triple(llvm::sys::getProcessTriple()), message);
}

static std::unique_ptr<llvm::MCSubtargetInfo> describeCPU(StringRef cpu) {
  std::string message;
  const llvm::Target *target = hostTarget(message);
  if (!target)
    return nullptr;
  std::unique_ptr<llvm::MCSubtargetInfo> subtarget(
      target->createMCSubtargetInfo(llvm::Triple(llvm::sys::getProcessTriple()),
                                    cpu, ""));
  return subtarget->isCPUStringValid(cpu) ? std::move(subtarget) : nullptr;
}

bool mlir::moe::isKnownCPU(StringRef cpu) {
  return cpu == "native" || describeCPU(cpu);
}

/// Whether code for a CPU with that extension may need it. What is left out is
/// in every CPU of 64 bits, or used by intrinsics that kernels do not have.
static bool isChosenByCodeGenerator(StringRef feature) {
  static const llvm::StringSet<> others = {
      // In every CPU of 64 bits.
      "64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2",
      // Of atomics, cryptography, cache lines, random numbers.
      "adx", "aes", "cldemote", "clflushopt", "clwb", "clzero", "cmpccxadd",
      "crc32", "cx16", "kl", "movdir64b", "movdiri", "movrs", "pclmul",
      "prefetchi", "prfchw", "raoint", "rdrnd", "rdseed", "sha", "sha512",
      "sm3", "sm4", "vaes", "vpclmulqdq", "wbnoinvd", "widekl",
      // Of matrices in tiles, of other numbers.
      "amx-avx512", "amx-complex", "amx-fp16", "amx-fp8", "amx-int8",
      "amx-movrs", "amx-tf32",
      // Of operating systems, transactions, profilers.
      "enqcmd", "fsgsbase", "hreset", "invpcid", "lwp", "mwaitx", "pconfig",
      "pku", "ptwrite", "rdpid", "rdpru", "rtm", "sahf", "serialize", "sgx",
      "shstk", "tsxldtrk", "uintr", "usermsr", "waitpkg", "xsave", "xsavec",
      "xsaveopt", "xsaves",
      // Names of sets whose members stand beside them.
      "avx10.1"};
  return !others.contains(feature);
}

std::string mlir::moe::codeFeatures(StringRef cpu) {
  // LLVM detects extensions; what else it says of a CPU is how fast things are.
  llvm::StringMap<bool> host = detectFeatures();
  std::vector<std::string> features;
  auto add = [&](StringRef feature) {
    if (isChosenByCodeGenerator(feature))
      features.push_back(("+" + feature).str());
  };
  if (cpu == "native") {
    for (const auto &feature : host)
      if (feature.second)
        add(feature.first());
  } else if (auto subtarget = describeCPU(cpu)) {
    for (const auto &feature : subtarget->getEnabledProcessorFeatures())
      if (host.contains(feature.Key))
        add(feature.Key);
  }
  llvm::sort(features);
  return llvm::join(features, ",");
}

static std::unique_ptr<llvm::TargetMachine>
createTargetMachine(ModuleOp module, const HostCodeOptions &options) {
  llvm::Triple triple(llvm::sys::getProcessTriple());
  std::string message;
  const llvm::Target *target = hostTarget(message);
  if (!target) {
    module.emitError() << "this LLVM has no code generator for " << triple.str()
                       << ": " << message;
    return nullptr;
  }

  bool native = options.cpu == "native";
  std::string cpu = native ? hostCPUName() : options.cpu;
  if (!isKnownCPU(cpu)) {
    module.emitError() << "expected a CPU of " << triple.getArchName()
                       << " that LLVM knows, or 'native', found '" << cpu
                       << "' (llc -mcpu=help lists the names)";
    return nullptr;
  }
  std::string features = native ? hostCPUFeatures() : "";
  // LLVM prefers 256-bit vectors on older AVX-512 machines for fear of clock
  // throttling; our kernels are dense enough for the wide ones to win.
  if (triple.isX86())
    features += features.empty() ? "-prefer-256-bit" : ",-prefer-256-bit";

  return std::unique_ptr<llvm::TargetMachine>(target->createTargetMachine(
      triple, cpu, features, llvm::TargetOptions(), llvm::Reloc::PIC_,
      std::nullopt, llvm::CodeGenOptLevel::Aggressive));
}

//===----------------------------------------------------------------------===//
// Entry points
//===----------------------------------------------------------------------===//

/// Adds `void __moe_call_f(ptr args)`, which loads every scalar argument of
/// `_mlir_ciface_f` from where args[i] points and passes every pointer as
/// args[i] itself: callers need no foreign-function library.
static LogicalResult addPackedEntry(ModuleOp module, llvm::Module &code,
                                    const FunctionSignature &signature) {
  llvm::Function *callee = code.getFunction(interfaceSymbol(signature.name));
  if (!callee || callee->isDeclaration())
    return module.emitError()
           << "expected the pipeline to give public function '"
           << signature.name << "' a C interface, found no definition of '"
           << interfaceSymbol(signature.name)
           << "' (is llvm.emit_c_interface missing?)";
  size_t expected = signature.arguments.size() + signature.results.size();
  if (callee->arg_size() != expected || !callee->getReturnType()->isVoidTy())
    return module.emitError()
           << "expected the compiled form of '" << signature.name
           << "' to take " << signature.arguments.size()
           << " arguments followed by " << signature.results.size()
           << " result buffers and to return nothing, found "
           << callee->arg_size() << " parameters and "
           << (callee->getReturnType()->isVoidTy() ? "no" : "a")
           << " return value";

  llvm::IRBuilder<> builder(code.getContext());
  llvm::Type *pointer = builder.getPtrTy();
  auto *entry = llvm::Function::Create(
      llvm::FunctionType::get(builder.getVoidTy(), {pointer}, false),
      llvm::Function::ExternalLinkage, packedSymbol(signature.name), code);
  builder.SetInsertPoint(
      llvm::BasicBlock::Create(code.getContext(), "", entry));
  SmallVector<llvm::Value *> arguments;
  for (auto [index, type] :
       llvm::enumerate(callee->getFunctionType()->params())) {
    llvm::Value *slot =
        builder.CreateConstGEP1_64(pointer, entry->getArg(0), index);
    llvm::Value *value = builder.CreateLoad(pointer, slot);
    if (!type->isPointerTy())
      value = builder.CreateLoad(type, value);
    arguments.push_back(value);
  }
  builder.CreateCall(callee, arguments);
  builder.CreateRetVoid();
  return success();
}

static LogicalResult addEntryPoints(ModuleOp module, llvm::Module &code,
                                    ArrayRef<FunctionSignature> signatures) {
  if (signatures.empty())
    return success();
  llvm::json::Array all;
  for (const FunctionSignature &signature : signatures) {
    if (failed(addPackedEntry(module, code, signature)))
      return failure();
    all.push_back(toJSON(signature));
  }
  std::string text = llvm::formatv("{0}", llvm::json::Value(std::move(all)));
  auto *data = llvm::ConstantDataArray::getString(code.getContext(), text);
  new llvm::GlobalVariable(code, data->getType(), /*isConstant=*/true,
                           llvm::GlobalValue::ExternalLinkage, data,
                           kSignaturesSymbol);
  return success();
}

//===----------------------------------------------------------------------===//
// Optimisation and emission
//===----------------------------------------------------------------------===//

/// What is left to do for LLVM: values out of memory, addresses out of loops,
/// scalar loops into vectors. Our loops are no faster after its default
/// pipeline, which takes three times as long, nor unrolled where nobody knows
/// how often they run: each step of a kernel's loop is some thirty operations,
/// and LLVM writes it eight times for CPUs of AMD, which is a quarter of all
/// work.
static constexpr StringLiteral kPasses =
    "cgscc(inline),"
    "function<eager-inv>("
    "sroa,early-cse<memssa>,simplifycfg,"
    "loop-mssa(loop-rotate,licm<allowspeculation>),early-cse<memssa>,"
    "loop-vectorize,loop-unroll<O3;no-runtime>,"
    "instcombine<no-verify-fixpoint>,simplifycfg,dse,adce),"
    "globaldce";

static void optimise(llvm::Module &code, llvm::TargetMachine &machine) {
  llvm::PassBuilder builder(&machine);
  llvm::LoopAnalysisManager loops;
  llvm::FunctionAnalysisManager functions;
  llvm::CGSCCAnalysisManager sccs;
  llvm::ModuleAnalysisManager modules;
  builder.registerModuleAnalyses(modules);
  builder.registerCGSCCAnalyses(sccs);
  builder.registerFunctionAnalyses(functions);
  builder.registerLoopAnalyses(loops);
  builder.crossRegisterProxies(loops, functions, sccs, modules);

  llvm::ModulePassManager passes;
  bool hasEntries = llvm::any_of(code, [](const llvm::Function &function) {
    return function.getName().starts_with(kInterfacePrefix);
  });
  if (hasEntries)
    passes.addPass(llvm::InternalizePass([](const llvm::GlobalValue &value) {
      return value.getName().starts_with(kInterfacePrefix) ||
             value.getName().starts_with(kOwnPrefix);
    }));
  llvm::cantFail(builder.parsePassPipeline(passes, kPasses));
  passes.run(code, modules);
}

static FailureOr<std::string> emit(ModuleOp module, llvm::Module &code,
                                   llvm::TargetMachine &machine,
                                   HostCodeForm form) {
  if (form == HostCodeForm::LLVMIR) {
    std::string text;
    llvm::raw_string_ostream(text) << code;
    return text;
  }
  SmallVector<char, 0> bytes;
  llvm::raw_svector_ostream stream(bytes);
  llvm::legacy::PassManager passes;
  auto type = form == HostCodeForm::Object
                  ? llvm::CodeGenFileType::ObjectFile
                  : llvm::CodeGenFileType::AssemblyFile;
  if (machine.addPassesToEmitFile(passes, stream, nullptr, type,
                                  /*DisableVerify=*/true))
    return module.emitError()
           << "this LLVM cannot write "
           << (form == HostCodeForm::Object ? "objects" : "assembly") << " for "
           << machine.getTargetTriple().str();
  passes.run(code);
  return std::string(bytes.begin(), bytes.end());
}

std::string mlir::moe::findForeignSymbols(StringRef object) {
  static const llvm::StringSet<> known = {
#define MOE_HOST_SYMBOL(NAME, ...) #NAME,
#include "MoE/Runtime/HostSymbols.def"
  };
  auto file = llvm::object::ObjectFile::createObjectFile(
      llvm::MemoryBufferRef(object, "kernel.o"));
  if (!file) // What loads the object says what is wrong.
    return llvm::consumeError(file.takeError()), "";
  std::vector<std::string> foreign;
  for (const llvm::object::SymbolRef &symbol : (*file)->symbols()) {
    auto flags = symbol.getFlags();
    auto name = symbol.getName();
    if (flags && name && (*flags & llvm::object::SymbolRef::SF_Undefined) &&
        !name->empty() && !known.contains(*name))
      foreign.push_back(name->str());
    llvm::consumeError(flags.takeError());
    llvm::consumeError(name.takeError());
  }
  llvm::sort(foreign);
  return llvm::join(foreign, ", ");
}

FailureOr<std::string>
mlir::moe::translateToHostCode(ModuleOp module, HostCodeForm form,
                               const HostCodeOptions &options) {
  std::unique_ptr<llvm::TargetMachine> machine =
      createTargetMachine(module, options);
  if (!machine)
    return failure();

  llvm::LLVMContext context;
  // Without a handler LLVM ends the process at the first error.
  std::string problem;
  context.setDiagnosticHandlerCallBack(
      [](const llvm::DiagnosticInfo *info, void *into) {
        if (info->getSeverity() != llvm::DS_Error)
          return;
        llvm::raw_string_ostream stream(*static_cast<std::string *>(into));
        llvm::DiagnosticPrinterRawOStream printer(stream);
        info->print(printer);
      },
      &problem);

  std::unique_ptr<llvm::Module> code = translateModuleToLLVMIR(module, context);
  if (!code)
    return module.emitError()
           << "expected a module in the LLVM dialect for code generation; end "
              "the pipeline with the conversions to LLVM";
  code->setTargetTriple(machine->getTargetTriple());
  code->setDataLayout(machine->createDataLayout());
  if (failed(addEntryPoints(module, *code, options.signatures)))
    return failure();

  llvm::raw_string_ostream problemStream(problem);
  if (llvm::verifyModule(*code, &problemStream))
    return module.emitError()
           << "the lowering made invalid LLVM IR: " << problem;
  expandNarrowFloats(*code, *machine);
  optimise(*code, *machine);
  moveNarrowFloatsAsBits(*code, *machine);
  storeSingleLanesAsElements(*code);
  FailureOr<std::string> result = emit(module, *code, *machine, form);
  if (!problem.empty())
    return module.emitError() << "LLVM's code generator failed: " << problem;
  if (succeeded(result) && form == HostCodeForm::Object)
    if (std::string foreign = findForeignSymbols(*result); !foreign.empty())
      return module.emitError()
             << "expected the code to call only functions that moe_runtime "
                "has, found calls of "
             << foreign << "; give functions that the module declares a body";
  return result;
}
