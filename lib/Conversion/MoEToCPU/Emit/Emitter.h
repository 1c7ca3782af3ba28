//===- Emitter.h - Writing 1-D vector code ----------------------*- C++ -*-===//
//
// The leaf lowerings write loops over 1-D vectors of one fixed width. This
// builder keeps their formulas short: arithmetic follows the type of its
// operands, constants are splats of the width, loops take lambdas.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_EMIT_EMITTER_H
#define MOE_LIB_CONVERSION_MOETOCPU_EMIT_EMITTER_H

#include "MoE/Conversion/MoEToCPU.h"
#include "MoE/Dialect/MoE/Utils/ArithmeticBuilder.h"

#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"

#include <limits>

namespace mlir::moe {

using Values = SmallVector<Value>;

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Emitter : public ArithmeticBuilder {
public:
  Emitter(Location loc, OpBuilder &builder, const CPUTarget &target)
      : ArithmeticBuilder(loc, builder, target.vectorWidth), target(target) {}

  const CPUTarget target;

  VectorType vectorOf(Type element) {
    return VectorType::get({width}, element);
  }
  /// The vector 0, 1, 2, ...
  Value iota();

  //===--------------------------------------------------------------------===//
  // Functions and casts
  //===--------------------------------------------------------------------===//

  Value max(Value lhs, Value rhs) override { return maxOrRhs(lhs, rhs); }
  Value min(Value lhs, Value rhs) override { return minOrRhs(lhs, rhs); }

  /// An f32 scalar or vector from an f32, bf16 or f16 one.
  Value toF32(Value a);
  Value splat(Value scalar);

  //===--------------------------------------------------------------------===//
  // Reductions over lanes, in a fixed order
  //===--------------------------------------------------------------------===//

  Value reduceMax(Value vector);
  Value reduceAdd(Value vector);
  Value anyLane(Value mask);

  //===--------------------------------------------------------------------===//
  // Memory
  //===--------------------------------------------------------------------===//

  Value dim(Value memref, int64_t position);
  /// What a size has behind its whole steps.
  Value rest(Value size, int64_t step);
  Value load(Value memref, ValueRange indices) {
    return memref::LoadOp::create(*this, memref, indices);
  }
  void store(Value value, Value memref, ValueRange indices) {
    memref::StoreOp::create(*this, value, memref, indices);
  }
  /// Consecutive elements, as f32. Lanes outside of `mask` (null: none) are
  /// not read and hold `pad`.
  Value loadFloats(Value memref, ValueRange indices, Value mask = {},
                   double pad = 0.0);
  /// Consecutive elements of `memref`'s own type.
  Value loadVector(Value memref, ValueRange indices);
  void storeVector(Value vector, Value memref, ValueRange indices,
                   Value mask = {});
  /// The lanes below `count`, an index.
  Value firstLanes(Value count);

  //===--------------------------------------------------------------------===//
  // Pairs of bf16, two in each 32-bit lane
  //===--------------------------------------------------------------------===//

  /// Consecutive pairs; elements from `count` on (null: none) are not read, and
  /// zero.
  Value loadPairs(Value memref, ValueRange indices, Value count = {});
  /// One pair in every lane.
  Value splatPair(Value memref, ValueRange indices);
  /// sum + left.low * right.low + left.high * right.high in f32, where the
  /// target has `bf16Dot`.
  Value dotPairs(Value left, Value right, Value sum);

  /// sum + the products of four bytes of each lane, of `left` as unsigned and
  /// of `right` as signed numbers, where the target has `int8Dot`.
  Value dotBytes(Value left, Value right, Value sum);
  /// The sums of two such products in the 16-bit halves of each lane, which
  /// must hold them, where the target has `bytePairs`.
  Value multiplyBytePairs(Value left, Value right);
  /// sum + the products of both 16-bit halves of each lane, as signed numbers,
  /// where the target has `bytePairs`.
  Value dotWords(Value left, Value right, Value sum);
  /// sum + both halves of each lane of `words`.
  Value addWords(Value words, Value sum);

  /// For each byte of a vector the byte of that number in a table: of 16, whose
  /// numbers are below 16, or of 128, where the target has `byteTable`, whose
  /// numbers are the lower 7 bits. Vectors have 8 or 16 lanes.
  Value lookUpBytes(Value bytes, ArrayRef<int8_t> table);

  /// A buffer that lives as long as the function or parallel body around the
  /// insertion point. A static one is hoisted to the top of it, so that loops
  /// do not grow the stack; a dynamic one must be inside `withScratch`.
  Value scratch(ArrayRef<OpFoldResult> shape, Type element);
  /// The same for pairs of bf16, as i32 and as bf16, of which the last dim has
  /// twice as many.
  std::pair<Value, Value> scratchPairs(ArrayRef<int64_t> shape);
  /// Runs `body`; frees dynamic scratch buffers after it where `dynamic`.
  void withScratch(bool dynamic, function_ref<void()> body);

  //===--------------------------------------------------------------------===//
  // Control flow
  //===--------------------------------------------------------------------===//

  /// `for iv = lower to upper step step`, carrying values.
  Values loop(Value lower, Value upper, int64_t step, ValueRange carried,
              function_ref<Values(Value iv, ValueRange carried)> body);
  void loop(Value lower, Value upper, int64_t step,
            function_ref<void(Value iv)> body);
  /// A nest of loops over the first `numDims` dims of a buffer.
  void loopOverLeading(Value memref, int64_t numDims,
                       function_ref<void(ValueRange ivs)> body);
  /// Both branches yield values of `types`.
  Values ifElse(Value condition, TypeRange types,
                function_ref<Values()> thenBody,
                function_ref<Values()> elseBody);
  void ifThen(Value condition, function_ref<void()> body);
  /// Calls `body` with the constant that `value` is, `fewest` to `most`: code
  /// for each of them, unless it is known.
  void switchIndex(Value value, int64_t fewest, int64_t most,
                   function_ref<void(int64_t constant)> body);
  /// Independent iterations, which may run in parallel.
  void parallel(Value count, function_ref<void(Value iv)> body);
};

//===----------------------------------------------------------------------===//
// Views
//===----------------------------------------------------------------------===//

/// The type of what a buffer holds.
inline Type getElementType(Value memref) {
  return cast<MemRefType>(memref.getType()).getElementType();
}

/// Positions [first, first + count), the last of `size` repeated behind it.
Values clampRows(Emitter &e, Value first, int64_t count, Value size);

/// `memref` at `indices` of its first dims, which are dropped.
Value sliceLeading(Emitter &e, Value memref, ValueRange indices);

/// `memref` with a leading dim of size 1.
Value addLeadingUnitDim(Emitter &e, Value memref);

/// Whether consecutive elements along the last dim lie side by side.
bool isInnermostContiguous(Type memref);

/// What every kernel asks of an op: that it works on buffers.
LogicalResult matchBuffers(DestinationStyleOpInterface op,
                           PatternRewriter &rewriter);
/// What most kernels ask of it: that their rows are contiguous, too.
LogicalResult matchContiguousBuffers(DestinationStyleOpInterface op,
                                     PatternRewriter &rewriter);

/// Whether dims `first..` of a memref lie densely in row-major order.
bool isContiguousFrom(MemRefType type, int64_t first);

/// The static size of a dim as an attribute, or its value.
OpFoldResult getSize(Emitter &e, Value memref, int64_t position);
/// That of the last dim.
OpFoldResult getLastSize(Emitter &e, Value memref);

/// Four vectors, transposed within each group of four lanes.
Values transposeInGroups(Emitter &e, ArrayRef<Value> rows);
/// `width` rows and columns transposed, in registers.
Values transposeLanes(Emitter &e, ArrayRef<Value> rows);

/// The lanes of 2^n vectors interleaved: first lane of each, second of each...
Values interleave(Emitter &e, ArrayRef<Value> vectors);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_EMIT_EMITTER_H
