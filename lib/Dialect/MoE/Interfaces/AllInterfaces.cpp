//===- AllInterfaces.cpp - Interface models of the moe dialect ------------===//

#include "MoE/Dialect/MoE/Interfaces/AllInterfaces.h"

void mlir::moe::registerAllDialectInterfaceImplementations(
    DialectRegistry &registry) {
  registerBufferizableOpInterfaceExternalModels(registry);
  registerDecompositionExternalModels(registry);
  registerRuntimeVerifiableOpInterfaceExternalModels(registry);
  registerTilingInterfaceExternalModels(registry);
}
