//===- WantedKernelConfigs.cpp - Kernels that users ask for ---------------===//

#include "MoE/Transforms/WantedKernelConfigs.h"

#include "mlir/AsmParser/AsmParser.h"
#include "mlir/IR/Diagnostics.h"

using namespace mlir;
using namespace mlir::moe;

KernelConfigAttr mlir::moe::getWantedKernelConfig(Operation *op) {
  if (KernelConfigAttr config = getKernelConfig(op))
    return config;
  auto module = op->getParentOfType<ModuleOp>();
  if (!module || !isa_and_nonnull<MoEDialect>(op->getDialect()))
    return {};
  auto all = module->getAttrOfType<DictionaryAttr>(kKernelConfigsAttrName);
  return all ? all.getAs<KernelConfigAttr>(op->getName().stripDialect())
             : KernelConfigAttr();
}

static LogicalResult verifyOpName(StringRef name, MLIRContext *context,
                                  Location location) {
  std::string fullName = (MoEDialect::getDialectNamespace() + "." + name).str();
  if (RegisteredOperationName::lookup(fullName, context))
    return success();
  return emitError(location)
         << "expected kernel configurations for ops of the moe dialect, such "
            "as softmax_mix, found one for '"
         << name << "'";
}

static LogicalResult verifyIsConfig(Attribute attribute, StringRef name,
                                    Location location) {
  if (isa<KernelConfigAttr>(attribute))
    return success();
  return emitError(location)
         << "expected '" << name << "' to be a #moe.kernel_config, found "
         << attribute;
}

LogicalResult mlir::moe::verifyWantedKernelConfigs(Operation *root) {
  Location loc = root->getLoc();
  if (Attribute given = root->getAttr(kKernelConfigsAttrName)) {
    auto all = dyn_cast<DictionaryAttr>(given);
    if (!all)
      return root->emitError()
             << "expected '" << kKernelConfigsAttrName
             << "' to be a dictionary of names of ops and their "
                "#moe.kernel_config, found "
             << given;
    for (NamedAttribute one : all)
      if (failed(verifyOpName(one.getName(), root->getContext(), loc)) ||
          failed(verifyIsConfig(one.getValue(), one.getName(), loc)))
        return failure();
  }
  WalkResult result = root->walk([](Operation *op) {
    Attribute given = op->getAttr(kKernelConfigAttrName);
    return given && failed(verifyIsConfig(given, kKernelConfigAttrName,
                                          op->getLoc()))
               ? WalkResult::interrupt()
               : WalkResult::advance();
  });
  return failure(result.wasInterrupted());
}

LogicalResult mlir::moe::setWantedKernelConfig(ModuleOp module,
                                               StringRef opName,
                                               StringRef config,
                                               Location location) {
  MLIRContext *context = module.getContext();
  context->loadDialect<MoEDialect>();
  if (failed(verifyOpName(opName, context, location)))
    return failure();
  // As printed, or what is in angle brackets there.
  StringRef brackets = config.trim();
  brackets.consume_front("#moe.kernel_config");
  std::string reason;
  Attribute parsed;
  if (brackets.starts_with("<")) {
    ScopedDiagnosticHandler handler(context, [&](Diagnostic &diagnostic) {
      reason = diagnostic.str();
      return success();
    });
    parsed = parseAttribute(("#moe.kernel_config" + brackets).str(), context);
  }
  if (!parsed) {
    InFlightDiagnostic diagnostic =
        emitError(location)
        << "expected the configuration of '" << opName
        << "' as it is printed, such as <rows = 64, schedule = mma>, found '"
        << config << "'";
    if (!reason.empty())
      diagnostic << ": " << reason;
    return diagnostic;
  }
  NamedAttrList all;
  if (auto given =
          module->getAttrOfType<DictionaryAttr>(kKernelConfigsAttrName))
    all.assign(given.getValue());
  // What the program asks for itself stays.
  if (!all.get(opName))
    all.set(opName, parsed);
  module->setAttr(kKernelConfigsAttrName, all.getDictionary(context));
  return success();
}
