//===- Signature.cpp - What a compiled function takes ---------------------===//

#include "MoE/Target/Signature.h"
#include "MoE/Support/Updates.h"
#include "MoE/Target/SizeRelations.h"

#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/IR/AffineExpr.h"
#include "mlir/IR/BuiltinOps.h"
#include "mlir/IR/BuiltinTypes.h"
#include "mlir/Interfaces/ValueBoundsOpInterface.h"
#include "llvm/Support/raw_ostream.h"

using namespace mlir;
using namespace mlir::moe;

namespace json = llvm::json;

/// The element types that have one fixed layout in memory.
static bool isPassable(Type type) {
  return type.isIndex() || type.isF16() || type.isBF16() || type.isF32() ||
         type.isF64() || type.isSignlessInteger(1) ||
         type.isSignlessInteger(8) || type.isSignlessInteger(16) ||
         type.isSignlessInteger(32) || type.isSignlessInteger(64);
}

static FailureOr<ValueSignature> describe(Type type) {
  ValueSignature value;
  Type element = type;
  if (auto shaped = dyn_cast<ShapedType>(type)) {
    auto memref = dyn_cast<MemRefType>(type);
    bool identity =
        memref ? memref.getLayout().isIdentity() : isa<RankedTensorType>(type);
    if (!shaped.hasRank() || !identity)
      return failure();
    value.isTensor = true;
    element = shaped.getElementType();
    for (int64_t size : shaped.getShape())
      value.shape.push_back(ShapedType::isDynamic(size) ? -1 : size);
  }
  bool narrowFloat = element.isF16() || element.isBF16();
  if (!isPassable(element) || (narrowFloat && !value.isTensor))
    return failure();
  llvm::raw_string_ostream(value.elementType) << element;
  return value;
}

static LogicalResult describeAll(func::FuncOp function, TypeRange types,
                                 StringRef what,
                                 std::vector<ValueSignature> &into) {
  for (auto [index, type] : llvm::enumerate(types)) {
    FailureOr<ValueSignature> value = describe(type);
    if (failed(value))
      return function.emitError()
             << "expected " << what << " " << index << " of public function '"
             << function.getName()
             << "' to be a ranked tensor of bf16, f16, f32, f64, i1, i8, i16, "
                "i32, i64 or index, or a scalar of one of these but bf16 and "
                "f16, found "
             << type;
    into.push_back(std::move(*value));
  }
  return success();
}

//===----------------------------------------------------------------------===//
// Sizes of results
//===----------------------------------------------------------------------===//

/// An argument, or a dimension of one; null for anything else.
static json::Value describeOperand(Value value, std::optional<int64_t> dim) {
  auto argument = dyn_cast_or_null<BlockArgument>(value);
  if (!argument)
    return nullptr;
  json::Array operand{"arg", static_cast<int64_t>(argument.getArgNumber())};
  if (dim)
    operand.push_back(*dim);
  return operand;
}

json::Value
mlir::moe::describeExpr(AffineExpr expr,
                        function_ref<json::Value(AffineExpr)> describeLeaf) {
  if (auto constant = dyn_cast<AffineConstantExpr>(expr))
    return constant.getValue();
  if (isa<AffineDimExpr, AffineSymbolExpr>(expr))
    return describeLeaf(expr);

  auto binary = cast<AffineBinaryOpExpr>(expr);
  json::Value lhs = describeExpr(binary.getLHS(), describeLeaf);
  json::Value rhs = describeExpr(binary.getRHS(), describeLeaf);
  if (lhs.kind() == json::Value::Null || rhs.kind() == json::Value::Null)
    return nullptr;
  StringRef op = expr.getKind() == AffineExprKind::Add        ? "+"
                 : expr.getKind() == AffineExprKind::Mul      ? "*"
                 : expr.getKind() == AffineExprKind::FloorDiv ? "//"
                 : expr.getKind() == AffineExprKind::Mod      ? "%"
                                                              : "ceildiv";
  return json::Array{op, std::move(lhs), std::move(rhs)};
}

/// One size of a returned tensor, traced to the arguments of `entry` through
/// the ops' own size facts.
static json::Value describeSize(Value tensor, int64_t dim, Block &entry) {
  auto isArgument = [&](Value value) {
    auto argument = dyn_cast<BlockArgument>(value);
    return argument && argument.getOwner() == &entry;
  };
  if (isArgument(tensor))
    return describeOperand(tensor, dim);
  AffineMap map;
  ValueDimList operands;
  LogicalResult found = ValueBoundsConstraintSet::computeBound(
      map, operands, presburger::BoundType::EQ, {tensor, dim},
      [&](Value value, std::optional<int64_t>, ValueBoundsConstraintSet &) {
        return isArgument(value);
      });
  if (failed(found))
    return nullptr;
  return describeExpr(map.getResult(0), [&](AffineExpr leaf) {
    auto dim = dyn_cast<AffineDimExpr>(leaf);
    unsigned position =
        dim ? dim.getPosition()
            : map.getNumDims() + cast<AffineSymbolExpr>(leaf).getPosition();
    return describeOperand(operands[position].first, operands[position].second);
  });
}

static void describeSizes(func::FuncOp function, SizeTracer &tracer,
                          std::vector<ValueSignature> &results) {
  if (!function.getBody().hasOneBlock())
    return;
  Block &entry = function.getBody().front();
  auto terminator = cast<func::ReturnOp>(entry.getTerminator());
  SmallVector<Value> returned;
  for (auto [position, value] : llvm::enumerate(terminator.getOperands()))
    if (!getUpdatedArgument(function, position))
      returned.push_back(value);
  for (auto [value, result] : llvm::zip_equal(returned, results))
    for (auto [dim, size] : llvm::enumerate(result.shape)) {
      json::Value described =
          size < 0 ? tracer.describeSize(value, dim) : json::Value(size);
      // Several ops together may say what none of them says alone.
      if (described.kind() == json::Value::Null)
        described = describeSize(value, dim, entry);
      result.sizes.push_back(std::move(described));
    }
}

//===----------------------------------------------------------------------===//
// Signatures
//===----------------------------------------------------------------------===//

FailureOr<std::vector<FunctionSignature>>
mlir::moe::collectSignatures(ModuleOp module) {
  std::vector<FunctionSignature> signatures;
  for (auto function : module.getOps<func::FuncOp>()) {
    if (!function.isPublic() || function.isExternal())
      continue;
    FunctionSignature signature;
    signature.name = function.getName().str();
    if (failed(describeAll(function, function.getArgumentTypes(), "argument",
                           signature.arguments)))
      return failure();
    SmallVector<Type> results;
    for (auto [position, type] : llvm::enumerate(function.getResultTypes()))
      if (auto argument = getUpdatedArgument(function, position))
        signature.arguments[*argument].isUpdated = true;
      else
        results.push_back(type);
    if (failed(describeAll(function, results, "result", signature.results)))
      return failure();
    SizeTracer tracer(function);
    describeSizes(function, tracer, signature.results);
    signature.relations = tracer.describeRelations();
    signatures.push_back(std::move(signature));
  }
  return signatures;
}

std::string mlir::moe::toString(const ValueSignature &value) {
  if (!value.isTensor)
    return value.elementType;
  std::string text = "tensor<";
  for (int64_t size : value.shape)
    text += (size < 0 ? "?" : std::to_string(size)) + "x";
  return text + value.elementType + ">";
}

json::Value mlir::moe::toJSON(const ValueSignature &value) {
  json::Object object{{"dtype", value.elementType}};
  if (value.isTensor)
    object["shape"] = json::Array(value.shape);
  if (!value.sizes.empty())
    object["sizes"] = json::Array(value.sizes);
  if (value.isUpdated)
    object["updated"] = true;
  return object;
}

json::Value mlir::moe::toJSON(const FunctionSignature &function) {
  return json::Object{{"name", function.name},
                      {"arguments", json::Array(function.arguments)},
                      {"results", json::Array(function.results)},
                      {"relations", json::Array(function.relations)}};
}

bool mlir::moe::fromJSON(const json::Value &json, ValueSignature &value,
                         json::Path path) {
  json::ObjectMapper mapper(json, path);
  if (!mapper || !mapper.map("dtype", value.elementType))
    return false;
  value.isTensor = json.getAsObject()->get("shape") != nullptr;
  return !value.isTensor || mapper.map("shape", value.shape);
}

bool mlir::moe::fromJSON(const json::Value &json, FunctionSignature &function,
                         json::Path path) {
  json::ObjectMapper mapper(json, path);
  return mapper && mapper.map("name", function.name) &&
         mapper.map("arguments", function.arguments) &&
         mapper.map("results", function.results);
}

std::string mlir::moe::packedSymbol(StringRef function) {
  return ("__moe_call_" + function).str();
}

std::string mlir::moe::interfaceSymbol(StringRef function) {
  return ("_mlir_ciface_" + function).str();
}
