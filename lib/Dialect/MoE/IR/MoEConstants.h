//===- MoEConstants.h - Constant operands of the moe ops --------*- C++ -*-===//
//
// Reading and making constant tensors, whether their elements are written in
// the IR or are a resource beside it, as weights are.
//
//===----------------------------------------------------------------------===//

#ifndef LIB_DIALECT_MOE_IR_MOECONSTANTS_H
#define LIB_DIALECT_MOE_IR_MOECONSTANTS_H

#include "mlir/IR/BuiltinAttributes.h"
#include "mlir/IR/Value.h"

namespace mlir::moe {

/// The elements of a constant tensor of f32, bf16 or f16 in row-major order;
/// nothing if `attr` is null, of another type or without readable elements.
std::optional<SmallVector<double>> readFloats(Attribute attr);
std::optional<SmallVector<double>> readFloats(Value value);

/// A constant f32 tensor; a resource where the elements would drown the IR.
ElementsAttr makeF32Constant(RankedTensorType type, ArrayRef<double> values,
                             StringRef name);

/// The value that all elements of a constant tensor of floats share.
std::optional<double> getSplatFloat(Value value);
/// The value that all elements of a constant tensor of integers share.
std::optional<int64_t> getSplatInteger(Value value);

/// Whether `value` is a constant matrix with ones on its diagonal and zeros
/// elsewhere.
bool isIdentityMatrix(Value value);

} // namespace mlir::moe

#endif // LIB_DIALECT_MOE_IR_MOECONSTANTS_H
