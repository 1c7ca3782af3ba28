//===- Compile.cpp - A module to code in one call -------------------------===//

#include "MoE/Target/Compile.h"

#include "MoE/Target/CPUModels.h"
#include "MoE/Target/Input.h"
#include "MoE/Target/Kernels.h"
#include "MoE/Target/PTX.h"
#include "MoE/Target/PhaseDump.h"
#include "mlir/Interfaces/FunctionInterfaces.h"

using namespace mlir;
using namespace mlir::moe;

/// Removes our own attributes of arguments, such as the importer's names: LLVM
/// IR has no place for them, and its translation warns about each.
static void dropArgumentNotes(ModuleOp module) {
  module.walk([](FunctionOpInterface function) {
    for (unsigned i = 0, n = function.getNumArguments(); i < n; ++i)
      for (NamedAttribute attribute : llvm::to_vector(function.getArgAttrs(i)))
        if (attribute.getName().strref().starts_with("moe."))
          function.removeArgAttr(i, attribute.getName());
  });
}

/// The later phases, as text beside the IR dumps.
static void dumpHostCode(ModuleOp module, const HostCodeOptions &options,
                         StringRef folder) {
  const std::pair<HostCodeForm, StringRef> phases[] = {
      {HostCodeForm::LLVMIR, "90-optimised.ll"},
      {HostCodeForm::Assembly, "91-code.s"}};
  for (auto [form, file] : phases)
    if (FailureOr<std::string> text =
            translateToHostCode(module, form, options);
        succeeded(text))
      writePhase(module, folder, file, *text);
}

FailureOr<HostCode> mlir::moe::compileForHost(ModuleOp module,
                                              HostCodeForm form,
                                              const CompileOptions &options) {
  FailureOr<std::vector<FunctionSignature>> signatures =
      collectSignatures(module);
  if (failed(signatures))
    return failure();
  if (signatures->empty())
    return module.emitError() << "expected a public function to compile, found "
                                 "none in the module";
  std::string pipeline = options.pipeline;
  if (pipeline == "moe-to-cpu") {
    llvm::Expected<std::string> tuned =
        getCPUPipeline(options.cpu, options.tuning);
    if (!tuned)
      return module.emitError() << llvm::toString(tuned.takeError());
    pipeline = *tuned;
  }
  if (failed(runPipeline(module, pipeline, options.dumpDir)))
    return failure();
  dropArgumentNotes(module);

  HostCodeOptions codeOptions;
  codeOptions.cpu = options.cpu;
  codeOptions.signatures = *signatures;
  if (!options.dumpDir.empty())
    dumpHostCode(module, codeOptions, options.dumpDir);
  FailureOr<std::string> code = translateToHostCode(module, form, codeOptions);
  if (failed(code))
    return failure();
  return HostCode{std::move(*code), std::move(*signatures)};
}

FailureOr<DeviceCode> mlir::moe::compileForDevice(ModuleOp module,
                                                  StringRef chip,
                                                  StringRef dumpDir) {
  FailureOr<Chip> known = lookupChip(chip, module.getLoc());
  if (failed(known))
    return failure();
  FailureOr<std::vector<FunctionSignature>> signatures =
      collectSignatures(module);
  if (failed(signatures) ||
      failed(runPipeline(module, ("moe-to-nvvm{chip=" + chip + "}").str(),
                         dumpDir)))
    return failure();
  FailureOr<std::string> ptx = translateToPTX(module);
  if (failed(ptx))
    return failure();
  if (!dumpDir.empty())
    writePhase(module, dumpDir, "90-kernels.ptx", *ptx);
  FailureOr<llvm::json::Array> functions = describeKernels(module, *signatures);
  if (failed(functions))
    return failure();
  return DeviceCode{std::move(*ptx), std::move(*functions)};
}
