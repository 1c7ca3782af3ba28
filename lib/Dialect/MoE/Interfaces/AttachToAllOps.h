//===- AttachToAllOps.h - One external model for every moe op ---*- C++ -*-===//

#ifndef MOE_LIB_DIALECT_MOE_INTERFACES_ATTACHTOALLOPS_H
#define MOE_LIB_DIALECT_MOE_INTERFACES_ATTACHTOALLOPS_H

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

template <template <typename> class Model, typename... Ops>
void attachToOps(MLIRContext *context) {
  (Ops::template attachInterface<Model<Ops>>(*context), ...);
}

/// Attaches `Model<Op>` to every op of the dialect when it is loaded.
template <template <typename> class Model>
void attachToAllOps(DialectRegistry &registry) {
  registry.addExtension(+[](MLIRContext *context, MoEDialect *) {
    attachToOps<Model,
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"
                >(context);
  });
}

} // namespace mlir::moe

#endif // MOE_LIB_DIALECT_MOE_INTERFACES_ATTACHTOALLOPS_H
