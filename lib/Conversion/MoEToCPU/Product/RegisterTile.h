//===- RegisterTile.h - Sums of products in registers -----------*- C++ -*-===//
//
// What all matrix products of the CPU's kernels are made of: a tile of sums
// that stays in registers while k advances. At each k one number of each row is
// multiplied with some vectors of columns, and the products are added.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_REGISTERTILE_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_REGISTERTILE_H

#include "Emit/Emitter.h"

namespace mlir::moe {

/// The sums of `numRows` rows by `numVectors` vectors of columns, row by row.
class RegisterTile {
public:
  /// With `usesBf16Dot` a lane holds the numbers of two ks, a pair of bf16.
  RegisterTile(Emitter &e, int64_t numRows, int64_t numVectors,
               bool usesBf16Dot = false)
      : numRows(numRows), numVectors(numVectors), e(e),
        usesBf16Dot(usesBf16Dot) {}

  const int64_t numRows, numVectors;

  /// Sums of nothing.
  Values getZeros() const;
  /// `sums` with the products of one k, or of a pair of them, added: the number
  /// of a row, in all lanes, times each vector of `columns`.
  Values multiplyAdd(function_ref<Value(int64_t row)> getRow,
                     ArrayRef<Value> columns, ValueRange sums) const;
  /// The sums of one row.
  Values getRow(ValueRange sums, int64_t row) const;
  /// Calls `body` for each of the sums, in their order.
  void forEachSum(
      ValueRange sums,
      function_ref<void(int64_t row, int64_t vector, Value sum)> body) const;

private:
  Emitter &e;
  const bool usesBf16Dot;
};

//===----------------------------------------------------------------------===//
// The loop over k
//===----------------------------------------------------------------------===//

/// ks in blocks, for each of which something is prefetched.
struct KBlocks {
  Value first, end;
  int64_t size;
  /// Whether the last block has as many ks as the others.
  bool areWhole;
};

/// A loop over k that carries sums. What is to come nearer meanwhile `prefetch`
/// asks for, a block of ks at a time: addresses are not computed in the loop
/// over k, which has a few cycles for each. Null: nothing is.
Values loopOverK(Emitter &e, const KBlocks &blocks, ValueRange carried,
                 function_ref<void(Value first)> prefetch,
                 function_ref<Values(Value k, ValueRange carried)> body);

/// The same, of which nothing is prefetched.
inline Values loopOverK(Emitter &e, Value first, Value end, ValueRange sums,
                        function_ref<Values(Value k, ValueRange sums)> body) {
  return e.loop(first, end, 1, sums, body);
}

/// Asks for the line of `memref` at `indices`, which is read, or written, soon
/// from the first cache or from another.
void prefetchLine(Emitter &e, Value memref, ValueRange indices,
                  unsigned locality, bool isWrite = false);
/// `locality` of the first and of the second cache.
inline constexpr unsigned kFirstCache = 3, kSecondCache = 2;

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_REGISTERTILE_H
