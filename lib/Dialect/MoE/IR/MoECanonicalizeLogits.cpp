//===- MoECanonicalizeLogits.cpp - Cheaper forms of the logits ------------===//
//
// What the parameters of a router decide is computed once, when they are
// constants: embeddings are normalised, products of parameters are formed, and
// an op of which a plain projection is left becomes moe.router_logits. Folded
// numbers are computed in f64 and rounded once, so results differ from the
// unfolded ones by rounding only.
//
//===----------------------------------------------------------------------===//

#include "MoECanonicalize.h"
#include "MoEOpsDetail.h"

#include "mlir/Dialect/Arith/IR/Arith.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

Operation *MoEDialect::materializeConstant(OpBuilder &builder, Attribute value,
                                           Type type, Location loc) {
  return arith::ConstantOp::materialize(builder, value, type, loc);
}

/// The type of a constant matrix, null if `value` is no tensor of static sizes.
static RankedTensorType getMatrixType(Value value) {
  auto type = dyn_cast<RankedTensorType>(value.getType());
  return type && type.hasStaticShape() && type.getRank() == 2
             ? type
             : RankedTensorType();
}

static Value createF32Matrix(PatternRewriter &rewriter, Location loc,
                             int64_t rows, int64_t columns,
                             ArrayRef<double> values, StringRef name) {
  auto type = RankedTensorType::get({rows, columns}, rewriter.getF32Type());
  return arith::ConstantOp::create(rewriter, loc,
                                   makeF32Constant(type, values, name));
}

static void replaceByRouterLogits(PatternRewriter &rewriter, Operation *op,
                                  Value h, Value weight, Value bias,
                                  Value out) {
  rewriter.replaceOpWithNewOp<RouterLogitsOp>(op, op->getResultTypes(), h,
                                              weight, bias, ValueRange{out});
}

//===----------------------------------------------------------------------===//
// CosineLogitsOp
//===----------------------------------------------------------------------===//

namespace {
/// cosine_logits(h, constant) -> cosine_logits(h, normalised constant)
///   {norm_emb = false}
struct NormaliseConstantEmbeddings : OpRewritePattern<CosineLogitsOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(CosineLogitsOp op,
                                PatternRewriter &rewriter) const override {
    RankedTensorType type = getMatrixType(op.getEmb());
    if (!op.getNormEmb() || !type)
      return rewriter.notifyMatchFailure(op, "nothing to normalise");
    std::optional<SmallVector<double>> emb = readFloats(op.getEmb());
    if (!emb)
      return rewriter.notifyMatchFailure(op, "'emb' is not constant");

    int64_t rows = type.getDimSize(0), width = type.getDimSize(1);
    double eps = op.getEps().convertToDouble();
    for (int64_t row = 0; row < rows; ++row) {
      MutableArrayRef<double> x(emb->data() + row * width, width);
      double squares = 0.0;
      for (double value : x)
        squares += value * value;
      double norm = std::max(std::sqrt(squares), eps);
      for (double &value : x)
        value /= norm;
    }
    Value normalised = createF32Matrix(rewriter, op.getLoc(), rows, width, *emb,
                                       "normalised_emb");
    rewriter.modifyOpInPlace(op, [&] {
      op.getEmbMutable().assign(normalised);
      op.setNormEmb(false);
    });
    return success();
  }
};

/// cosine_logits(h, emb) omega(omega) {norm_token = false, norm_emb = false}
///   -> router_logits(h, emb omega / tau)
/// where the product is known and not more work than the two products were.
struct CosineToRouterLogits : OpRewritePattern<CosineLogitsOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(CosineLogitsOp op,
                                PatternRewriter &rewriter) const override {
    if (op.getNormToken() || op.getNormEmb() || op.getTauValue())
      return rewriter.notifyMatchFailure(op, "more than a product is left");
    double tau = op.getTau().convertToDouble();
    Value weight = op.getEmb();
    if (op.getOmega() || tau != 1.0)
      weight = foldWeight(op, tau, rewriter);
    if (!weight)
      return rewriter.notifyMatchFailure(op, "the product is not constant, or "
                                             "would be more work");
    replaceByRouterLogits(rewriter, op, op.getH(), weight, Value(),
                          op.getOuts()[0]);
    return success();
  }

private:
  /// emb omega / tau
  static Value foldWeight(CosineLogitsOp op, double tau,
                          PatternRewriter &rewriter) {
    RankedTensorType embType = getMatrixType(op.getEmb());
    RankedTensorType omegaType =
        op.getOmega() ? getMatrixType(op.getOmega()) : RankedTensorType();
    if (!embType || (op.getOmega() && !omegaType))
      return {};
    int64_t e = embType.getDimSize(0), c = embType.getDimSize(1);
    int64_t d = omegaType ? omegaType.getDimSize(1) : c;
    // A narrow embedding space makes two products cheaper than one.
    if (omegaType && e * d > c * (e + d))
      return {};
    std::optional<SmallVector<double>> emb = readFloats(op.getEmb());
    if (!emb)
      return {};
    SmallVector<double> weight = *emb;
    if (omegaType) {
      std::optional<SmallVector<double>> omega = readFloats(op.getOmega());
      if (!omega)
        return {};
      weight.assign(e * d, 0.0);
      for (int64_t i = 0; i < e; ++i)
        for (int64_t j = 0; j < c; ++j)
          for (int64_t k = 0; k < d; ++k)
            weight[i * d + k] += (*emb)[i * c + j] * (*omega)[j * d + k];
    }
    for (double &value : weight)
      value /= tau;
    return createF32Matrix(rewriter, op.getLoc(), e, d, weight, "emb_omega");
  }
};
} // namespace

void CosineLogitsOp::getCanonicalizationPatterns(RewritePatternSet &results,
                                                 MLIRContext *context) {
  results.add<CosineToRouterLogits, NormaliseConstantEmbeddings>(context);
}

//===----------------------------------------------------------------------===//
// HyperRouterOp
//===----------------------------------------------------------------------===//

/// bias + matrix x
static SmallVector<double>
applyLayer(ArrayRef<double> matrix, ArrayRef<double> bias, ArrayRef<double> x) {
  SmallVector<double> y(bias);
  for (auto [row, value] : llvm::enumerate(y))
    for (auto [column, factor] : llvm::enumerate(x))
      value += matrix[row * x.size() + column] * factor;
  return y;
}

LogicalResult HyperRouterOp::fold(FoldAdaptor adaptor,
                                  SmallVectorImpl<OpFoldResult> &results) {
  if (getNumResults() == 0)
    return failure();
  auto weightType = cast<RankedTensorType>(getResult(0).getType());
  auto biasType = cast<RankedTensorType>(getResult(1).getType());
  if (!weightType.hasStaticShape() || !biasType.hasStaticShape())
    return failure();
  SmallVector<SmallVector<double>> operands;
  for (Attribute attr : {adaptor.getE(), adaptor.getW1(), adaptor.getB1(),
                         adaptor.getW2(), adaptor.getB2()}) {
    std::optional<SmallVector<double>> values = readFloats(attr);
    if (!values)
      return failure();
    operands.push_back(std::move(*values));
  }

  // rows = w2 relu(w1 e + b1) + b2
  SmallVector<double> hidden =
      applyLayer(operands[1], operands[2], operands[0]);
  for (double &value : hidden)
    // Written so that NaN stays.
    value = value < 0.0 ? 0.0 : value;
  SmallVector<double> rows = applyLayer(operands[3], operands[4], hidden);

  SmallVector<double> weight, bias;
  int64_t width = weightType.getDimSize(1);
  for (int64_t row = 0; row < weightType.getDimSize(0); ++row) {
    ArrayRef<double> values =
        ArrayRef(rows).slice(row * (width + 1), width + 1);
    llvm::append_range(weight, values.drop_back());
    bias.push_back(values.back());
  }
  results.push_back(makeF32Constant(weightType, weight, "router_weight"));
  results.push_back(makeF32Constant(biasType, bias, "router_bias"));
  return success();
}

//===----------------------------------------------------------------------===//
// ACLogitsOp
//===----------------------------------------------------------------------===//

namespace {
/// ac_logits(h, m, prev_idx, emb) -> router_logits(h, emb)
/// where the metric is the identity: m is all ones, or no token has a previous
/// expert (ACMoE Remark 1).
struct IdentityMetricToRouterLogits : OpRewritePattern<ACLogitsOp> {
  using OpRewritePattern::OpRewritePattern;

  LogicalResult matchAndRewrite(ACLogitsOp op,
                                PatternRewriter &rewriter) const override {
    // A mix of ones is 1 up to the rounding of the shares; with NaN among the
    // gates it is NaN.
    bool allOnes = !op.getPrevGates() && getSplatFloat(op.getM()) == 1.0;
    std::optional<int64_t> expert = getSplatInteger(op.getPrevIdx());
    bool noExpert = expert && *expert < 0;
    if (!allOnes && !noExpert)
      return rewriter.notifyMatchFailure(op, "the metric has an effect");
    replaceByRouterLogits(rewriter, op, op.getH(), op.getEmb(), op.getBias(),
                          op.getOuts()[0]);
    return success();
  }
};
} // namespace

void ACLogitsOp::getCanonicalizationPatterns(RewritePatternSet &results,
                                             MLIRContext *context) {
  results.add<IdentityMetricToRouterLogits>(context);
}
