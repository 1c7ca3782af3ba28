//===- Executable.cpp - Objects loaded into this process ------------------===//

#include "MoE/Target/Executable.h"

#include "MoE/Runtime/HostSymbols.h"
#include "MoE/Target/HostCode.h"
#include "llvm/ExecutionEngine/Orc/AbsoluteSymbols.h"
#include "llvm/ExecutionEngine/Orc/LLJIT.h"
#include "llvm/Support/MemoryBuffer.h"
#include "llvm/Support/TargetSelect.h"

using namespace mlir;
using namespace mlir::moe;

Executable::Executable() = default;
Executable::~Executable() = default;

/// Gives the object what compiled code may refer to, by address: `_moe` is
/// loaded with local visibility, and a name of the process may be another's.
static llvm::Error defineEnvironment(llvm::orc::LLJIT &jit) {
  llvm::orc::SymbolMap symbols;
#define MOE_HOST_SYMBOL(NAME, ...)                                             \
  symbols[jit.mangleAndIntern(#NAME)] = {                                      \
      llvm::orc::ExecutorAddr::fromPtr(::moe::runtime::findHostSymbol(#NAME)), \
      llvm::JITSymbolFlags::Exported | llvm::JITSymbolFlags::Callable};
#include "MoE/Runtime/HostSymbols.def"
  return jit.getMainJITDylib().define(
      llvm::orc::absoluteSymbols(std::move(symbols)));
}

static llvm::Expected<std::unique_ptr<llvm::orc::LLJIT>>
createJIT(StringRef object) {
  [[maybe_unused]] static bool initialised = [] {
    return !llvm::InitializeNativeTarget() &&
           !llvm::InitializeNativeTargetAsmPrinter();
  }();
  // Kernels have no static constructors, so the platform support that would
  // run them, itself compiled from IR, is left out.
  auto jit = llvm::orc::LLJITBuilder()
                 .setPlatformSetUp(llvm::orc::setUpInactivePlatform)
                 .setLinkProcessSymbolsByDefault(false)
                 .create();
  if (!jit)
    return jit.takeError();
  // Link errors come back from lookup; the default would print them as well.
  (*jit)->getExecutionSession().setErrorReporter(
      [](llvm::Error error) { llvm::consumeError(std::move(error)); });
  if (llvm::Error error = defineEnvironment(**jit))
    return error;
  if (llvm::Error error = (*jit)->addObjectFile(
          llvm::MemoryBuffer::getMemBufferCopy(object, "moe-kernel")))
    return error;
  return std::move(*jit);
}

llvm::Expected<std::unique_ptr<Executable>> Executable::load(StringRef object) {
  if (std::string foreign = findForeignSymbols(object); !foreign.empty())
    return llvm::createStringError(
        "expected the object to call only functions that moe_runtime has, "
        "found calls of " +
        foreign + "; compile it again");
  auto jit = createJIT(object);
  if (!jit)
    return jit.takeError();
  auto text = (*jit)->lookup(kSignaturesSymbol);
  if (!text)
    return llvm::joinErrors(
        llvm::createStringError(
            "expected an object made by compile_object, found one that cannot "
            "be linked or has no signatures"),
        text.takeError());
  auto signatures = llvm::json::parse<std::vector<FunctionSignature>>(
      text->toPtr<const char *>());
  if (!signatures)
    return signatures.takeError();

  std::unique_ptr<Executable> result(new Executable());
  for (FunctionSignature &signature : *signatures) {
    auto entry = (*jit)->lookup(packedSymbol(signature.name));
    if (!entry)
      return entry.takeError();
    result->functions.push_back(
        {std::move(signature), entry->toPtr<PackedFunction>()});
  }
  result->jit = std::move(*jit);
  return result;
}

const Executable::Function *Executable::lookup(StringRef name) const {
  for (const Function &function : functions)
    if (function.signature.name == name)
      return &function;
  return nullptr;
}
