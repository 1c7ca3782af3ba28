//===- SoftmaxMixSplits.h - Pairs of tokens, each met once ------*- C++ -*-===//
//
// Where tokens mix with themselves x_ij = x_ji, and one product of features
// serves both. Tokens are cut into columns, blocks as wide as a register tile,
// and into rows, larger blocks. A block of rows meets the block of columns that
// its first token is in, and those behind it. What a tile holds goes to its
// rows; where they lie before its columns, it goes to the columns as well. So
// each pair of tokens in different blocks of columns is multiplied once, those
// within one block twice: with c columns a block, (n + c) / 2n of all products.
//
// Blocks of rows are dealt out to strips, which run in parallel. A strip packs
// each block of columns once, for all of its rows, and keeps sums of its own of
// all columns. The number of strips follows from that of the tokens alone, and
// their sums are added in order: bits do not depend on the threads.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_SOFTMAXMIXSPLITS_H
#define MOE_LIB_CONVERSION_MOETOCPU_SOFTMAXMIXSPLITS_H

#include "SoftmaxMixTiles.h"

namespace mlir::moe {

class PairStrips {
public:
  /// `tokens` are those of all batches and heads, `[b, h, i, f]`.
  PairStrips(Emitter &e, Value tokens, int64_t blockRows, int64_t stripRows,
             int64_t maxStrips);

  /// A buffer of f32 that lives as long as the kernel runs, `[token, inner..]`,
  /// for the tokens of all batches and heads at once; for each strip where
  /// `perStrip`. With `inBlocks` it is `[block, inner.., column]`.
  Value allocate(ArrayRef<OpFoldResult> inner, bool perStrip,
                 bool inBlocks = false);
  /// What a buffer has for one batch and head: of one strip, of all strips one
  /// after the other where `strip` is null, or the buffer is not per strip.
  Value slice(Value buffer, Value place, bool perStrip, Value strip = {},
              bool inBlocks = false);

  /// Code for one batch and head, whose buffers are at `place`: for a strip, or
  /// for the block of rows of this number.
  struct Task {
    Value batch, head, place, number;
  };
  using TaskBody = function_ref<void(const Task &)>;
  /// Runs `strip` for all strips, then `finish` for all blocks of rows.
  void run(TaskBody strip, TaskBody finish);

  /// The blocks of rows of a strip, each from a token on.
  void forEachBlock(Value strip, function_ref<void(Value firstRow)> body);
  /// The meetings of a strip: each block of columns from the strip's first row
  /// on is packed, and then meets blocks of rows, the first one first.
  void
  forEachMeeting(Value strip, function_ref<void(Value firstColumn)> pack,
                 function_ref<void(Value firstRow, Value firstColumn)> meet);
  /// The number of a meeting's rows.
  Value getNumRows(Value firstRow, Value firstColumn);
  /// A meeting's groups of rows, each from slot `group` of the block on.
  void forEachGroup(Value firstRow, Value firstColumn,
                    function_ref<void(Value group)> body);
  /// Runs `body` if rows of a meeting lie before its columns, with their
  /// number.
  void ifBefore(Value firstRow, Value firstColumn,
                function_ref<void(Value numRows)> body);
  /// Whether a row, of the last group, does not lie behind its columns: those
  /// have met it as a column.
  Value isNotBehind(Value row, Value firstColumn);

  /// The first row of the block that a strip gets in a turn.
  Value getFirstRow(Value strip, Value turn);

  /// The tokens, and those that a buffer has: whole blocks.
  Value numTokens, paddedTokens;
  Value numStrips;
  const int64_t blockColumns, blockRows;

private:
  Value getEnd(Value firstColumn);
  Value getSize(bool perStrip, bool inBlocks);

  Emitter &e;
  Value numHeads, numPairs, numPlaces, numTurns, numBlocks;
  Values buffers;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_SOFTMAXMIXSPLITS_H
