//===- ThreadBuilder.h - Code of one GPU thread -----------------*- C++ -*-===//
//
// The vocabulary in which the lowerings of block-level ops are written: scalar
// arithmetic, exchanges between the lanes of a warp, and the few functions for
// which a thread needs more than one instruction. Nothing here calls a library.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_THREADBUILDER_H
#define MOE_LIB_CONVERSION_MOETOGPU_THREADBUILDER_H

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"

namespace mlir::moe {

inline constexpr int64_t kWarpSize = 32;

/// Registers the dialects of the ops that a ThreadBuilder makes. Passes call it
/// instead of naming them, so that few files parse the headers of NVVM.
void registerThreadDialects(DialectRegistry &registry);

class ThreadBuilder : public ImplicitLocOpBuilder {
public:
  using ImplicitLocOpBuilder::ImplicitLocOpBuilder;

  //===--------------------------------------------------------------------===//
  // Constants and casts
  //===--------------------------------------------------------------------===//

  Value i1(bool value) { return integer(1, value); }
  Value i32(int64_t value) { return integer(32, value); }
  Value index(int64_t value);
  Value f32(double value);
  Value infinity(bool negative);
  Value nan();
  /// An i32 as an index and back; thread coordinates and expert numbers are
  /// i32, because 64-bit integer arithmetic takes two instructions.
  Value toIndex(Value value);
  Value toI32(Value value);
  /// An index as an integer of `type`.
  Value toInteger(Value value, Type type);
  /// A signed integer as one of `type`, extended or cut.
  Value resize(Value value, Type type);

  //===--------------------------------------------------------------------===//
  // Arithmetic
  //===--------------------------------------------------------------------===//

  template <typename OpTy>
  Value op(Value lhs, Value rhs) {
    return OpTy::create(*this, lhs, rhs);
  }
  Value add(Value lhs, Value rhs);
  Value sub(Value lhs, Value rhs);
  Value mul(Value lhs, Value rhs);
  Value compare(arith::CmpIPredicate predicate, Value lhs, Value rhs);
  Value compare(arith::CmpFPredicate predicate, Value lhs, Value rhs);
  Value both(Value lhs, Value rhs) { return op<arith::AndIOp>(lhs, rhs); }
  Value either(Value lhs, Value rhs) { return op<arith::OrIOp>(lhs, rhs); }
  Value no(Value condition) { return op<arith::XOrIOp>(condition, i1(true)); }
  Value select(Value condition, Value ifTrue, Value ifFalse) {
    return arith::SelectOp::create(*this, condition, ifTrue, ifFalse);
  }
  Value isNaN(Value x) { return compare(arith::CmpFPredicate::UNO, x, x); }
  /// A bf16 as f32, exactly, by integer instructions.
  Value widenBF16(Value value);
  /// a * b + c, rounded once.
  Value fma(Value a, Value b, Value c);
  /// The larger of two floats; a NaN only if both are.
  Value max(Value lhs, Value rhs);

  /// e^x by `ex2.approx.ftz`: a relative error of 2^-22 (2 ulp of ex2) plus
  /// |x| 2^-24 (rounding of x log2 e), so for x <= 0, where the softmaxes use
  /// it, an absolute error below 2^-21. Results below 2^-126 are 0.
  Value exp(Value x);
  /// ln(1 + t) for t in [0, 1], relative error below 1e-7.
  Value log1p(Value t);
  /// ln(x) for positive normal x, relative error below 3e-7; NaN stays NaN.
  Value log(Value x);
  Value sqrt(Value x);
  Value absolute(Value x);
  /// 1 / x by `rcp.approx.ftz`, to 1 ulp.
  Value reciprocal(Value x);

  //===--------------------------------------------------------------------===//
  // Control flow
  //===--------------------------------------------------------------------===//

  using LoopBody =
      function_ref<SmallVector<Value>(Value iteration, ValueRange carried)>;
  /// A loop with this builder inside of it while `body` runs; returns what the
  /// last iteration yields.
  SmallVector<Value> loop(Value begin, Value end, int64_t step,
                          ValueRange initial, LoopBody body);
  void loop(Value begin, Value end, int64_t step,
            function_ref<void(Value iteration)> body);
  void ifThen(Value condition, function_ref<void()> body);
  void ifThenElse(Value condition, function_ref<void()> thenBody,
                  function_ref<void()> elseBody);

  //===--------------------------------------------------------------------===//
  // Memory
  //===--------------------------------------------------------------------===//

  /// An element as f32; bf16 and f16 are widened exactly.
  Value loadF32(Value memref, ValueRange indices);
  /// Adds an i32 to element `position`, an i32, of a contiguous buffer, counted
  /// from its first one. Orders no other access.
  void atomicAdd(Value memref, Value position, Value amount);

  //===--------------------------------------------------------------------===//
  // Warps
  //===--------------------------------------------------------------------===//

  /// The value of the lane whose number differs in the bits of `distance`. All
  /// lanes of the warp take part.
  Value shuffleXor(Value value, int64_t distance);
  /// The value of lane `source`, an i32. All lanes of the warp take part.
  Value shuffleFrom(Value value, Value source);
  /// All lanes of the warp meet and see each other's writes.
  void syncWarp();
  /// A bit for each lane: whether its condition holds.
  Value ballot(Value condition);
  /// The number of bits that are 1.
  Value countBits(Value bits);
  /// Combines the values of `lanes` neighbouring lanes (a power of two); each
  /// of them gets the result, and with a commutative `combine` the same bits.
  Value reduceLanes(Value value, int64_t lanes,
                    function_ref<Value(Value, Value)> combine);

private:
  Value integer(unsigned width, int64_t value);
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_THREADBUILDER_H
