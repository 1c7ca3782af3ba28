//===- ExpandMath.cpp - Functions without a library -----------------------===//
//
// convert-gpu-to-nvvm turns every op of the math dialect into a call of
// libdevice, which is not there. Here they become instructions: exponentials by
// ex2.approx, roots and roundings by the intrinsics that are one instruction,
// the other functions by upstream's polynomials. Bits change: exp, and powers
// of a constant, have a relative error below 3e-7 whatever their argument, and
// are 0 below 2^-126.
//
//===----------------------------------------------------------------------===//

#include "ThreadBuilder.h"
#include "ThreadLowerings.h"

#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Math/Transforms/Passes.h"
#include "mlir/IR/Matchers.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

#include <cmath>

using namespace mlir;
using namespace mlir::moe;

namespace {
/// A function of floats that is one instruction on f32, or on f64 as well.
struct Instruction {
  StringRef op;
  StringRef intrinsic;
  StringRef wideIntrinsic = "";
};
} // namespace

static constexpr Instruction instructions[] = {
    {"math.absf", "llvm.fabs.f32"},
    {"math.ceil", "llvm.ceil.f32"},
    {"math.copysign", "llvm.copysign.f32"},
    {"math.exp2", "llvm.nvvm.ex2.approx.ftz.f"},
    {"math.floor", "llvm.floor.f32"},
    {"math.fma", "llvm.fma.f32"},
    {"math.roundeven", "llvm.rint.f32"},
    {"math.sqrt", "llvm.nvvm.sqrt.rn.f", "llvm.nvvm.sqrt.rn.d"},
    {"math.trunc", "llvm.trunc.f32"},
};

static bool isNarrowFloat(Type type) { return type.isBF16() || type.isF16(); }

namespace {
struct ToInstruction : RewritePattern {
  ToInstruction(MLIRContext *context, Instruction instruction)
      : RewritePattern(instruction.op, 1, context), instruction(instruction) {}

  LogicalResult matchAndRewrite(Operation *op,
                                PatternRewriter &rewriter) const override {
    Type type = op->getResult(0).getType();
    StringRef intrinsic = type.isF32()   ? instruction.intrinsic
                          : type.isF64() ? instruction.wideIntrinsic
                                         : "";
    if (intrinsic.empty())
      return rewriter.notifyMatchFailure(op, "no instruction of its type");
    auto call = LLVM::CallIntrinsicOp::create(rewriter, op->getLoc(), type,
                                              rewriter.getStringAttr(intrinsic),
                                              op->getOperands());
    rewriter.replaceOp(op, call.getResults());
    return success();
  }

  Instruction instruction;
};

/// A function of 16-bit floats is computed in f32.
struct WidenFunction : RewritePattern {
  explicit WidenFunction(MLIRContext *context)
      : RewritePattern(MatchAnyOpTypeTag(), 1, context) {}

  LogicalResult matchAndRewrite(Operation *op,
                                PatternRewriter &rewriter) const override {
    if (!isa<math::MathDialect>(op->getDialect()) || op->getNumResults() != 1 ||
        !isNarrowFloat(op->getResultTypes()[0]))
      return rewriter.notifyMatchFailure(op, "expected a narrow function");
    Type f32 = rewriter.getF32Type();
    OperationState state(op->getLoc(), op->getName(), {}, f32, op->getAttrs());
    for (Value operand : op->getOperands())
      state.operands.push_back(
          isNarrowFloat(operand.getType())
              ? arith::ExtFOp::create(rewriter, op->getLoc(), f32, operand)
              : operand);
    Value wide = rewriter.create(state)->getResult(0);
    rewriter.replaceOpWithNewOp<arith::TruncFOp>(op, op->getResultTypes()[0],
                                                 wide);
    return success();
  }
};

/// A positive number to the power of x is 2^(hi + lo) with hi + lo = x log2
/// base to twice the precision, so that the rounding of a large x log2 base
/// costs nothing:
///   2^hi (1 + lo ln 2)
Value buildPower(ThreadBuilder &b, Value x, double log2Base) {
  constexpr double ln2 = 0.6931471805599453;
  auto high = static_cast<float>(log2Base);
  Value hi = b.mul(x, b.f32(high));
  Value minusHi = arith::NegFOp::create(b, hi);
  Value lo = b.fma(x, b.f32(high), minusHi);
  lo = b.fma(x, b.f32(log2Base - high), lo);
  Value power = math::Exp2Op::create(b, hi);
  Value result = b.fma(power, b.mul(lo, b.f32(ln2)), power);
  // Where hi is infinite lo is a NaN; the power is right.
  Value isFinite = b.compare(arith::CmpFPredicate::OLT,
                             math::AbsFOp::create(b, hi), b.f32(128.0));
  return b.select(isFinite, result, power);
}

struct ExpandExp : OpRewritePattern<math::ExpOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(math::ExpOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.getType().isF32())
      return rewriter.notifyMatchFailure(op, "expected f32");
    ThreadBuilder b(op.getLoc(), rewriter);
    constexpr double log2e = 1.4426950408889634;
    rewriter.replaceOp(op, buildPower(b, op.getOperand(), log2e));
    return success();
  }
};

/// Powers of a constant, such as the frequencies of rotary embeddings.
struct ExpandPower : OpRewritePattern<math::PowFOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(math::PowFOp op,
                                PatternRewriter &rewriter) const override {
    APFloat constant(0.0f);
    if (!op.getType().isF32() ||
        !matchPattern(op.getLhs(), m_ConstantFloat(&constant)))
      return rewriter.notifyMatchFailure(op, "expected powers of an f32");
    double base = constant.convertToFloat();
    if (!constant.isFiniteNonZero() || base < 0)
      return rewriter.notifyMatchFailure(op, "expected a positive number");
    ThreadBuilder b(op.getLoc(), rewriter);
    // Any power of 1 is 1, of NaN and infinity too.
    rewriter.replaceOp(op, base == 1
                               ? b.f32(1.0)
                               : buildPower(b, op.getRhs(), std::log2(base)));
    return success();
  }
};

struct ExpandRsqrt : OpRewritePattern<math::RsqrtOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(math::RsqrtOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.getType().isF32())
      return rewriter.notifyMatchFailure(op, "expected f32");
    ThreadBuilder b(op.getLoc(), rewriter);
    rewriter.replaceOp(op, b.div(b.f32(1.0), b.sqrt(op.getOperand())));
    return success();
  }
};

/// A bf16 is the upper half of an f32. Chips before sm_90 have no instruction
/// for it.
struct WidenBF16 : OpRewritePattern<arith::ExtFOp> {
  using OpRewritePattern::OpRewritePattern;
  LogicalResult matchAndRewrite(arith::ExtFOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.getIn().getType().isBF16() || !op.getType().isF32())
      return rewriter.notifyMatchFailure(op, "expected bf16 to f32");
    ThreadBuilder b(op.getLoc(), rewriter);
    rewriter.replaceOp(op, b.widenBF16(op.getIn()));
    return success();
  }
};
} // namespace

LogicalResult mlir::moe::expandMathForThreads(Operation *kernel) {
  MLIRContext *context = kernel->getContext();
  RewritePatternSet patterns(context);
  auto isTranscendental = [](StringRef name) {
    return name != "math.exp" && name != "math.rsqrt" &&
           llvm::none_of(instructions, [&](const Instruction &instruction) {
             return instruction.op == name;
           });
  };
  for (const Instruction &instruction : instructions)
    patterns.add<ToInstruction>(context, instruction);
  patterns.add<ExpandExp, ExpandPower, ExpandRsqrt, WidenBF16, WidenFunction>(
      context);
  populateMathF32ExpansionPatterns(patterns, isTranscendental);
  populateMathPolynomialApproximationPatterns(patterns, isTranscendental);
  GreedyRewriteConfig config;
  config.setRegionSimplificationLevel(GreedySimplifyRegionLevel::Disabled);
  if (failed(applyPatternsGreedily(kernel, std::move(patterns), config)))
    return failure();
  WalkResult result = kernel->walk([](Operation *op) {
    if (!isa_and_nonnull<math::MathDialect>(op->getDialect()) ||
        isa<math::CtPopOp, math::CountLeadingZerosOp>(op))
      return WalkResult::advance();
    op->emitError() << "cannot run '" << op->getName()
                    << "' on the threads of a block: expected a function of "
                       "f32, bf16 or f16, or a root of f64, found "
                    << op->getOperandTypes();
    return WalkResult::interrupt();
  });
  return failure(result.wasInterrupted());
}
