//===- Emitter.h - Writing 1-D vector code ----------------------*- C++ -*-===//
//
// The leaf lowerings write loops over 1-D vectors of one fixed width. This
// builder keeps their formulas short: arithmetic follows the type of its
// operands, constants are splats of the width, loops take lambdas.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_EMITTER_H
#define MOE_LIB_CONVERSION_MOETOCPU_EMITTER_H

#include "MoE/Conversion/MoEToCPU.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"

namespace mlir::moe {

using Values = SmallVector<Value>;

class Emitter : public ImplicitLocOpBuilder {
public:
  Emitter(Location loc, OpBuilder &builder, const CPUVectorOptions &target)
      : ImplicitLocOpBuilder(loc, builder), target(target),
        width(target.vectorWidth) {}

  const CPUVectorOptions target;
  /// The number of lanes of every vector.
  const int64_t width;

  //===--------------------------------------------------------------------===//
  // Types and constants
  //===--------------------------------------------------------------------===//

  VectorType vectorOf(Type element) {
    return VectorType::get({width}, element);
  }
  VectorType floats() { return vectorOf(getF32Type()); }
  VectorType ints() { return vectorOf(getI32Type()); }

  Value index(int64_t value);
  /// A constant of an integer or float type, or a splat of a vector type.
  Value constant(Type type, double value);
  Value constantInt(Type type, int64_t value);
  /// Vectors of one value.
  Value f32(double value) { return constant(floats(), value); }
  Value i32(int64_t value) { return constantInt(ints(), value); }
  /// The vector 0, 1, 2, ...
  Value iota();

  //===--------------------------------------------------------------------===//
  // Arithmetic on scalars and vectors, floats and integers
  //===--------------------------------------------------------------------===//

  Value add(Value a, Value b);
  Value sub(Value a, Value b);
  Value mul(Value a, Value b);
  Value div(Value a, Value b) { return arith::DivFOp::create(*this, a, b); }
  Value fma(Value a, Value b, Value c);
  /// The larger operand; `b` where one is NaN. One instruction on x86, which
  /// the NaN-propagating and the NaN-ignoring maximum are not.
  Value max(Value a, Value b);
  Value min(Value a, Value b);
  Value abs(Value a);
  Value exp(Value a);
  Value compare(arith::CmpFPredicate predicate, Value a, Value b) {
    return arith::CmpFOp::create(*this, predicate, a, b);
  }
  Value compare(arith::CmpIPredicate predicate, Value a, Value b) {
    return arith::CmpIOp::create(*this, predicate, a, b);
  }
  Value isNaN(Value a) { return compare(arith::CmpFPredicate::UNO, a, a); }
  Value select(Value condition, Value a, Value b) {
    return arith::SelectOp::create(*this, condition, a, b);
  }
  /// Conjunction where null means true.
  Value both(Value a, Value b);
  /// ln(1 / (1 + exp(-x))), accurate for any x.
  Value logSigmoid(Value x);
  /// 1 / (1 + exp(-x)), without overflow.
  Value sigmoid(Value x);
  /// sqrt(ln(1 + exp(x))), accurate where exp(x) underflows.
  Value sqrtSoftplus(Value x);

  /// The same bits in another type of the same width.
  Value bitcast(Value a, Type element);
  /// An f32 scalar or vector from an f32, bf16 or f16 one.
  Value toF32(Value a);
  Value toIndex(Value a);
  Value fromIndex(Value a, Type element) {
    return arith::IndexCastOp::create(*this, element, a);
  }
  /// Integers of another width, signed.
  Value toInt(Value a, Type element);
  Value splat(Value scalar);

  /// min(a, b), max(a, b) of indices.
  Value minIndex(Value a, Value b) {
    return arith::MinSIOp::create(*this, a, b);
  }
  Value maxIndex(Value a, Value b) {
    return arith::MaxSIOp::create(*this, a, b);
  }

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

  /// A buffer that lives as long as the function or parallel body around the
  /// insertion point. A static one is hoisted to the top of it, so that loops
  /// do not grow the stack; a dynamic one must be inside `withScratch`.
  Value scratch(ArrayRef<OpFoldResult> shape, Type element);
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
  /// Both branches yield values of `types`.
  Values ifElse(Value condition, TypeRange types,
                function_ref<Values()> thenBody,
                function_ref<Values()> elseBody);
  void ifThen(Value condition, function_ref<void()> body);
  /// Independent iterations, which may run in parallel.
  void parallel(Value count, function_ref<void(Value iv)> body);
};

//===----------------------------------------------------------------------===//
// Views
//===----------------------------------------------------------------------===//

/// `memref` at `indices` of its first dims, which are dropped.
Value sliceLeading(Emitter &e, Value memref, ValueRange indices);

/// `memref` with a leading dim of size 1.
Value addLeadingUnitDim(Emitter &e, Value memref);

/// Whether consecutive elements along the last dim lie side by side.
bool isInnermostContiguous(Type memref);

/// What most kernels ask of an op: that it works on buffers whose rows are
/// contiguous.
LogicalResult matchContiguousBuffers(DestinationStyleOpInterface op,
                                     PatternRewriter &rewriter);

/// Whether dims `first..` of a memref lie densely in row-major order.
bool isContiguousFrom(MemRefType type, int64_t first);

/// The static size of a dim as an attribute, or its value.
OpFoldResult getSize(Emitter &e, Value memref, int64_t position);
/// That of the last dim.
OpFoldResult getLastSize(Emitter &e, Value memref);

/// `width` rows and columns transposed, in registers.
Values transposeLanes(Emitter &e, ArrayRef<Value> rows);

/// The lanes of 2^n vectors interleaved: first lane of each, second of each...
Values interleave(Emitter &e, ArrayRef<Value> vectors);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_EMITTER_H
