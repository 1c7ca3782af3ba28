//===- SoftmaxMixTiles.h - Register tiles of rows and columns ---*- C++ -*-===//
//
// softmax_mix and its gradients work on the same tile: six tokens, the rows,
// are multiplied with four vectors of tokens, the columns. A block of columns
// is packed once for many rows, transposed (a vector holds one feature of
// neighbouring tokens) for products of features, and row by row for sums over
// the tokens of the block.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXTILES_H
#define MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXTILES_H

#include "Emit/Emitter.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// Rows of a register tile.
inline constexpr int64_t kGroupRows = CPUTarget::kMixRows;

/// Vectors of a block of columns: tiles of 6 x 4 leave 8 of 32 registers, of
/// 6 x 2 4 of 16.
inline int64_t getColumnVectors(const Emitter &e) {
  return e.target.vectorRegisters >= 32 ? 4 : 2;
}

/// The vectors of a register tile, a row a token of the group.
using Tile = SmallVector<Values>;

/// A vector of booleans, one element of `mask` a row.
Value loadLanes(Emitter &e, Value mask, ArrayRef<Value> rows);

/// A buffer for a block of columns' features in the form that packTransposed
/// writes and multiplyTile reads: one feature a row in f32; or, where the
/// target multiplies bf16 in pairs and both sides have it, two features a row,
/// side by side in the 32 bits of a column.
struct PackedShape {
  SmallVector<OpFoldResult> sizes;
  Type element;
};
PackedShape getPackedShape(Emitter &e, Value rowSource, Value columnSource,
                           OpFoldResult numFeatures);

/// packed[feature, slot..] = source[rows, feature], 0 for lanes outside of
/// `isReal` (null: none); `source` is `[tokens, features]`.
void packTransposed(Emitter &e, Value source, ArrayRef<Value> rows,
                    Value isReal, Value packed, Value slot);

/// packed[slot, ..] = source[first + slot, ..] for each of `count` slots, 0
/// behind the last token and where `terms[slot]` is -inf; bf16 may be packed in
/// pairs of slots, side by side in 32 bits.
void packRows(Emitter &e, Value source, Value first, int64_t count, Value terms,
              Value packed);

/// The products of rows of `source` with the packed columns.
Tile multiplyTile(Emitter &e, Value source, ArrayRef<Value> rows, Value packed);

/// The products of a block of rows with the packed columns. Wide features are
/// taken in pieces, each for all rows of the block, so that a piece of the
/// columns stays in the first cache; narrow ones a tile at a time. Bits are
/// those of multiplyTile.
class BlockProducts {
public:
  BlockProducts(Emitter &e, OpFoldResult numFeatures, int64_t blockRows);

  /// Prepares the products of `count` rows of `source` from `first` on, in
  /// groups; those that are not visible (null: all are) are left out, and of a
  /// group the vectors of columns before `getFirstVector` (null: none). Asks
  /// for the rows `nextColumn..` of `columns`, which are packed next,
  /// meanwhile.
  void multiply(Emitter &e, Value source, Value packed, Value first,
                Value count, Value columns, Value nextColumn,
                function_ref<Value(Value group)> isVisible = {},
                function_ref<Value(Value group)> getFirstVector = {}) const;
  /// The tile of the rows `rows`, slots `group..` of the block.
  Tile get(Emitter &e, Value source, ArrayRef<Value> rows, Value packed,
           Value group) const;

private:
  Tile loadTile(Emitter &e, Value group) const;

  /// Null where features are narrow.
  Value sums;
  const int64_t blockRows;
};

/// accumulators[group + row, ..] = decays[row] * accumulators[group + row, ..]
/// + sum_column weights[row, column] * packed[column, ..], for `size` elements
/// a row (the size of a memref's dim); without decays the factor is 1. Of the
/// columns, those of [begin, end) are taken: the others' weights are 0. Where
/// columns are packed in pairs, weights are bf16.
void accumulateTile(Emitter &e, Value weights, Value packed, Value accumulators,
                    Value group, ArrayRef<Value> decays, OpFoldResult size,
                    std::pair<Value, Value> columns);

/// The same for `numRows` rows from `firstRow` on, in groups, and `numColumns`
/// columns of a block; their weights are `weights[row, column]`. What rows of
/// the last group behind the accumulators would get, the last one gets: their
/// weights must be 0.
void accumulateRows(Emitter &e, Value weights, Value packed, Value accumulators,
                    Value firstRow, Value numRows, Value numColumns,
                    OpFoldResult size);

/// accumulators[firstColumn + column, ..] += sum_row weights[row, column] *
/// packed[row, ..], for the columns of a block and `numRows` rows; what
/// accumulators hold counts as 0 where they have no sums yet, `isFirst`.
void accumulateColumns(Emitter &e, Value weights, Value packed,
                       Value accumulators, Value firstColumn, Value numRows,
                       OpFoldResult size, Value isFirst);

/// `size` rounded up to whole vectors.
OpFoldResult padToVectors(Emitter &e, OpFoldResult size);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXTILES_H
