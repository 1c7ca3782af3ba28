//===- CompiledFunction.cpp - Compiled moe IR over libtorch tensors -------===//

#include "CompiledFunction.h"

#include <stdexcept>

static MoEStringRef toRef(const std::string &text) {
  return {text.data(), text.size()};
}

static void check(MoEError error) {
  if (!error)
    return;
  std::string message;
  for (size_t i = 0; i < moeErrorGetNumDiagnostics(error); ++i) {
    MoEStringRef text = moeErrorGetDiagnostic(error, i);
    message.append(text.data, text.length).append("\n");
  }
  moeErrorDestroy(error);
  throw std::runtime_error(message);
}

CompiledFunction::CompiledFunction(const std::string &source) {
  MoEBytes object = nullptr;
  check(moeCompileObject(toRef(source), toRef("reference-test.mlir"),
                         toRef("moe-to-cpu"), toRef("native"), toRef(""),
                         &object));
  MoEError error = moeExecutableLoad(moeBytesGet(object), &executable);
  moeBytesDestroy(object);
  check(error);
  if (moeExecutableGetNumFunctions(executable) != 1)
    throw std::runtime_error("expected one public function in the module");
  function = moeExecutableGetFunction(executable, 0);
}

CompiledFunction::~CompiledFunction() {
  if (executable)
    moeExecutableDestroy(executable);
}

/// The memref descriptor of a contiguous tensor, as words of 64 bits.
static std::vector<int64_t> describe(const torch::Tensor &tensor) {
  if (!tensor.is_contiguous())
    throw std::runtime_error("expected a contiguous tensor");
  int64_t address = reinterpret_cast<int64_t>(tensor.data_ptr());
  std::vector<int64_t> words = {address, address, /*offset=*/0};
  for (int64_t size : tensor.sizes())
    words.push_back(size);
  for (int64_t stride : tensor.strides())
    words.push_back(stride);
  return words;
}

void CompiledFunction::operator()(std::vector<torch::Tensor> tensors) const {
  if (moeFunctionGetNumValues(function) != tensors.size())
    throw std::runtime_error("expected one tensor a value of the function");
  std::vector<std::vector<int64_t>> descriptors;
  for (const torch::Tensor &tensor : tensors)
    descriptors.push_back(describe(tensor));
  std::vector<void *> values;
  for (std::vector<int64_t> &descriptor : descriptors)
    values.push_back(descriptor.data());
  moeFunctionGetEntry(function)(values.data());
}
