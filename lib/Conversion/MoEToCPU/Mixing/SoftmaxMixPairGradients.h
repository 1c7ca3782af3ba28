//===- SoftmaxMixPairGradients.h - Pairs in both of their roles -*- C++ -*-===//
//
// What pairs of tokens that mix with themselves have in a gradient, for a block
// of rows and a block of columns: the weights a and b of the pair in its two
// roles, and t, the gradient of its logit in both at once
// (SoftmaxMixBackwardSelf.cpp).
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXPAIRGRADIENTS_H
#define MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXPAIRGRADIENTS_H

#include "SoftmaxMixQueries.h"
#include "SoftmaxMixSplits.h"

namespace mlir::moe {

class PairGradients {
public:
  PairGradients(Emitter &e, KernelBuffers &buffers, int64_t blockRows,
                GradientRole &asQuery, GradientRole &asKey, PairSplits &splits,
                const ScaledQueries &queries, bool hasMask);

  /// Writes a, b and t of the rows in slots `slot..` of the block;
  /// `getProducts` gives the products of their features.
  void emitGroup(Value firstRow, Value slot, Value firstColumn,
                 Value packedLevels,
                 function_ref<Tile(ArrayRef<Value> tokens)> getProducts);
  /// Where tokens are their own columns, from slot `firstSlot` of the rows on,
  /// products behind the diagonal are not taken: t is symmetric, and how the
  /// row sees the column is how the column, as a row, is seen by it.
  void mirror(Value firstSlot);
  /// Makes b and t of the slots behind the last of `numRows` rows 0, to the end
  /// of its group.
  void clearBehind(Value numRows);

  /// a and t of a block of rows.
  Value weights, gradients;
  /// b of a block of rows.
  Value getKeyWeights();

private:
  /// Some rows and a block of columns.
  struct Group {
    Value first, firstColumn, packedLevels;
    Values tokens;
    Value gradients;
  };

  Values findAlive(GradientRole &role, const Group &group);
  void addRole(GradientRole &role, const Group &group, const Tile &products,
               Value weights, bool adds);
  void addVisibleRole(GradientRole &role, const Group &group,
                      const Tile &products, Value weights, bool adds);
  void addBothRoles(const Group &group, const Tile &products, Value weights);
  void buildWeights(GradientRole &role, const Group &group,
                    const Tile &products, Value weights, ArrayRef<Value> alive);
  void clearGroup(Value tile);
  void forEachVector(
      function_ref<void(int64_t slot, int64_t vector, Values place)> body);
  void transposeTile(Value from, Value to, Value firstSlot, Value row,
                     Value column);

  Emitter &e;
  GradientRole &asQuery, &asKey;
  PairSplits &splits;
  const ScaledQueries &queries;
  const bool hasMask;
  /// b, unless it is a.
  Value keyWeights;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXPAIRGRADIENTS_H
