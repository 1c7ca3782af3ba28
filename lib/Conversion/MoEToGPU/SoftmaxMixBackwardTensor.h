//===- SoftmaxMixBackwardTensor.h - The gradient on tensor cores -*- C++ -*-==//
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
// The first stage are the pairs (SoftmaxMixBackwardPairs.cpp), the second the
// gradients (SoftmaxMixBackwardTensor.cpp).
//
// The products are as exact as those in f32: what is not 16 bits wide is the
// sum of two or three bf16 (terms), and of the products of terms those below
// 2^-24 are left out. A chunk of 64 features is summed from 0 and then added,
// because tensor cores truncate.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SOFTMAXMIXBACKWARDTENSOR_H
#define MOE_LIB_CONVERSION_MOETOGPU_SOFTMAXMIXBACKWARDTENSOR_H

#include "SoftmaxMixBackward.h"
#include "SoftmaxMixCopies.h"

namespace mlir::moe {

/// Terms that an f32 is split into.
inline constexpr int64_t kF32Terms = 3;

/// Sizes of the tiles, and what they take of shared memory.
struct GradientPlan {
  int64_t numFeatures, numChunks;
  /// Columns of the values, and of their rows in shared memory; 0 for none.
  int64_t numValues, valueWidth;
  /// Warps that share rows, and pieces of 16 columns that each takes.
  int64_t sharing, pieces;
  int64_t tileRows, tileColumns;
  int64_t rowTerms, columnTerms;
  bool hasDv;

  int64_t getRowBytes() const { return numChunks * tileRows * kChunkBytes; }
  int64_t getColumnBytes() const {
    return numChunks * tileColumns * kChunkBytes;
  }
  /// Of one term.
  int64_t getRowValueBytes() const { return tileRows * valueWidth * 2; }
  int64_t getColumnValueBytes() const { return tileColumns * valueWidth * 2; }
  int64_t getPairBytes() const { return tileRows * tileColumns * 2; }
  int64_t getSumBytes() const { return tileRows * sharing * 4; }
  int64_t getBytes() const {
    return getRowBytes() + getColumnBytes() + rowTerms * getRowValueBytes() +
           columnTerms * getColumnValueBytes() +
           kF32Terms * (hasDv ? 2 : 1) * getPairBytes() + getSumBytes();
  }
  /// Groups of 16 features, and of 16 columns, whose sums a warp has.
  int64_t getFeatureGroups() const {
    return llvm::divideCeil(llvm::divideCeil(numFeatures, 16), sharing);
  }
  int64_t getValueGroups() const {
    return hasDv ? llvm::divideCeil(valueWidth / 16, sharing) : 0;
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

class TensorGradient {
public:
  TensorGradient(WarpBuilder &b, MixGradient mix, const GradientPlan &plan);

  void emit();

private:
  // Shared memory.
  void copyRows(Value memref, Value shared, int64_t numRows, Value first,
                Value count, Value mask);
  void copyValues(Value memref, Value shared, int64_t numRows, int64_t terms,
                  Value first, Value count, Value mask);
  Value isReal(Value row, Value count, Value mask);

  // Pairs.
  Fragment multiplyFeatures();
  Fragment multiplyValues();
  TokenFacts getFacts(bool isQuery, Value row);
  PairTerms getTerms(Value product, const TokenFacts &rowToken,
                     const TokenFacts &columnToken);
  void weigh(Value firstColumn, MutableArrayRef<Value> totals);
  void storePair(Value low, Value high, int64_t row, int64_t fragment,
                 Value base);

  // Gradients.
  void addTermProducts(ArrayRef<SmallVector<Value>> left,
                       ArrayRef<SmallVector<Value>> right,
                       MutableArrayRef<Value> sums);
  void addProducts(Value weights, Value rows, int64_t numTerms,
                   int64_t termBytes, bool areFeatures,
                   MutableArrayRef<Value> sums);
  void emitTile();
  void storeGradient(ArrayRef<Value> sums, Value out, int64_t groups,
                     int64_t width, double scale);
  void storeTotals(ArrayRef<Value> totals);

  /// The place of a matrix's row of `lane` in rows of shared memory.
  Value leftRow() { return b.rem(lane, 16); }

  WarpBuilder &b;
  MixGradient mix;
  MixLogitsOpInterface op;
  const PairLogits logits;
  const GradientPlan plan;
  /// Of the features.
  const Type element;
  Value thread, lane;
  /// The warp's places in the grid of warps.
  Value rowWarp, sharer;
  Value rowFeatures, columnFeatures, rowValues, columnValues, gradients,
      weights, partSums;
  Value numRows, numColumns, origin;
  /// Of the tile that is being emitted.
  Value batch, head, firstRow;
  SmallVector<TokenFacts> rowFacts;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SOFTMAXMIXBACKWARDTENSOR_H
