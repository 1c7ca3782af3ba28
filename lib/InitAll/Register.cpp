//===- Register.cpp - Registration of what is our own ---------------------===//
//
// Apart from InitAll.cpp, so that a plugin does not drag in all of upstream.
//
//===----------------------------------------------------------------------===//

#include "MoE/Conversion/MoEToLLVM.h"
#include "MoE/Conversion/Passes.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/Interfaces/AllInterfaces.h"
#include "MoE/InitAll.h"
#include "MoE/Pipelines/Pipelines.h"
#include "MoE/Transforms/Passes.h"

using namespace mlir;

void mlir::moe::registerDialect(DialectRegistry &registry) {
  registry.insert<MoEDialect>();
  registerAllDialectInterfaceImplementations(registry);
  registerMoEToLLVMInterface(registry);
}

void mlir::moe::registerPassesAndPipelines() {
  registerMoEConversionPasses();
  registerMoETransformsPasses();
  registerMoEToCPUPipeline();
  registerMoEToNVVMPipeline();
}
