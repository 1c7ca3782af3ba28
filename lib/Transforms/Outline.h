//===- Outline.h - Loops as functions of their own --------------*- C++ -*-===//
//
// The parts of passes that move loops into private functions. What a loop uses
// of the surrounding function travels in a struct on the caller's stack. Loops
// that do the same to other values, as those of a model's layers do, share one
// function.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_TRANSFORMS_OUTLINE_H
#define MOE_LIB_TRANSFORMS_OUTLINE_H

#include "mlir/Conversion/LLVMCommon/TypeConverter.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/IR/SymbolTable.h"

#include <unordered_map>

namespace mlir::moe {

/// The value in the type that it has in the LLVM dialect, and back. The casts
/// vanish when the function is lowered.
Value castTo(ImplicitLocOpBuilder &builder, Type type, Value value);

/// A captured value in the fields of a struct. Of a buffer these are its
/// pointer and what its type does not say: most of a descriptor would be
/// constants, which are half of a model's code when each loop stores them.
class Capture {
public:
  Capture(Value value, const LLVMTypeConverter &converter);

  Value getValue() const { return value; }
  /// Null where the value cannot be stored.
  Type getType() const { return type; }
  SmallVector<Type> getFields() const;
  /// The values of the fields, of `value`.
  SmallVector<Value> split(ImplicitLocOpBuilder &builder) const;
  /// The value that has such fields.
  Value join(ImplicitLocOpBuilder &builder, ValueRange fields) const;

private:
  MemRefType getBuffer() const { return dyn_cast<MemRefType>(value.getType()); }
  bool hasOwnOffset() const { return ShapedType::isDynamic(offset); }
  bool hasOwnStride(unsigned dim) const {
    return !getBuffer().getLayout().isIdentity() &&
           ShapedType::isDynamic(strides[dim]);
  }

  Value value;
  Type type;
  /// Of a buffer.
  SmallVector<int64_t> strides;
  int64_t offset = 0;
};

/// What a loop uses from outside, and the struct in which that travels.
struct Context {
  SmallVector<Capture> captured;
  LLVM::LLVMStructType type;
};

/// The functions of loops of one module.
class Outliner {
public:
  explicit Outliner(ModuleOp module)
      : module(module), symbols(module), converter(module.getContext()) {}

  /// What the operands and regions of `loop` use. Constants are cloned into it,
  /// so that they need not travel. Failure where a value cannot be stored.
  FailureOr<Context> capture(Operation *loop);

  /// Makes a private function of `arguments` and a pointer to the context, with
  /// a copy of `loop` in its body, which `finish` may replace; or gives an
  /// earlier one that is equal.
  func::FuncOp
  makeFunction(Operation *loop, StringRef suffix, ArrayRef<Type> arguments,
               const Context &context,
               function_ref<void(func::FuncOp, Operation *)> finish);

  /// Stores what is captured in front of `loop`; gives the pointer to it. It
  /// lives in the caller's frame: one a call site, not one a call.
  Value storeContext(ImplicitLocOpBuilder &builder, Operation *loop,
                     const Context &context);

  /// Declares a function of the runtime without results.
  func::FuncOp declare(StringRef name, ArrayRef<Type> arguments);

  /// How many loops got a function that another loop had already.
  unsigned numShared = 0;

private:
  func::FuncOp shareEqual(func::FuncOp body);

  ModuleOp module;
  SymbolTable symbols;
  LLVMTypeConverter converter;
  std::unordered_map<size_t, SmallVector<func::FuncOp, 1>> bodies;
};

} // namespace mlir::moe

#endif // MOE_LIB_TRANSFORMS_OUTLINE_H
