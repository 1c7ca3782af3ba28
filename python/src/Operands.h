//===- Operands.h - What compiled code asks of its operands -----*- C++ -*-===//
//
// The conditions of an operand, which are the same for a call that is looked at
// in whole and for one that is like an earlier one.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_PYTHON_OPERANDS_H
#define MOE_PYTHON_OPERANDS_H

#include "DLPack.h"
#include <nanobind/nanobind.h>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace moe {

/// The type, the shape and the layout that an operand is to have.
struct OperandCondition {
  dlpack::DataType type;
  /// -1 is any size.
  std::vector<int64_t> shape;
  bool isContiguous;

  /// A condition that is met by no other type and shape than this tensor's.
  static OperandCondition exactly(const dlpack::Tensor &tensor);

  /// What is not met: "dtype", "rank", "shape" or "strides"; empty if all is.
  std::string_view unmet(const dlpack::Tensor &tensor) const;
};

/// The conditions of a program's operands.
class OperandConditions {
public:
  /// Adds the next operand, of the sample's dtype.
  void add(nanobind::handle sample, std::vector<int64_t> shape,
           bool isContiguous);

  /// The first of these operands, by position, that does not meet its
  /// condition, and what is not met: further "memory", for what has none that
  /// code can read. Devices are not looked at.
  std::optional<std::pair<size_t, std::string_view>>
  firstUnmet(nanobind::list operands,
             const std::vector<size_t> &positions) const;

private:
  std::vector<OperandCondition> conditions;
};

/// The bytes [begin, end) that an operand may show.
struct MemorySpan {
  uintptr_t begin, end;
  size_t position;
};

/// Of spans with elements a pair that overlap, one of which is updated; the
/// updated one first.
std::optional<std::pair<size_t, size_t>>
findAliasing(std::vector<MemorySpan> spans, const std::vector<bool> &isUpdated);

/// Whether operands that are updated share no memory with others, for calls
/// most of whose operands stay where they are.
class UpdatedMemory {
public:
  struct Operand {
    size_t bytes;
    bool isUpdated;
    /// Comes with each call.
    bool moves;
  };

  UpdatedMemory() = default;
  explicit UpdatedMemory(std::vector<Operand> operands)
      : operands(std::move(operands)) {}

  bool isDisjoint(std::span<void *const> addresses);

private:
  bool findLayout(std::span<void *const> addresses);

  std::vector<Operand> operands;
  /// Where those lie that do not move, and the updated ones in the order of
  /// memory.
  std::vector<void *> layout;
  std::vector<MemorySpan> updated;
};

/// `findAliasing` for tensors and arrays. Sets of positions are lists.
std::optional<std::pair<size_t, size_t>>
aliasingPair(nanobind::handle operands, const std::vector<size_t> &updated);

} // namespace moe

#endif // MOE_PYTHON_OPERANDS_H
