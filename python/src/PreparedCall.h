//===- PreparedCall.h - A call of which only addresses are missing -*- C++
//-*-===//

#ifndef MOE_PYTHON_PREPAREDCALL_H
#define MOE_PYTHON_PREPAREDCALL_H

#include "Function.h"
#include "Tensors.h"
#include <optional>
#include <span>
#include <vector>

namespace moe {

/// A compiled function with the shapes of its operands and of the results that
/// a call allocates.
class PreparedCall {
public:
  /// No function: a call that is not to be run.
  explicit operator bool() const { return entry; }

  void setFunction(const Function &function);
  /// The next operand of the function, in the shape of this tensor.
  void addOperand(const dlpack::Tensor &tensor);
  /// A result of this type and shape. One that is not `passed` is allocated
  /// for the caller, and the function does not know it.
  void addResult(dlpack::DataType type, std::vector<int64_t> shape,
                 bool passed = true);

  size_t getNumResults() const { return results.size(); }

  /// What the first size of an operand is in one call.
  struct Size {
    size_t operand;
    int64_t size;
  };

  /// Runs the function without the GIL on operands at these addresses. Fills in
  /// `allocated`, one for each result. False with a Python exception.
  bool run(std::span<void *const> operands,
           std::span<dlpack::ManagedTensor *> allocated,
           std::span<const Size> sizes = {}) const;

private:
  /// What a call allocates.
  struct Result {
    std::optional<size_t> header;
    dlpack::DataType type;
    std::vector<int64_t> shape;
  };

  size_t addDescriptor(const int64_t *shape, int64_t rank);
  bool allocate(std::span<dlpack::ManagedTensor *> allocated) const;

  std::shared_ptr<MoEOpaqueExecutable> code;
  MoEPackedFunction entry = nullptr;
  /// Of operands, then of results, without their addresses.
  std::vector<int64_t> descriptors;
  std::vector<size_t> operands;
  std::vector<Result> results;
};

} // namespace moe

#endif // MOE_PYTHON_PREPAREDCALL_H
