//===- CHeader.cpp - C declarations of compiled functions -----------------===//

#include "MoE/Target/Artifact.h"

#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/StringSwitch.h"
#include "llvm/Support/raw_ostream.h"
#include <set>

using namespace mlir;
using namespace mlir::moe;

static StringRef scalarInC(StringRef element) {
  return llvm::StringSwitch<StringRef>(element)
      .Case("i1", "bool")
      .Case("i8", "int8_t")
      .Case("i16", "int16_t")
      .Case("i32", "int32_t")
      .Case("f32", "float")
      .Case("f64", "double")
      .Default("int64_t");
}

/// C identifiers are a subset of MLIR's symbol names.
static bool isCIdentifier(StringRef name) {
  return !name.empty() && !llvm::isDigit(name.front()) &&
         llvm::all_of(name,
                      [](char c) { return llvm::isAlnum(c) || c == '_'; });
}

/// The descriptor of rank 2 is MoETensor2, whatever its elements are.
static void writeTensorType(llvm::raw_ostream &stream, size_t rank) {
  stream << "#ifndef MOE_TENSOR_" << rank << "\n#define MOE_TENSOR_" << rank
         << "\ntypedef struct MoETensor" << rank
         << " {\n  void *allocated;\n  void *aligned;\n  int64_t offset;\n";
  if (rank)
    stream << "  int64_t sizes[" << rank << "];\n  int64_t strides[" << rank
           << "];\n";
  stream << "} MoETensor" << rank << ";\n#endif\n\n";
}

static void writeFunction(llvm::raw_ostream &stream,
                          const FunctionSignature &function) {
  std::vector<std::string> parameters;
  std::string comment;
  auto add = [&](ArrayRef<ValueSignature> values, StringRef stem) {
    for (auto [index, value] : llvm::enumerate(values)) {
      std::string name = (stem + Twine(index)).str();
      parameters.push_back(
          value.isTensor
              ? "MoETensor" + std::to_string(value.shape.size()) + " *" + name
              : (scalarInC(value.elementType) + " " + name).str());
      comment += " *   " + name + ": " + toString(value) + "\n";
    }
  };
  add(function.arguments, "arg");
  add(function.results, "result");
  stream << "/* " << function.name << "\n"
         << comment << " */\nvoid " << interfaceSymbol(function.name) << "("
         << (parameters.empty() ? "void" : llvm::join(parameters, ", "))
         << ");\n\n";
}

std::string mlir::moe::writeCHeader(ArrayRef<FunctionSignature> functions) {
  std::string text;
  llvm::raw_string_ostream stream(text);
  stream << "/* Functions of kernel.o, made by moe-compile. Link with "
            "libmoe_runtime and libm.\n"
            " *\n"
            " * Tensors are row-major: aligned points to the first element, "
            "offset is 0, strides\n"
            " * count elements. Result buffers belong to the caller and must "
            "have the sizes\n"
            " * that the function computes. */\n"
            "#ifndef MOE_KERNEL_H\n#define MOE_KERNEL_H\n\n"
            "#include <stdbool.h>\n#include <stdint.h>\n\n"
            "#ifdef __cplusplus\nextern \"C\" {\n#endif\n\n";
  std::set<size_t> ranks;
  for (const FunctionSignature &function : functions)
    for (const auto *values : {&function.arguments, &function.results})
      for (const ValueSignature &value : *values)
        if (value.isTensor)
          ranks.insert(value.shape.size());
  for (size_t rank : ranks)
    writeTensorType(stream, rank);
  for (const FunctionSignature &function : functions)
    if (isCIdentifier(function.name))
      writeFunction(stream, function);
  stream << "#ifdef __cplusplus\n}\n#endif\n\n#endif\n";
  return text;
}
