//===- Signature.h - What a compiled function takes -------------*- C++ -*-===//
//
// The source types of the public functions, taken before lowering erases them
// and stored in the object, in the manifest and in the C header, so that every
// caller can check its arguments instead of crashing.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_TARGET_SIGNATURE_H
#define MOE_TARGET_SIGNATURE_H

#include "mlir/Support/LLVM.h"
#include "llvm/ADT/SmallVector.h"
#include "llvm/ADT/StringRef.h"
#include "llvm/Support/Error.h"
#include "llvm/Support/JSON.h"
#include <string>
#include <vector>

namespace mlir {
class AffineExpr;
class ModuleOp;

namespace moe {

/// One argument or result. A tensor is passed as a pointer to a memref
/// descriptor of identity layout, a scalar by value.
struct ValueSignature {
  bool isTensor = false;
  /// The element type as MLIR spells it: f32, bf16, i1, i64, index ...
  std::string elementType;
  /// Sizes of a tensor; -1 is known only at run time.
  std::vector<int64_t> shape;
  /// Of a result: the sizes as functions of the arguments, so that a caller can
  /// allocate it. An integer, ["arg", i, d] for dim d of argument i, ["arg", i]
  /// for an index argument, [op, a, b] with op in + * // % ceildiv, or null
  /// where the size depends on data.
  std::vector<llvm::json::Value> sizes;
  /// Of an argument: whether the function writes its new content into it.
  bool isUpdated = false;
};

/// The arguments of the compiled function are `arguments`, then `results`: the
/// caller owns the result buffers.
struct FunctionSignature {
  std::string name;
  std::vector<ValueSignature> arguments, results;
  /// What must hold for the sizes of a call, so that no tensor is read or
  /// written past its end: lists [found, "==" or "<=", expected] of sizes as in
  /// `ValueSignature::sizes`. The code does not check it, its callers do.
  std::vector<llvm::json::Value> relations;
};

/// The public func.func definitions of `module`. Fails with a diagnostic on a
/// type that the calling convention cannot pass.
FailureOr<std::vector<FunctionSignature>> collectSignatures(ModuleOp module);

/// A size as JSON: an integer, [op, a, b], or what `describeLeaf` makes of a
/// dim or symbol; null where a part of it is null.
llvm::json::Value
describeExpr(AffineExpr expr,
             llvm::function_ref<llvm::json::Value(AffineExpr)> describeLeaf);

/// "tensor<?x64xf32>" or "f32", for messages.
std::string toString(const ValueSignature &value);

llvm::json::Value toJSON(const ValueSignature &value);
llvm::json::Value toJSON(const FunctionSignature &function);
bool fromJSON(const llvm::json::Value &json, ValueSignature &value,
              llvm::json::Path path);
bool fromJSON(const llvm::json::Value &json, FunctionSignature &function,
              llvm::json::Path path);

/// The symbol of the wrapper `void(void **arguments)` of a function.
std::string packedSymbol(llvm::StringRef function);
/// The symbol of the C interface function that the wrapper calls.
std::string interfaceSymbol(llvm::StringRef function);
/// The symbol of the string that holds all signatures of an object, as JSON.
inline constexpr llvm::StringLiteral kSignaturesSymbol = "__moe_signatures";

} // namespace moe
} // namespace mlir

#endif // MOE_TARGET_SIGNATURE_H
