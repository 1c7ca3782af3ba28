//===- KernelParameters.cpp - Kernels take what they read -----------------===//
//
// All kernels of a function take the same parameters in the same order, which
// whoever launches a few of them by hand can rely on. A whole model has
// hundreds of tensors, though: more than a launch may pass (4096 bytes), and
// the kernels of equal layers would differ by where their weights are among
// them. Of such a function a kernel takes what it reads, and equal kernels are
// one.
//
//===----------------------------------------------------------------------===//

#include "KernelParameters.h"

#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Interfaces/SideEffectInterfaces.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringMap.h"

using namespace mlir;
using namespace mlir::moe;

/// Parameters up to which all kernels take all of them.
static constexpr unsigned kMostShared = 64;

//===----------------------------------------------------------------------===//
// Parameters
//===----------------------------------------------------------------------===//

/// Takes away what `kernel` does not read; returns the numbers of the rest.
static SmallVector<int64_t> pruneParameters(gpu::GPUFuncOp kernel,
                                            gpu::LaunchFuncOp launch) {
  for (Operation &op :
       llvm::make_early_inc_range(llvm::reverse(kernel.front())))
    if (isOpTriviallyDead(&op))
      op.erase();
  SmallVector<int64_t> kept;
  SmallVector<Type> types;
  SmallVector<Value> operands;
  // Of the block: buffers of workgroup memory follow the parameters.
  BitVector unread(kernel.front().getNumArguments());
  for (unsigned i = 0, e = kernel.getNumArguments(); i < e; ++i) {
    if (kernel.getArgument(i).use_empty()) {
      unread.set(i);
      continue;
    }
    kept.push_back(i);
    types.push_back(kernel.getArgument(i).getType());
    operands.push_back(launch.getKernelOperand(i));
  }
  kernel.front().eraseArguments(unread);
  kernel.setFunctionType(FunctionType::get(kernel.getContext(), types, {}));
  launch.getKernelOperandsMutable().assign(operands);
  return kept;
}

//===----------------------------------------------------------------------===//
// Equal kernels
//===----------------------------------------------------------------------===//

/// The globals of workgroup memory that `kernel` has for itself.
static SmallVector<LLVM::GlobalOp> getGlobals(gpu::GPUFuncOp kernel,
                                              gpu::GPUModuleOp module) {
  SetVector<Operation *> globals;
  kernel.walk([&](LLVM::AddressOfOp address) {
    if (auto global =
            module.lookupSymbol<LLVM::GlobalOp>(address.getGlobalName());
        global && global.getName().starts_with(kernel.getName()))
      globals.insert(global);
  });
  return llvm::map_to_vector(
      globals, [](Operation *op) { return cast<LLVM::GlobalOp>(op); });
}

/// What `kernel` is, without its name and the places in the source: equal for
/// kernels that do the same.
static std::string describe(gpu::GPUFuncOp kernel, gpu::GPUModuleOp module) {
  std::string text;
  llvm::raw_string_ostream stream(text);
  // Whole, whatever options for printing the user gives.
  constexpr int64_t all = std::numeric_limits<int64_t>::max();
  OpPrintingFlags flags;
  flags.useLocalScope().enableDebugInfo(false).skipRegions(false);
  flags.elideLargeElementsAttrs(all).elideLargeResourceString(all);
  kernel->print(stream, flags);
  for (LLVM::GlobalOp global : getGlobals(kernel, module))
    global->print(stream, flags);
  std::string name = "@" + kernel.getName().str();
  // Its globals are named after it; names of others end with another letter.
  std::string described;
  for (size_t from = 0;;) {
    size_t at = text.find(name, from);
    described.append(text, from, at - from);
    if (at == std::string::npos)
      return described;
    described += '@';
    from = at + name.size();
  }
}

static void eraseWithGlobals(gpu::GPUFuncOp kernel, gpu::GPUModuleOp module) {
  SmallVector<LLVM::GlobalOp> globals = getGlobals(kernel, module);
  kernel.erase();
  for (LLVM::GlobalOp global : globals)
    global.erase();
}

//===----------------------------------------------------------------------===//
// Interface
//===----------------------------------------------------------------------===//

void mlir::moe::pruneKernels(func::FuncOp function, gpu::GPUModuleOp module,
                             MutableArrayRef<Attribute> launches) {
  MLIRContext *context = function.getContext();
  DenseMap<StringAttr, gpu::LaunchFuncOp> calls;
  function.walk([&](gpu::LaunchFuncOp op) { calls[op.getKernelName()] = op; });
  llvm::StringMap<gpu::GPUFuncOp> known;
  for (Attribute &entry : launches) {
    auto launch = cast<DictionaryAttr>(entry);
    StringAttr name = launch.getAs<StringAttr>("name");
    auto kernel = module.lookupSymbol<gpu::GPUFuncOp>(name.getValue());
    if (kernel.getNumArguments() <= kMostShared)
      return;
    gpu::LaunchFuncOp op = calls.lookup(name);
    NamedAttrList entries(launch);
    entries.set("parameters",
                DenseI64ArrayAttr::get(context, pruneParameters(kernel, op)));
    auto [same, isNew] = known.try_emplace(describe(kernel, module), kernel);
    if (!isNew) {
      gpu::GPUFuncOp first = same->second;
      op.setKernelAttr(SymbolRefAttr::get(
          module.getNameAttr(), {SymbolRefAttr::get(first.getNameAttr())}));
      entries.set("name", first.getNameAttr());
      eraseWithGlobals(kernel, module);
    }
    entry = entries.getDictionary(context);
  }
}
