//===- MoEOpsDetail.h - What the definitions of ops share -------*- C++ -*-===//

#ifndef LIB_DIALECT_MOE_IR_MOEOPSDETAIL_H
#define LIB_DIALECT_MOE_IR_MOEOPSDETAIL_H

#include "MoEDims.h"

#include "MoE/Dialect/MoE/IR/MoE.h"
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

/// The factor of q.k in attention: `scale`, or 1/sqrt of the head width, the
/// size of dim `f`, where that is static and positive.
FailureOr<double> getAttentionScale(MoEStructuredOpInterface op,
                                    std::optional<APFloat> scale, int64_t f);
LogicalResult verifyHasScale(Operation *op, FailureOr<double> scale);

// What the verifiers of an op and of its gradient share beyond the shapes.
LogicalResult verifySimilarity(SimilarityOpInterface op);
LogicalResult verifyMeans(PosteriorOpInterface op);
LogicalResult verifySigma(PosteriorOpInterface op);

} // namespace mlir::moe

#endif // LIB_DIALECT_MOE_IR_MOEOPSDETAIL_H
