//===- WarpBuilder.h - Code of a warp on tensor cores -----------*- C++ -*-===//
//
// What the lowerings with matrix fragments add to a thread's vocabulary: raw
// shared memory, asynchronous copies into it, and 16-bit matrix products whose
// fragments stay in registers. Upstream has each of them for f16 on vectors;
// this is the set that also serves bf16.
//
// Shared rows are cut into units of 16 bytes, and unit u of row r lies at place
// u ^ f(r) of its row, so that the eight rows which one step of ldmatrix reads
// together come from different banks:
//
//   bytes a row    units    f(r)
//   32             2        (r / 4) % 2
//   64             4        (r / 2) % 4
//   128 and more   8, 16..  r % 8
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EMIT_WARPBUILDER_H
#define MOE_LIB_CONVERSION_MOETOGPU_EMIT_WARPBUILDER_H

#include "ThreadBuilder.h"

namespace mlir::moe {

/// Bytes that one asynchronous copy moves, and one row of an 8x8 matrix takes.
inline constexpr int64_t kUnitBytes = 16;

/// To how many bytes shared memory is aligned, where nobody needs more.
inline constexpr int64_t kSharedAlignment = 128;

class WarpBuilder : public ThreadBuilder {
public:
  using ThreadBuilder::ThreadBuilder;

  //===--------------------------------------------------------------------===//
  // Integers
  //===--------------------------------------------------------------------===//

  using ThreadBuilder::div;
  Value div(Value lhs, int64_t powerOfTwo);
  Value rem(Value lhs, int64_t powerOfTwo);
  /// The thread's number in the block, and in its warp, as i32.
  Value thread();
  Value lane() { return rem(thread(), kWarpSize); }

  //===--------------------------------------------------------------------===//
  // Shared memory
  //===--------------------------------------------------------------------===//

  /// Reserves shared memory of the kernel around the insertion point. Beyond
  /// what may be static it is dynamic, which the kernel says in
  /// `kDynamicSmemAttrName`.
  Value reserveShared(int64_t bytes, int64_t alignment = kSharedAlignment);
  /// `base` plus `offset` bytes (i32); works on all address spaces.
  Value at(Value base, Value offset);
  Value at(Value base, int64_t offset) { return at(base, i32(offset)); }
  Value load(Type type, Value pointer, int64_t alignment);
  void store(Value value, Value pointer, int64_t alignment);
  /// The byte at which unit `unit` of row `row` starts.
  Value swizzle(Value row, Value unit, int64_t rowBytes);
  void barrier();

  //===--------------------------------------------------------------------===//
  // Global memory
  //===--------------------------------------------------------------------===//

  /// The address of the element at `indices` of a buffer that lies in global
  /// memory.
  Value addressOf(Value memref, ValueRange indices);
  /// Starts copying a unit; where `isReal` does not hold, zeros are written and
  /// nothing is read.
  void copyAsync(Value shared, Value global, Value isReal);
  void commitCopies();
  /// Waits for all copies but those of the last `pending` commits.
  void waitForCopies(int64_t pending);

  //===--------------------------------------------------------------------===//
  // Fragments
  //===--------------------------------------------------------------------===//

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
