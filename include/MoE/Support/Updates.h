//===- Updates.h - Results that update arguments in place -------*- C++ -*-===//
//
// A result of a public function with this attribute is the new content of the
// argument whose position it holds: the caller passes no buffer for it.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_SUPPORT_UPDATES_H
#define MOE_SUPPORT_UPDATES_H

#include "mlir/Dialect/Func/IR/FuncOps.h"
#include <optional>

namespace mlir::moe {

inline constexpr llvm::StringLiteral kUpdatesAttrName = "moe.updates";

/// The argument that result `position` updates; none for other results.
inline std::optional<unsigned> getUpdatedArgument(func::FuncOp function,
                                                  unsigned position) {
  if (auto argument =
          function.getResultAttrOfType<IntegerAttr>(position, kUpdatesAttrName))
    return argument.getInt();
  return std::nullopt;
}

} // namespace mlir::moe

#endif // MOE_SUPPORT_UPDATES_H
