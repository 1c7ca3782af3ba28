//===- SoftmaxMixBackwardPairs.h - Pairs on tensor cores --------*- C++ -*-===//
//
// A block keeps a tile of rows in shared memory and takes the columns, tokens
// of the other role, tile by tile. Four warps stand in a grid: one dim cuts the
// rows, the other one first the columns, whose pairs with the rows a warp
// computes, then the features, of which it accumulates the gradient:
//
//   x = rows columns^T,  p = dmixed v^T          products of the tiles
//   A, dx                                        in registers
//   A, dx -> shared memory                       as bf16 terms
//   gradient += dx columns,  dv += A dmixed      over the tile's columns
//
// The first stage are the pairs, which are here, the second the gradients
// (SoftmaxMixBackwardTensor.cpp).
//
// The products are as exact as those in f32: what is not 16 bits wide is the
// sum of two or three bf16 (terms), and of the products of terms those below
// 2^-24 are left out.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIXBACKWARDPAIRS_H
#define MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIXBACKWARDPAIRS_H

#include "MixGradient.h"
#include "SoftmaxMixCopies.h"

namespace mlir::moe {

/// Terms that an f32 is split into.
inline constexpr int64_t kF32Terms = 3;

/// Sizes of the tiles, and what they take of shared memory.
struct GradientPlan {
  int64_t numFeatures, numChunks;
  /// The values on either side.
  ValueTile rowValues, columnValues;
  /// Warps that share rows, and pieces of 16 columns that each takes.
  int64_t sharing, pieces;
  int64_t tileRows, tileColumns;
  bool hasDv;

  int64_t getRowBytes() const { return numChunks * tileRows * kChunkBytes; }
  int64_t getColumnBytes() const {
    return numChunks * tileColumns * kChunkBytes;
  }
  /// Of one term.
  int64_t getPairBytes() const { return tileRows * tileColumns * 2; }
  int64_t getSumBytes() const { return tileRows * sharing * 4; }
  int64_t getBytes() const {
    return getRowBytes() + getColumnBytes() + rowValues.getBytes() +
           columnValues.getBytes() +
           kF32Terms * (hasDv ? 2 : 1) * getPairBytes() + getSumBytes();
  }
  /// Groups of 16 features, and of 16 columns, whose sums a warp has.
  int64_t getFeatureGroups() const {
    return llvm::divideCeil(llvm::divideCeil(numFeatures, 16), sharing);
  }
  int64_t getValueGroups() const {
    return hasDv ? llvm::divideCeil(rowValues.width / 16, sharing) : 0;
  }
};

/// What a thread knows of one of its rows, on either side.
struct TokenFacts {
  /// The token, or the last one, and its position among the columns.
  Value place, position;
  /// Whether the row exists, and whether it is not masked either.
  Value exists, isReal;
  Value level;
  /// Of a query.
  Value lse, delta;
  /// Of a key.
  Value bias;
};

/// sums += left right, of two neighbouring fragments of 8 columns each, where
/// both sides are sums of terms; the smaller products come first.
void addTermProducts(WarpBuilder &b, ArrayRef<SmallVector<Value>> left,
                     ArrayRef<SmallVector<Value>> right,
                     MutableArrayRef<Value> sums);

/// The pairs of a tile of rows with a tile of columns, and where the two lie.
class GradientPairs {
public:
  GradientPairs(WarpBuilder &b, MixGradient mix, const GradientPlan &plan);

  /// Goes to the tile of rows from `row` on.
  void startTile(Value batchIndex, Value headIndex, Value row);
  /// Reads what the thread has to know of its rows.
  void loadRowFacts();
  /// Whether row `row` of `count` exists and is not masked.
  Value isReal(Value row, Value count, Value mask);
  /// Computes A and dx of the warp's pairs, brings them to shared memory, and
  /// adds dx to the totals of the thread's two rows.
  void weigh(Value firstColumn, MutableArrayRef<Value> totals);

  WarpBuilder &b;
  MixGradient mix;
  MixLogitsOpInterface op;
  const PairLogits logits;
  const GradientPlan plan;
  /// Of the features.
  const Type element;
  Value thread, lane;
  /// The warp's place among those that share rows, and its first row and
  /// column.
  Value sharer, warpRow, warpColumn;
  Value rowFeatures, columnFeatures, rowValues, columnValues, gradients,
      weights, partSums;
  Value numRows, numColumns, origin;
  /// Of the tile that is being emitted.
  Value batch, head, firstRow;
  SmallVector<TokenFacts> rowFacts;

private:
  SmallVector<Value> multiplyFeatures();
  SmallVector<Value> multiplyValues();
  TokenFacts getFacts(bool isQuery, Value row);
  PairTerms getTerms(Value product, const TokenFacts &rowToken,
                     const TokenFacts &columnToken);
  void storePair(Value low, Value high, int64_t row, int64_t fragment,
                 Value base);
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_MIXING_SOFTMAXMIXBACKWARDPAIRS_H
