//===- MoEOpsDetail.h - What the definitions of ops share -------*- C++ -*-===//

#ifndef LIB_DIALECT_MOE_IR_MOEOPSDETAIL_H
#define LIB_DIALECT_MOE_IR_MOEOPSDETAIL_H

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/IR/MoEDims.h"
#include "MoE/Dialect/MoE/IR/MoEStructured.h"

namespace mlir::moe {

inline constexpr utils::IteratorType kParallel = utils::IteratorType::parallel;
inline constexpr utils::IteratorType kReduction =
    utils::IteratorType::reduction;

inline int64_t getRank(Value value) {
  return cast<ShapedType>(value.getType()).getRank();
}

/// The dims of an op over tokens with free leading dims: `n0, n1, ..` followed
/// by the op's own.
inline SmallVector<Dim> withLeadingDims(int64_t numLeading, ArrayRef<Dim> dims,
                                        bool whole = false) {
  static constexpr StringLiteral names[] = {"n0", "n1", "n2", "n3",
                                            "n4", "n5", "n6", "n7"};
  SmallVector<Dim> all;
  for (int64_t i = 0; i < numLeading; ++i)
    all.push_back({numLeading == 1 ? StringRef("n")
                                   : StringRef(names[std::min<int64_t>(i, 7)]),
                   kParallel, whole});
  llvm::append_range(all, dims);
  return all;
}

/// The leading dims of a `[.., e]` operand; none for a scalar, which the
/// verifier refuses.
inline int64_t getNumLeading(Value value) {
  return std::max<int64_t>(getRank(value) - 1, 0);
}

inline LogicalResult verifyHasLastDim(Operation *op, Value value,
                                      StringRef name) {
  if (getRank(value) >= 1)
    return success();
  return op->emitOpError() << "expected '" << name
                           << "' to have at least one dim, found a scalar";
}

inline LogicalResult verifyAtLeast(Operation *op, std::optional<int64_t> value,
                                   int64_t least, StringRef name) {
  if (!value || *value >= least)
    return success();
  return op->emitOpError() << "expected " << name << " to be at least " << least
                           << ", found " << *value;
}
inline LogicalResult
verifyAtLeastOne(Operation *op, std::optional<int64_t> value, StringRef name) {
  return verifyAtLeast(op, value, 1, name);
}

inline LogicalResult verifyPositive(Operation *op, double value,
                                    StringRef name) {
  // Written so that NaN fails too.
  if (value > 0.0 && std::isfinite(value))
    return success();
  return op->emitOpError() << "expected " << name
                           << " to be positive and finite, found " << value;
}

/// That `op` has no attribute of the names that visibility had before it was
/// one attribute: they would be kept as unknown ones and hide nothing.
LogicalResult verifyVisibility(Operation *op);

/// The position of row 0 among the columns when the last row sits at the last
/// column, `dim` being that of the tokens in both: with keys as columns and
/// queries as rows, Nk - N.
Value buildDefaultOrigin(OpBuilder &builder, Location loc, Value columns,
                         Value rows, int64_t dim);

/// What getOrigins says of an optional operand that holds the position of row 0
/// along `dim`.
inline SmallVector<std::pair<unsigned, unsigned>>
getOriginsAlong(unsigned dim, MutableOperandRange origin) {
  if (origin.empty())
    return {};
  return {{origin[0].getOperandNumber(), dim}};
}

/// The factor of q.k in attention: `scale`, or 1/sqrt of the head width, the
/// size of dim `f`, where that is static and positive.
FailureOr<double> getAttentionScale(MoEStructuredOpInterface op,
                                    std::optional<APFloat> scale, int64_t f);
LogicalResult verifyHasScale(Operation *op, FailureOr<double> scale);

//===----------------------------------------------------------------------===//
// What the verifiers of an op and of its gradient share beyond the shapes
//===----------------------------------------------------------------------===//

template <typename OpTy>
LogicalResult verifySimilarity(OpTy op) {
  if (!op.getTauValue() &&
      failed(verifyPositive(op, op.getTau().convertToDouble(), "tau")))
    return failure(); // similarity_inform_c2
  if (op.getRestrict() == Restrict::Entropy && op.getUk())
    return op->emitOpError( // similarity_inform_c3
        "expected no keys of their own with restrict = entropy, because the "
        "entropies of queries and keys are compared; found uk");
  if (!op.getUk() && op.getWs()) {
    auto type = cast<ShapedType>(op.getWs().getType());
    if (type.getDimSize(0) != type.getDimSize(1))
      return op->emitOpError()
             << "expected 'ws' to be square without 'uk', found " << type;
  }
  if (op.getVisibility().getExcludeSelf())
    return op->emitOpError(
               "expected a visibility without exclude_self, because "
               "a token always informs itself; found ")
           << op.getVisibility();
  return verifyVisibility(op);
}

template <typename OpTy>
LogicalResult verifyMeans(OpTy op) {
  bool means = static_cast<bool>(op.getVp());
  bool values = op.getV() && op.getWo();
  if (means == values) // attention_posterior_c1
    return op->emitOpError() << "expected exactly one of 'vp' and ('v', 'wo'), "
                                "found "
                             << (means ? "both" : "neither");
  return success();
}

template <typename OpTy>
LogicalResult verifySigma(OpTy op) {
  if (op.getSigmaValue())
    return success();
  return verifyPositive(op, op.getSigma().convertToDouble(),
                        "sigma"); // attention_posterior_c2
}

} // namespace mlir::moe

#endif // LIB_DIALECT_MOE_IR_MOEOPSDETAIL_H
