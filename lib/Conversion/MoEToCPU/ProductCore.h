//===- ProductCore.h - Rows times panels of columns -------------*- C++ -*-===//
//
// The one matrix product of the CPU's kernels: sums[m, n] += left[m, k]
// right[k, n]. Contractions of linalg, router logits and the layers of experts
// differ in where operands lie and in what becomes of the sums; the loops
// around it are theirs.
//
// A panel is a block of columns that register tiles of rows are multiplied
// with: a few vectors of them, by steps of k that lie side by side. Weights
// that lie otherwise are turned into panels on the way, which stays in cache.
//
// Each sum is formed in chains of kChainLength products, one after the other,
// and chains are added in order. So the result depends on k alone: not on the
// number of rows, their places, tiles or threads, nor on where weights lie.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCTCORE_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCTCORE_H

#include "Emitter.h"

namespace mlir::moe {

/// The left operand: element (row, step) of `memref` stands at `at`.
struct ProductLeft {
  Value memref;
  std::function<Values(Value row, Value step)> at;
  /// Whether the steps of a row lie side by side.
  bool isContiguous;
  /// Which row of `memref` stands for a row of the product; null for the same.
  std::function<Value(Value row)> getRow = nullptr;
};

/// How the right operand lies in memory: columns of a step side by side, steps
/// of a column side by side, or panels.
enum class ProductLayout { AlongColumns, AlongSteps, Panels };

/// The right operand: element (step, column) of `memref` stands at `at`. Of
/// panels `at` gets the first column of a vector, and the step or, of pairs,
/// half of it.
struct ProductRight {
  Value memref;
  std::function<Values(Value step, Value column)> at;
  ProductLayout layout;
  /// Whether a step, along columns, is all zeros and not to be read; null where
  /// none is.
  std::function<Value(Value step)> isMissing = nullptr;
};

/// The f32 sums of a row from `column` on, side by side; `isSecond` for columns
/// of the second half of a panel, which have the number of those in the first.
struct ProductSums {
  Value memref;
  std::function<Values(Value row, Value column, bool isSecond)> at;
};

class ProductCore {
public:
  /// Products that one accumulator takes before it is added to the total: one
  /// long chain would round the sum of k products k times.
  static constexpr int64_t kChainLength = 256;

  ProductCore(Emitter &e, ProductLeft left, ProductRight right,
              ProductSums sums, Value numColumns, Value numSteps);

  /// The vectors of a full panel, and its columns.
  static int64_t getPanelVectors(const Emitter &e);
  static int64_t getPanelColumns(const Emitter &e) {
    return getPanelVectors(e) * e.width;
  }
  /// The rows of a register tile.
  static constexpr int64_t kTileRows = 6;
  /// Whether products of those types are summed in pairs by one instruction.
  static bool isInPairs(const Emitter &e, Value left, Value right);

  /// Lets the second half of a panel's vectors hold the columns `offset` behind
  /// those of the first half: a gate and what it multiplies.
  void pairColumns(Value offset) { pairOffset = offset; }

  /// Adds to the sums of rows `firstRow` to `endRow` and of the panel of
  /// `numVectors` vectors from `column` on. Where `mayEnd`, columns from
  /// `numColumns` on are not touched.
  void multiplyPanel(Value firstRow, Value endRow, Value column,
                     int64_t numVectors, bool mayEnd);

  /// Calls `body` for all panels: whole ones, then narrower ones for the rest.
  /// `inParallel` makes a loop of the whole ones that threads may share.
  void forEachPanel(
      bool inParallel,
      function_ref<void(Value column, int64_t vectors, bool mayEnd)> body);

private:
  struct Panel;
  /// The rows that a loop over tiles meets.
  struct RowRange {
    Value first, end;
    int64_t fewest, most;
  };

  void makeBuffers(int64_t numVectors);
  bool mustCopyLeft() const;
  Value getChainSteps(Value step);
  Value toPlace(Value step);
  Value getColumn(Value column, int64_t numVectors, int64_t vector);
  std::pair<Value, Value> getColumnAt(const Panel &panel, Value offset);

  Panel makePanel(Value column, int64_t numVectors, Value step, bool mayEnd);
  void fillPanel(const Panel &panel, Value count);
  void packColumns(const Panel &panel, Value count);
  void packSteps(const Panel &panel, Value count);
  void widenPanel(const Panel &panel, Value count);
  void forEachBlock(Value count,
                    function_ref<void(Value first, Value rest)> body);
  Values loadBlock(const Panel &panel, Value offset, Value first, Value rest);
  void storeBlock(ValueRange lines, Value place, Value offset, Value rest);
  std::pair<Value, Value> splitPairs(Value pairs);
  void storePairs(const Panel &panel, Value pairs, Value place, int64_t vector);
  int64_t getLinesOfStep(const Panel &panel);
  void prefetchNextPanel(const Panel &panel, Value number);
  void prefetchNextColumns(const Panel &panel, Value first);

  void copyLeft(ArrayRef<Value> rows, Value firstNumber, Value step,
                Value count);
  Value splatLeft(Value number, Value leftRow, Value step, Value place);
  Value multiplyAdd(Value left, Value right, Value sum);
  Values getSumsAt(const Panel &panel, Value row, int64_t vector);
  void addChain(const Panel &panel, Value row, ValueRange chain);

  void multiplyFew(const RowRange &rows, Value column, int64_t numVectors,
                   bool mayEnd);
  void multiplyBlocks(const RowRange &rows, Value column, bool mayEnd);
  void multiplyBlock(const Panel &panel, const RowRange &rows, Value first,
                     Value rest);
  void multiplyLines(const Panel &panel, Value number, Value row, Value first,
                     function_ref<Value(int64_t line, int64_t vector)> getLine,
                     int64_t numLines);
  void multiplyChains(const RowRange &rows, Value column, int64_t numVectors,
                      bool mayEnd);
  void multiplyTiles(Panel &panel, const RowRange &rows, Value count);
  void multiplyTile(const Panel &panel, Value firstRow, int64_t numRows,
                    Value count);
  void switchRows(Value numRows, int64_t fewest,
                  function_ref<void(int64_t numRows)> body);

  Emitter &e;
  const ProductLeft left;
  const ProductRight right;
  const ProductSums sums;
  const Value numColumns, numSteps;
  const bool inPairs;
  Value pairOffset;
  /// Buffers that panels and rows are copied to, null where they are read where
  /// they lie; and the chains of few rows.
  Value packed, copied, chains;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCTCORE_H
