//===- SoftmaxMixBackwardTensor.h - The gradient on tensor cores -*- C++ -*-==//
//
// A block keeps a tile of its own rows in shared memory and takes the other
// side tile by tile. Four warps stand in a grid: one dim cuts the own rows, the
// other one first the other rows, whose pairs with the own ones a warp
// computes, then the features, of which it accumulates the gradient:
//
//   x = own other^T,  p = dmixed v^T             products of the tile's rows
//   A, dx                                        in registers
//   A, dx -> shared memory                       as bf16 planes
//   gradient += dx other,  dv += A dmixed        over the tile's other rows
//
// The first stage are the pairs (SoftmaxMixBackwardPairs.cpp), the second the
// gradients (SoftmaxMixBackwardTensor.cpp).
//
// The products are as exact as those in f32: what is not 16 bits wide is the
// sum of two or three bf16 (planes), and of the products of planes those below
// 2^-24 are left out. A chunk of 64 features is summed from 0 and then added,
// because tensor cores truncate.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_SOFTMAXMIXBACKWARDTENSOR_H
#define MOE_LIB_CONVERSION_MOETOGPU_SOFTMAXMIXBACKWARDTENSOR_H

#include "SoftmaxMix.h"
#include "SoftmaxMixBackward.h"

namespace mlir::moe {

/// Features of a chunk, and the bytes of its rows.
inline constexpr int64_t kSweepChunk = 64, kSweepChunkBytes = 2 * kSweepChunk;
/// Terms that an f32 is split into.
inline constexpr int64_t kPlanes = 3;

/// Sizes of the tiles, and what they take of shared memory.
struct SweepPlan {
  int64_t numFeatures, numChunks;
  /// Columns of the values, and of their rows in shared memory; 0 for none.
  int64_t numColumns, valueWidth;
  /// Warps that share own rows, and pieces of 16 other rows that each takes.
  int64_t sharing, pieces;
  int64_t ownRows, otherRows;
  int64_t ownPlanes, otherPlanes;
  bool hasDv;

  int64_t getOwnBytes() const { return numChunks * ownRows * kSweepChunkBytes; }
  int64_t getOtherBytes() const {
    return numChunks * otherRows * kSweepChunkBytes;
  }
  /// Of one plane.
  int64_t getOwnValueBytes() const { return ownRows * valueWidth * 2; }
  int64_t getOtherValueBytes() const { return otherRows * valueWidth * 2; }
  int64_t getPairBytes() const { return ownRows * otherRows * 2; }
  int64_t getSumBytes() const { return ownRows * sharing * 4; }
  int64_t getBytes() const {
    return getOwnBytes() + getOtherBytes() + ownPlanes * getOwnValueBytes() +
           otherPlanes * getOtherValueBytes() +
           kPlanes * (hasDv ? 2 : 1) * getPairBytes() + getSumBytes();
  }
  /// Groups of 16 features, and of 16 columns, whose sums a warp has.
  int64_t getFeatureGroups() const {
    return llvm::divideCeil(llvm::divideCeil(numFeatures, 16), sharing);
  }
  int64_t getColumnGroups() const {
    return hasDv ? llvm::divideCeil(valueWidth / 16, sharing) : 0;
  }
};

/// What a thread knows of one of its rows, on either side.
struct RowFacts {
  /// The row, or the last one, and its position among the other side's rows.
  Value place, position;
  /// Whether the row exists, and whether it is not masked either.
  Value exists, isReal;
  Value level;
  /// Of a query.
  Value lse, delta;
  /// Of a key.
  Value bias;
};

class TensorSweep {
public:
  TensorSweep(WarpBuilder &b, MixSweep sweep, const SweepPlan &plan);

  void emit();

private:
  // Shared memory.
  void copyRows(Value memref, Value shared, int64_t numRows, Value first,
                Value count, Value mask);
  void copyValues(Value memref, Value shared, int64_t numRows, int64_t planes,
                  Value first, Value count, Value mask);
  Value isReal(Value row, Value count, Value mask);

  // Pairs.
  Fragment multiplyFeatures();
  Fragment multiplyValues();
  RowFacts getFacts(bool isQuery, Value row);
  PairTerms getTerms(Value product, const RowFacts &mine,
                     const RowFacts &theirs);
  void weigh(Value firstOther, MutableArrayRef<Value> totals);
  void storePair(Value low, Value high, int64_t row, int64_t fragment,
                 Value base);

  // Gradients.
  void addPlanes(ArrayRef<SmallVector<Value>> left,
                 ArrayRef<SmallVector<Value>> right,
                 MutableArrayRef<Value> sums);
  void addProducts(Value weights, Value rows, int64_t numRowPlanes,
                   int64_t planeBytes, bool areFeatures,
                   MutableArrayRef<Value> sums);
  void emitTile();
  void storeGradient(ArrayRef<Value> sums, Value out, int64_t groups,
                     int64_t width, double scale);
  void storeTotals(ArrayRef<Value> totals);

  /// The place of a matrix's row of `lane` in rows of shared memory.
  Value leftRow() { return b.rem(lane, 16); }

  WarpBuilder &b;
  MixSweep sweep;
  MixLogitsOpInterface op;
  const PairLogits logits;
  const SweepPlan plan;
  /// Of the features.
  const Type element;
  Value thread, lane;
  /// The warp's places in the grid of warps.
  Value rowWarp, sharer;
  Value own, others, ownValues, otherValues, gradients, weights, partSums;
  Value numOwn, numOthers, origin;
  /// Of the tile that is being emitted.
  Value batch, head, firstRow;
  SmallVector<RowFacts> ownFacts;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_SOFTMAXMIXBACKWARDTENSOR_H
