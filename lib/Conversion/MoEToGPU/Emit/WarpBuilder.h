//===- WarpBuilder.h - Code of a warp on tensor cores -----------*- C++ -*-===//
//
// What the lowerings with matrix fragments add to SharedMemoryBuilder: 16-bit
// matrix products whose fragments stay in registers. Upstream has them for f16
// on vectors; this is the set that also serves bf16.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EMIT_WARPBUILDER_H
#define MOE_LIB_CONVERSION_MOETOGPU_EMIT_WARPBUILDER_H

#include "SharedMemoryBuilder.h"

namespace mlir::moe {

class WarpBuilder : public SharedMemoryBuilder {
public:
  using SharedMemoryBuilder::SharedMemoryBuilder;

  /// Of swizzled rows in shared memory the 16 from `row` on by the two units
  /// from `unit` on, `offset` bytes further, which need no registers: a left
  /// operand of multiplyAdd.
  SmallVector<Value> loadLeft(Value shared, Value row, Value unit,
                              int64_t rowBytes, int64_t offset = 0);
  /// Likewise two right operands, whose columns are the rows.
  SmallVector<Value> loadRight(Value shared, Value row, Value unit,
                               int64_t rowBytes, int64_t offset = 0);
  /// Likewise two right operands, whose terms are the rows.
  SmallVector<Value> loadTransposedRight(Value shared, Value row, Value unit,
                                         int64_t rowBytes, int64_t offset = 0);
  /// c + a b with a 16x16 (4 registers), b 16x8 (2), c 16x8 (4 f32).
  SmallVector<Value> multiplyAdd(ValueRange a, ValueRange b, ValueRange c,
                                 Type element);
  /// Two f32 rounded to bf16 in one register, the first one low.
  Value packBF16(Value low, Value high);
  /// The two halves of packBF16 as f32.
  std::pair<Value, Value> unpackBF16(Value packed);
  /// Two f16 in one register as f32, the low one first.
  std::pair<Value, Value> unpackF16(Value packed);
  /// Registers whose bf16 sum to the pair, the larger parts first: with three,
  /// nothing of an f32 is lost.
  SmallVector<Value> splitBF16(Value low, Value high, int64_t parts);
  /// Writes eight f32 as units of bf16, one of each part, `termBytes` apart.
  void storeSplit(ArrayRef<Value> values, Value pointer, int64_t parts,
                  int64_t termBytes);
};

/// Keeps ptxas from unrolling the loop of these results: what it would then
/// hold in registers at once may not fit.
void keepRolled(ArrayRef<Value> loopResults);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EMIT_WARPBUILDER_H
