//===- WarpgroupBuilder.h - Code of a warpgroup of sm_90a -------*- C++ -*-===//
//
// What sm_90a adds to a warp's vocabulary: barriers in shared memory by which
// one part of a block hands slots to another, and products of warpgroups, which
// run on while their threads do something else. Upstream's op for them reads
// both operands from shared memory; these take the left one from registers too,
// which is what lets the weights of a softmax stay there.
//
// A group of products is one piece of inline assembly, and so is the wait for
// it. The sums are results of the first and pass through the second: nothing
// can touch them in between, and ptxas, which would otherwise wait after every
// product (its warnings C7510 to C7517), sees that. The wait must come before
// the end of the loop that contains the products, for the copies that a loop's
// back edge implies would touch the sums.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EMIT_WARPGROUPBUILDER_H
#define MOE_LIB_CONVERSION_MOETOGPU_EMIT_WARPGROUPBUILDER_H

#include "WarpBuilder.h"

namespace mlir::moe {

inline constexpr int64_t kWarpgroupWarps = 4;
inline constexpr int64_t kWarpgroupSize = kWarpgroupWarps * kWarpSize;

/// Rows of the left operand, and the terms of one product.
inline constexpr int64_t kWgmmaRows = 64, kWgmmaTerms = 16;

/// Bytes of a barrier.
inline constexpr int64_t kBarrierBytes = 8;

/// To how many bytes the matrices of wgmma are aligned.
inline constexpr int64_t kWgmmaAlignment = 1024;

class WarpgroupBuilder : public WarpBuilder {
public:
  using WarpBuilder::WarpBuilder;

  //===--------------------------------------------------------------------===//
  // Barriers in shared memory
  //===--------------------------------------------------------------------===//

  /// A phase of the barrier ends with the arrival number `arrivals`. By one
  /// thread; a barrier of the block comes after it.
  void initBarrier(Value barrier, int64_t arrivals);
  /// Arrives if `condition` holds; what the thread did before is seen by those
  /// who wait.
  void arrive(Value barrier, Value condition);
  /// Arrives once the thread's copies so far have landed.
  void arriveAfterCopies(Value barrier);
  /// Waits for the end of the phase of that parity (i32); the phase before the
  /// first one has ended.
  void waitFor(Value barrier, Value parity);
  /// What others wrote to shared memory, and the thread knows of, is there for
  /// its products.
  void fenceProducts();

  //===--------------------------------------------------------------------===//
  // Registers
  //===--------------------------------------------------------------------===//

  /// The warpgroup goes on with `registers` a thread (a multiple of 8), more or
  /// less than it has. For more it waits until others have given them back.
  void takeRegisters(int64_t registers);
  void giveRegisters(int64_t registers);

  //===--------------------------------------------------------------------===//
  // Products
  //===--------------------------------------------------------------------===//

  /// A matrix of 16-bit elements in shared memory, in rows of 32, 64 or 128
  /// bytes that `swizzle` permutes. Its memory is aligned to kWgmmaAlignment,
  /// or to 8 rows further on in such memory. With `isTransposed` the rows are
  /// terms and the columns what the products keep; a matrix wider than a row
  /// goes on after `blockBytes`.
  struct Matrix {
    /// Value of type i64.
    Value descriptor;
    bool isTransposed = false;
    /// The matrix begins so many bytes behind the one described.
    int64_t offset = 0;
  };
  Matrix describe(Value shared, int64_t rowBytes, bool isTransposed,
                  int64_t blockBytes = 0);
  /// The matrix that begins `bytes` (a multiple of 16, i32 or constant)
  /// further on. Constants are added where the matrix is used, for they would
  /// take registers if they were taken out of a loop.
  Matrix offset(Matrix matrix, int64_t bytes);
  Matrix offset(Matrix matrix, Value bytes);

  /// 64 rows times 16 terms, in shared memory or as four registers a lane (the
  /// fragments of WarpBuilder::multiplyAdd, 16 rows a warp), times 16 terms
  /// and some columns.
  struct Product {
    Matrix left;
    SmallVector<Value> registers;
    Matrix right;
  };
  /// Starts a group of products, added up in their order, to `sums` or, if
  /// there are none, from 0. A lane has `columns` / 2 sums, those of fragments
  /// of 8 columns one after the other. They must not be used before a wait.
  SmallVector<Value> startProducts(ArrayRef<Product> products, ValueRange sums,
                                   int64_t columns, Type element);
  /// Waits for all groups but the last `pending`; `sums` are those of the group
  /// that this makes available.
  SmallVector<Value> waitForProducts(ValueRange sums, int64_t pending);

private:
  /// `text` with the operands $n: first the results of the types, then
  /// `operands`. It is not removed, and orders memory accesses.
  SmallVector<Value> assemble(StringRef text, StringRef constraints,
                              TypeRange results, ValueRange operands);
  /// The address in the window of shared memory, as i32.
  Value sharedAddress(Value pointer);
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EMIT_WARPGROUPBUILDER_H
