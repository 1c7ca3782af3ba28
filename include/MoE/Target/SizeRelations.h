//===- SizeRelations.h - Which sizes of a function agree --------*- C++ -*-===//
//
// The types of a function say how many dims its tensors have; that two of them
// have the same size stands in the ops of its body. Compiled code relies on it
// without a check, so the callers of compiled code check it: here is what.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_TARGET_SIZERELATIONS_H
#define MOE_TARGET_SIZERELATIONS_H

#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "llvm/Support/JSON.h"
#include <memory>
#include <vector>

namespace mlir::moe {

/// Sizes of a function as expressions of the sizes and the values of its
/// arguments, in the form of `ValueSignature::sizes`.
class SizeTracer {
public:
  explicit SizeTracer(func::FuncOp function);
  ~SizeTracer();

  /// Null where the size depends on data.
  llvm::json::Value describeSize(Value tensor, int64_t dim);

  /// What must hold for the sizes of a call, so that no op of the function
  /// reads or writes past a tensor: lists [found, relation, expected], where a
  /// relation is "==" or "<=". What depends on data is left out.
  std::vector<llvm::json::Value> describeRelations();

private:
  class Impl;
  std::unique_ptr<Impl> impl;
};

} // namespace mlir::moe

#endif // MOE_TARGET_SIZERELATIONS_H
