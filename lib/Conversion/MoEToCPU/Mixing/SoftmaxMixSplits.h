//===- SoftmaxMixSplits.h - Pairs of tokens, each taken once ----*- C++ -*-===//
//
// Where tokens mix with themselves x_ij = x_ji, and one product of features
// serves both. Tokens are cut into columns, blocks as wide as a register tile,
// and into rows, larger blocks. A block of rows is multiplied with the block of
// columns that its first token is in, and with those behind it. What a tile
// holds goes to its rows; where they lie before its columns, it goes to the
// columns as well. So each pair of tokens in different blocks of columns is
// multiplied once, those within one block twice: with c columns a block,
// (n + c) / 2n of all products.
//
// Blocks of rows are dealt out to splits, which run in parallel. A split packs
// each block of columns once, for all of its rows, and keeps sums of its own of
// all columns. The number of splits follows from that of the tokens alone, and
// their sums are added in order: bits do not depend on the threads.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXSPLITS_H
#define MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXSPLITS_H

#include "SoftmaxMixTiles.h"

namespace mlir::moe {

/// The rows of a matrix from `first` on.
Value sliceFrom(Emitter &e, Value rows, Value first);

class PairSplits {
public:
  /// `tokens` are those of all batches and heads, `[b, h, i, f]`.
  PairSplits(Emitter &e, Value tokens, int64_t blockRows, int64_t splitRows,
             int64_t maxSplits);

  /// A buffer of f32 that lives as long as the kernel runs, `[token, inner..]`,
  /// for the tokens of all batches and heads at once; for each split where
  /// `perSplit`. With `inBlocks` it is `[block, inner.., column]`.
  Value allocate(ArrayRef<OpFoldResult> inner, bool perSplit,
                 bool inBlocks = false);
  /// What a buffer has for one batch and head: of one split, of all splits one
  /// after the other where `split` is null, or the buffer is not per split.
  Value slice(Value buffer, Value slot, bool perSplit, Value split = {},
              bool inBlocks = false);

  /// Code for one batch and head, whose buffers are in `slot`: for a split, or
  /// for the block of rows of this number.
  struct Task {
    Value batch, head, slot, number;
  };
  using TaskBody = function_ref<void(const Task &)>;
  /// Runs `split` for all splits, then `finish` for all blocks of rows.
  void run(TaskBody split, TaskBody finish);

  /// The blocks of rows of a split, each from a token on.
  void forEachBlock(Value split, function_ref<void(Value firstRow)> body);
  /// The pairs of blocks of a split: each block of columns from the split's
  /// first row on is packed, and then multiplied with blocks of rows, the first
  /// one first.
  void forEachBlockPair(
      Value split, function_ref<void(Value firstColumn)> pack,
      function_ref<void(Value firstRow, Value firstColumn)> multiply);
  /// The number of rows that form pairs with a block of columns.
  Value getNumRows(Value firstRow, Value firstColumn);
  /// The groups of these rows, each from slot `group` of the block on.
  void forEachGroup(Value firstRow, Value firstColumn,
                    function_ref<void(Value group)> body);
  /// Runs `body` if some of these rows lie before the columns, with their
  /// number.
  void ifBefore(Value firstRow, Value firstColumn,
                function_ref<void(Value numRows)> body);
  /// Whether a row, of the last group, does not lie behind its columns: those
  /// have taken it as a column.
  Value isNotBehind(Value row, Value firstColumn);

  /// The first row of the block that a split gets in a turn.
  Value getFirstRow(Value split, Value turn);

  /// The tokens, and those that a buffer has: whole blocks.
  Value numTokens, paddedTokens;
  Value numSplits;
  const int64_t blockColumns, blockRows;

private:
  Value getEnd(Value firstColumn);
  Value getSize(bool perSplit, bool inBlocks);

  Emitter &e;
  Value numHeads, numPairs, numSlots, numTurns, numBlocks;
  Values buffers;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_MIXING_SOFTMAXMIXSPLITS_H
