//===- ThreadBuilder.h - Code of one GPU thread -----------------*- C++ -*-===//
//
// The vocabulary in which the lowerings of block-level ops are written: scalar
// arithmetic, exchanges between the lanes of a warp, and the few functions for
// which a thread needs more than one instruction. Nothing here calls a library.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EMIT_THREADBUILDER_H
#define MOE_LIB_CONVERSION_MOETOGPU_EMIT_THREADBUILDER_H

#include "MoE/Dialect/MoE/Utils/ArithmeticBuilder.h"

namespace mlir::moe {

inline constexpr int64_t kWarpSize = 32;

/// Registers the dialects of the ops that a ThreadBuilder makes. Passes call it
/// instead of naming them, so that few files parse the headers of NVVM.
void registerThreadDialects(DialectRegistry &registry);

class ThreadBuilder : public ArithmeticBuilder {
public:
  ThreadBuilder(Location loc, OpBuilder &builder)
      : ArithmeticBuilder(loc, builder) {}

  //===--------------------------------------------------------------------===//
  // Arithmetic
  //===--------------------------------------------------------------------===//
  //
  // Thread coordinates and expert numbers are i32, because 64-bit integer
  // arithmetic takes two instructions.

  template <typename OpTy>
  Value op(Value lhs, Value rhs) {
    return OpTy::create(*this, lhs, rhs);
  }
  /// A bf16 as f32, exactly, by integer instructions.
  Value widenBF16(Value value);

  // One instruction; those of arith are expanded to four on their way.
  Value maximumNumber(Value lhs, Value rhs) override;
  Value minimumNumber(Value lhs, Value rhs) override;

  // The ops of the math dialect would become calls of libdevice.
  Value fma(Value a, Value b, Value c) override;
  /// e^x by `ex2.approx.ftz`: a relative error of 2^-22 (2 ulp of ex2) plus
  /// |x| 2^-24 (rounding of x log2 e), so for x <= 0, where the softmaxes use
  /// it, an absolute error below 2^-21. Results below 2^-126 are 0.
  Value exp(Value x) override;
  /// For x in [0, 1], relative error below 1e-7.
  Value log1p(Value x) override;
  /// For positive normal x, relative error below 3e-7; NaN stays NaN.
  Value log(Value x) override;
  Value sqrt(Value x) override;
  Value abs(Value x) override;
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

  /// An f32, or a bf16 or f16 as f32, exactly.
  Value toF32(Value value);
  /// An element as f32.
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
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EMIT_THREADBUILDER_H
