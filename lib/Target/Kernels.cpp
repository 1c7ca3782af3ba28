//===- Kernels.cpp - How to launch the kernels of a module ----------------===//

#include "MoE/Target/Kernels.h"

#include "MoE/Conversion/MoEToGPU.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"
#include "mlir/IR/BuiltinOps.h"

using namespace mlir;
using namespace mlir::moe;

namespace json = llvm::json;

/// The dynamic sizes of a function's buffers in the order of the kernels'
/// parameters.
static std::vector<json::Value>
getDynamicSizes(const FunctionSignature &signature) {
  std::vector<json::Value> sizes;
  int64_t argument = 0;
  for (const auto *values : {&signature.arguments, &signature.results})
    for (const ValueSignature &value : *values) {
      for (auto [dim, size] : llvm::enumerate(value.shape))
        if (size < 0)
          sizes.push_back(
              json::Array{"arg", argument, static_cast<int64_t>(dim)});
      ++argument;
    }
  return sizes;
}

/// The results of a map whose symbols are the dynamic sizes.
static json::Array describeSizes(AffineMap map, ArrayRef<json::Value> dynamic) {
  json::Array sizes;
  for (AffineExpr expr : map.getResults())
    sizes.push_back(describeExpr(expr, [&](AffineExpr symbol) {
      return dynamic[cast<AffineSymbolExpr>(symbol).getPosition()];
    }));
  return sizes;
}

static json::Value describeKernel(DictionaryAttr launch,
                                  ArrayRef<json::Value> dynamic) {
  auto grid = cast<AffineMapAttr>(launch.get("grid")).getValue();
  auto integer = [&](StringRef name) {
    auto attribute = launch.getAs<IntegerAttr>(name);
    return attribute ? attribute.getInt() : 0;
  };
  json::Object kernel{{"name", launch.getAs<StringAttr>("name").getValue()},
                      {"grid", describeSizes(grid, dynamic)},
                      {"block_size", integer("block_size")},
                      {"dynamic_smem", integer("dynamic_smem")}};
  if (auto parameters = launch.getAs<DenseI64ArrayAttr>("parameters"))
    kernel["parameters"] = json::Array(parameters.asArrayRef());
  return kernel;
}

FailureOr<json::Array>
mlir::moe::describeKernels(ModuleOp module,
                           ArrayRef<FunctionSignature> signatures) {
  json::Array functions;
  for (const FunctionSignature &signature : signatures) {
    auto function = module.lookupSymbol<func::FuncOp>(signature.name);
    if (!function)
      return module.emitError() << "expected function '" << signature.name
                                << "' to be there after lowering, found none";
    json::Value description = toJSON(signature);
    json::Object &object = *description.getAsObject();
    std::vector<json::Value> dynamic = getDynamicSizes(signature);
    json::Array kernels;
    if (auto launches = function->getAttrOfType<ArrayAttr>(kKernelsAttrName))
      for (auto launch : launches.getAsRange<DictionaryAttr>())
        kernels.push_back(describeKernel(launch, dynamic));
    object["kernels"] = std::move(kernels);
    if (auto bytes = function->getAttrOfType<AffineMapAttr>(kWorkspaceAttrName))
      object["workspace"] = describeSizes(bytes.getValue(), dynamic)[0];
    functions.push_back(std::move(description));
  }
  return functions;
}
