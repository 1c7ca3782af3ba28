//===- CompiledFunction.h - Compiled moe IR over libtorch tensors -*- C++
//-*-===//
//
// Compiles a module through the C API and calls its only function with
// torch tensors. Nothing of MLIR is visible here: this is how a C++ program
// with libtorch uses the compiler.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_TEST_REFERENCE_COMPILEDFUNCTION_H
#define MOE_TEST_REFERENCE_COMPILEDFUNCTION_H

#include "MoE-c/Compiler.h"

#include <torch/torch.h>

#include <string>
#include <vector>

class CompiledFunction {
public:
  /// Throws std::runtime_error with the compiler's diagnostics.
  explicit CompiledFunction(const std::string &source);
  ~CompiledFunction();
  CompiledFunction(const CompiledFunction &) = delete;
  CompiledFunction &operator=(const CompiledFunction &) = delete;

  /// Calls the function: arguments, then destinations. All contiguous.
  void operator()(std::vector<torch::Tensor> tensors) const;

private:
  MoEExecutable executable = nullptr;
  MoEFunction function = nullptr;
};

#endif // MOE_TEST_REFERENCE_COMPILEDFUNCTION_H
