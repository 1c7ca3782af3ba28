//===- SoftmaxMixRole.h - The roles of rows in a gradient -------*- C++ -*-===//
//
// A kernel of softmax_mix's gradient takes rows of tokens past columns of
// tokens. A role says which of them are queries: all that differs between the
// gradient by queries and by keys is here, so that one kernel serves both, and
// both at once where the tokens are the same.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXROLE_H
#define MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXROLE_H

#include "SoftmaxMixPairs.h"

namespace mlir::moe {

/// The operands that a role reads, on buffers of all batches and heads or on
/// views of one; null where absent.
struct MixOperands {
  Value q, k, lse, delta, v, dmixed, keyBias, bias, queryMask, keyMask,
      queryLevel, keyLevel;
};

/// What the tokens of one side have.
struct MixSide {
  Value features, values, mask, level;
};

/// Buffers that live until `free`: on the stack, whose size is the caller's,
/// unless they are large or their size is known only at run time.
class KernelBuffers {
public:
  explicit KernelBuffers(Emitter &e) : e(e) {}
  /// By default of f32.
  Value allocate(ArrayRef<OpFoldResult> shape, Type element = {});
  void free();

private:
  Emitter &e;
  Values onHeap;
};

class GradientRole {
public:
  GradientRole(Emitter &e, MixLogitsOpInterface op, const MixOperands &all,
               bool rowsAreKeys)
      : rowsAreKeys(rowsAreKeys), logits(op, /*isTransposed=*/rowsAreKeys),
        e(e), all(all) {}

  void allocate(KernelBuffers &buffers);
  void takeViews(Value batch, Value head);
  /// Reads these, of one batch and head, in place of the operands.
  void replaceQueries(Value lse, Value delta, Value dmixed);
  Value getLse() const { return views.lse; }
  Value getDelta() const { return views.delta; }

  /// Packs what this role needs of one vector of columns. Columns that no row
  /// may see in it, and those outside of `isReal`, get the term -inf; returns
  /// the others.
  Value packColumns(Value firstColumn, Value slot, ArrayRef<Value> tokens,
                    Value exists, Value isReal);

  /// Whether a row has a gradient: not a masked token, nor a query that sees
  /// no key.
  Value isRowReal(Value row) const;
  /// p of one row, from the products of features, in row `slot` of `weights`;
  /// 0 where the row is not `alive` (null: it is).
  void buildWeights(int64_t slot, Value row, Value position, Value firstColumn,
                    ArrayRef<Value> products, Value packedLevels, Value weights,
                    Value alive = {});
  /// dx / p of one vector of columns from the product of values.
  Value center(Value row, int64_t vector, Value product);

  const bool rowsAreKeys;
  const PairLogits logits;
  MixSide rows, columns;
  /// The packed block of columns: values, transposed, and one number a column.
  Value packedValues, packedTerms, packedDeltas;

private:
  void takeSides();
  Value getRowTerm(Value row);
  Value getBias(Value row, Value firstColumn);
  Value isEmptyQuery(Value row) const;

  Emitter &e;
  MixOperands all, views;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXROLE_H
