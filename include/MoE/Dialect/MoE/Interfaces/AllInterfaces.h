//===- AllInterfaces.h - Interface models of the moe dialect ----*- C++ -*-===//

#ifndef MOE_DIALECT_MOE_INTERFACES_ALLINTERFACES_H
#define MOE_DIALECT_MOE_INTERFACES_ALLINTERFACES_H

namespace mlir {
class DialectRegistry;

namespace moe {

/// Tiling and fusion of every op from its dims and maps.
void registerTilingInterfaceExternalModels(DialectRegistry &registry);

/// Bufferization of every op from its destinations.
void registerBufferizableOpInterfaceExternalModels(DialectRegistry &registry);

/// Every op in terms of smaller ones: its decomposition, mixes as softmax_mix,
/// reductions in parts.
void registerDecompositionExternalModels(DialectRegistry &registry);

/// Checks of sizes that only run time knows.
void registerRuntimeVerifiableOpInterfaceExternalModels(
    DialectRegistry &registry);

/// All of the above.
void registerAllDialectInterfaceImplementations(DialectRegistry &registry);

} // namespace moe
} // namespace mlir

#endif // MOE_DIALECT_MOE_INTERFACES_ALLINTERFACES_H
