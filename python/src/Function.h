//===- Function.h - Compiled functions as Python callables ------*- C++ -*-===//

#ifndef MOE_PYTHON_FUNCTION_H
#define MOE_PYTHON_FUNCTION_H

#include "MoE-c/Compiler.h"
#include "MoE/Runtime/Memory.h"
#include <memory>
#include <nanobind/nanobind.h>
#include <string>
#include <vector>

namespace moe {

/// A compiled function. Calling it checks every argument against the signature,
/// builds descriptors on the stack and runs without the GIL.
class Function {
public:
  Function(std::shared_ptr<MoEOpaqueExecutable> executable,
           MoEFunction function);

  void call(nanobind::args arguments) const;

  std::string name() const;
  std::string signature() const;
  /// Pairs of dtype and shape, the shape None for a scalar.
  nanobind::list values(bool results) const;

  /// Arguments, then results.
  const std::vector<MoEValueType> &getTypes() const { return types; }
  MoEPackedFunction getEntry() const { return entry; }
  /// Keeps the code of the entry mapped.
  std::shared_ptr<MoEOpaqueExecutable> getCode() const { return executable; }

private:
  /// The machine words that the descriptors of a call take.
  size_t words = 0;
  size_t numArguments = 0;
  std::vector<MoEValueType> types;
  MoEPackedFunction entry;
  MoEFunction function;
  /// Keeps the code mapped.
  std::shared_ptr<MoEOpaqueExecutable> executable;
};

/// Sets the Python error of a call of this thread that returned `status`, which
/// is not 0 (moe_call).
void raiseCallError(int64_t status);

} // namespace moe

#endif // MOE_PYTHON_FUNCTION_H
