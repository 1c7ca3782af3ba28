//===- ApproximateMath.cpp - Transcendental functions as polynomials ------===//
//
// Applies upstream's polynomial approximations, but for exp, which is most of
// what surrounds the products of a softmax:
//
//   exp(x) = 2^n exp(r),  n = round(x / ln 2),  r = x - n ln 2
//
// Upstream clamps x and n and makes 2^n of an integer, twice the instructions.
// Bits change: see the pass's description.
//
//===----------------------------------------------------------------------===//

#include "MoE/Transforms/Passes.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/Math/Transforms/Passes.h"
#include "mlir/Dialect/Vector/IR/VectorOps.h"
#include "mlir/IR/ImplicitLocOpBuilder.h"
#include "mlir/Transforms/GreedyPatternRewriteDriver.h"

#include <limits>

namespace mlir::moe {
#define GEN_PASS_DEF_MOEAPPROXIMATEMATHPASS
#include "MoE/Transforms/Passes.h.inc"
} // namespace mlir::moe

using namespace mlir;
using namespace mlir::moe;
using arith::CmpFPredicate;

namespace {
/// Operations on f32 or vectors of it.
class Exponential {
public:
  Exponential(OpBuilder &builder, Location loc, Value x)
      : b(loc, builder), type(x.getType()), x(x) {}

  Value scaleByInstruction();
  Value scaleByExponent();

private:
  void reduce();
  Value buildPolynomial();

  Type withElement(Type element) {
    auto shaped = dyn_cast<VectorType>(type);
    return shaped ? Type(shaped.clone(element)) : element;
  }
  Value constant(double value) {
    TypedAttr attr = b.getF32FloatAttr(value);
    if (auto shaped = dyn_cast<VectorType>(type))
      attr = DenseElementsAttr::get(shaped, attr);
    return arith::ConstantOp::create(b, attr);
  }
  Value fma(Value a, Value c, Value sum) {
    return math::FmaOp::create(b, a, c, sum);
  }
  Value selectIf(CmpFPredicate predicate, double bound, Value yes, Value no) {
    Value condition = arith::CmpFOp::create(b, predicate, x, constant(bound));
    return arith::SelectOp::create(b, condition, yes, no);
  }
  Value toBits(Value value) {
    return arith::BitcastOp::create(b, withElement(b.getI32Type()), value);
  }

  ImplicitLocOpBuilder b;
  Type type;
  Value x;
  /// n, n as the last bits of a float, and exp(r).
  Value exponent, shifted, fraction;
};
} // namespace

/// The relative error on |r| <= ln 2 / 2 is 3.1e-9, next to which that of its
/// evaluation counts. exp(0) is 1.
Value Exponential::buildPolynomial() {
  constexpr double coefficients[] = {0.001381459878757596,
                                     0.008368716575205326,
                                     0.04166838899254799,
                                     0.1666652113199234,
                                     0.4999999403953552,
                                     1.0,
                                     1.0};
  Value sum = constant(coefficients[0]);
  for (double coefficient : ArrayRef(coefficients).drop_front())
    sum = fma(sum, fraction, constant(coefficient));
  return sum;
}

void Exponential::reduce() {
  // Floats from 2^23 to 2^24 are integers: the sum is rounded to one, and the
  // last bits of 1.5 * 2^23 + n are those of n.
  constexpr double rounder = 12582912.0;
  constexpr double log2e = 1.44269504088896341, ln2 = 0.693147180559945309;
  constexpr double ln2High = 0.693145751953125; // n ln2High is exact
  shifted = fma(x, constant(log2e), constant(rounder));
  exponent = arith::SubFOp::create(b, shifted, constant(rounder));
  fraction = fma(exponent, constant(-ln2High), x);
  fraction = fma(exponent, constant(ln2High - ln2), fraction);
}

/// For 16 lanes: one instruction multiplies by 2^n, into denormals, 0 and
/// infinity too.
Value Exponential::scaleByInstruction() {
  // Of an infinite x there is no r. Comparisons keep NaN.
  constexpr double most = 1000.0;
  x = selectIf(CmpFPredicate::OLT, -most, constant(-most), x);
  x = selectIf(CmpFPredicate::OGT, most, constant(most), x);
  reduce();
  Type i16 = b.getI16Type(), i32 = b.getI32Type();
  Value allLanes = arith::ConstantIntOp::create(b, i16, -1);
  constexpr int64_t currentRounding = 4;
  Value rounding = arith::ConstantIntOp::create(b, i32, currentRounding);
  Value polynomial = buildPolynomial();
  return LLVM::CallIntrinsicOp::create(
             b, type, b.getStringAttr("llvm.x86.avx512.mask.scalef.ps.512"),
             ValueRange{polynomial, exponent, polynomial, allLanes, rounding})
      .getResult(0);
}

/// For any target: n is added to the exponent of exp(r). Denormals become 0.
Value Exponential::scaleByExponent() {
  reduce();
  IntegerType i32 = b.getI32Type();
  TypedAttr mantissaBits = b.getI32IntegerAttr(23);
  if (auto shaped = dyn_cast<VectorType>(type))
    mantissaBits = DenseElementsAttr::get(shaped.clone(i32), mantissaBits);
  Value power = arith::ShLIOp::create(
      b, toBits(shifted), arith::ConstantOp::create(b, mantissaBits));
  Value bits = arith::AddIOp::create(b, toBits(buildPolynomial()), power);
  Value scaled = arith::BitcastOp::create(b, type, bits);
  // ln 2^-126 and ln 2^128. What is larger, or no number, times the largest
  // float is infinity, or still no number.
  constexpr double least = -87.336544, most = 88.722839;
  Value tooLarge =
      arith::MulFOp::create(b, x, constant(std::numeric_limits<float>::max()));
  scaled = selectIf(CmpFPredicate::OLT, least, constant(0.0), scaled);
  return selectIf(CmpFPredicate::UGT, most, tooLarge, scaled);
}

namespace {
/// math.exp of f32.
struct ExpToPolynomial : OpRewritePattern<math::ExpOp> {
  ExpToPolynomial(MLIRContext *context, bool scalef)
      : OpRewritePattern(context), scalef(scalef) {}

  LogicalResult matchAndRewrite(math::ExpOp op,
                                PatternRewriter &rewriter) const override {
    Type type = op.getType();
    auto vector = dyn_cast<VectorType>(type);
    if (!getElementTypeOrSelf(type).isF32() ||
        (!vector && isa<ShapedType>(type)))
      return rewriter.notifyMatchFailure(op, "expected f32 or vectors of it");
    bool fillsRegister = vector && vector.getRank() == 1 &&
                         !vector.isScalable() && vector.getDimSize(0) == 16;
    Exponential exponential(rewriter, op.getLoc(), op.getOperand());
    rewriter.replaceOp(op, scalef && fillsRegister
                               ? exponential.scaleByInstruction()
                               : exponential.scaleByExponent());
    return success();
  }

  bool scalef;
};

struct ApproximateMathPass
    : mlir::moe::impl::MoEApproximateMathPassBase<ApproximateMathPass> {
  using Base::Base;

  void runOnOperation() override {
    RewritePatternSet patterns(&getContext());
    auto isTranscendental = [](StringRef name) {
      return !llvm::is_contained(
          {math::AbsFOp::getOperationName(), math::FmaOp::getOperationName(),
           math::SqrtOp::getOperationName(), math::FloorOp::getOperationName(),
           math::CeilOp::getOperationName(), math::RoundOp::getOperationName(),
           math::RoundEvenOp::getOperationName(),
           math::TruncOp::getOperationName(),
           math::RsqrtOp::getOperationName()},
          name);
    };
    populateMathF32ExpansionPatterns(patterns, isTranscendental);
    populateMathPolynomialApproximationPatterns(patterns, [&](StringRef name) {
      return name != math::ExpOp::getOperationName() && isTranscendental(name);
    });
    patterns.add<ExpToPolynomial>(&getContext(), scalef);
    // Only these ops and what they become are visited: the rest of a model's
    // code is a hundred times as long.
    SmallVector<Operation *> ops;
    getOperation()->walk([&](Operation *op) {
      if (isa_and_nonnull<math::MathDialect>(op->getDialect()))
        ops.push_back(op);
    });
    auto config = GreedyRewriteConfig().setStrictness(
        GreedyRewriteStrictness::ExistingAndNewOps);
    if (failed(applyOpPatternsGreedily(ops, std::move(patterns), config)))
      signalPassFailure();
  }
};
} // namespace
