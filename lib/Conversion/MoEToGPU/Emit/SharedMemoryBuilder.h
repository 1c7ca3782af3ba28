//===- SharedMemoryBuilder.h - Raw shared memory ----------------*- C++ -*-===//
//
// Adds to a thread's vocabulary memory that the threads of a block share, by
// its bytes, and asynchronous copies into it.
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

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EMIT_SHAREDMEMORYBUILDER_H
#define MOE_LIB_CONVERSION_MOETOGPU_EMIT_SHAREDMEMORYBUILDER_H

#include "ThreadBuilder.h"

namespace mlir::moe {

/// Bytes that one asynchronous copy moves, and one row of an 8x8 matrix takes.
inline constexpr int64_t kUnitBytes = 16;

/// To how many bytes shared memory is aligned, where nobody needs more.
inline constexpr int64_t kSharedAlignment = 128;

class SharedMemoryBuilder : public ThreadBuilder {
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
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EMIT_SHAREDMEMORYBUILDER_H
