//===- ProductCore.h - Rows times panels of columns -------------*- C++ -*-===//
//
// The one matrix product of the CPU's kernels: sums[m, n] += left[m, k]
// right[k, n]. Contractions of linalg, router logits and the layers of experts
// differ in where operands lie and in what becomes of the sums; the loops
// around it are theirs.
//
// A panel is a block of columns that register tiles of rows are multiplied
// with: a few vectors of them, by steps of k that lie side by side. Weights
// that lie otherwise become panels on the way, which stays in cache.
//
// Each sum is formed in chains of 256 products, or of 256 pairs of them, one
// after the other, and chains are added in order. So the result depends on k
// alone: not on the number of rows, their places, tiles or threads, nor on
// where weights lie.
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

/// Some panels that lie one behind the other and are multiplied together: rows
/// are fetched once for all of them. Panels are whole, of `numVectors` vectors
/// each; where `mayEnd`, lanes from the last column on do not exist.
struct PanelGroup {
  Value column, numPanels;
  /// A bound of `numPanels`, for the sizes of buffers.
  int64_t mostPanels;
  int64_t numVectors;
  bool mayEnd;
};

/// How columns are cut into panels.
class PanelShape {
public:
  /// With `pairOffset` the second half of a panel's vectors are the columns so
  /// far behind those of the first half: a gate and what it multiplies.
  /// `areEven` asks for even numbers of vectors.
  PanelShape(Emitter &e, Value numColumns, Value pairOffset = {},
             bool areEven = false)
      : numColumns(numColumns), pairOffset(pairOffset), e(e), areEven(areEven) {
  }

  const Value numColumns, pairOffset;

  /// The vectors of a whole panel.
  int64_t getNumVectors() const;
  /// How many columns further the next panel is.
  int64_t getNumColumns() const;
  /// The most panels of a group: together they take half of a second cache.
  int64_t getMostPanels() const;
  /// All panels, the last of which may be narrower.
  Value getNumPanels() const;
  /// Calls `body` for panels `first` to `end`, by groups.
  void forEachGroup(Value first, Value end,
                    function_ref<void(const PanelGroup &group)> body) const;

private:
  Emitter &e;
  const bool areEven;
};

/// Calls `body` for parts of the work on `numMatrices` matrices, in parallel:
/// panels `first` to `end` of `numPanels`, which cost the same, of one matrix.
/// One thread takes a matrix whole, so that it is read as it lies; several cut
/// every matrix alike, whichever has the rows.
void forEachPartOfPanels(
    Emitter &e, Value numMatrices, Value numPanels,
    function_ref<void(Value matrix, Value first, Value end)> body);

class ProductCore {
public:
  /// Products, or pairs of them, that one accumulator takes before it is added
  /// to the total: one long chain would round the sum of k products k times.
  static constexpr int64_t kChainPlaces = 256;
  /// The most chains of a sum that are formed at once, where few rows wait for
  /// them.
  static constexpr int64_t kMostChains = 4;

  ProductCore(Emitter &e, ProductLeft left, ProductRight right,
              ProductSums sums, const PanelShape &shape, Value numSteps);

  /// Adds to the sums of rows `firstRow` to `endRow` and the columns of a
  /// group.
  void multiply(Value firstRow, Value endRow, const PanelGroup &group);

private:
  /// Steps of some columns as register tiles read them: `memref` at `at`.
  struct Panel {
    Value column, step;
    /// Which one of its group it is.
    Value slot;
    int64_t numVectors;
    /// The lanes of each vector that exist; null for all.
    Values masks;
    Value memref;
    std::function<Values(Value place, int64_t vector)> at;
  };
  struct RowRange {
    Value first, end;
  };
  /// Rows of a register tile, and which rows of the left operand they read:
  /// their copy has the steps of a chain from `firstCopied` on, null for 0.
  struct Tile {
    Values rows, leftRows;
    Value firstCopied = {};
  };

  bool isInPairs() const;
  void makeBuffers(int64_t numPanels, int64_t numVectors);
  bool waitsForSums() const;
  int64_t getStepsOfWholeChains() const;
  int64_t getMostRowsOfChains() const;
  bool mustWidenLeft() const;
  bool isLeftPagesApart() const;
  Value getChainSteps(Value step);
  Value toPlace(Value step);
  Value getColumn(Value column, int64_t numVectors, int64_t vector);
  std::pair<Value, Value> getColumnAt(Value column, int64_t numVectors,
                                      Value offset);

  Panel makePanel(const PanelGroup &group, Value slot, Value step);
  void fillPanel(const Panel &panel, Value count);
  void packColumns(const Panel &panel, Value count);
  void packSteps(const Panel &panel, Value count);
  void forEachBlock(Value count,
                    function_ref<void(Value first, Value rest)> body);
  Values loadBlock(const Panel &panel, Value offset, Value first, Value rest);
  void storeBlock(const Panel &panel, ValueRange lines, Value place,
                  Value offset, Value rest);
  std::pair<Value, Value> splitPairs(Value pairs);
  Values splitLines(ValueRange lines);
  /// Lines of memory: so many side by side, each of some columns and steps.
  struct Lines {
    int64_t inARow, columns, steps;
  };
  Lines getLines(const PanelGroup &group) const;
  int64_t getStepsOfPlace() const;
  int64_t getStepsOfLane() const;
  int64_t getPlaceSteps() const;
  int64_t getMostTileRows() const;
  void prefetchNextGroup(const PanelGroup &group, Value step, Value number);
  int64_t getPlacesOfLine(int64_t numVectors) const;
  void prefetchAhead(const Panel &panel, Value place);
  void prefetchNextColumns(const Panel &panel, int64_t vector, Value first,
                           int64_t numLanes);

  void copyLeft(ArrayRef<Value> rows, Value firstNumber, Value step,
                Value count);
  Value splatLeft(Value number, Value leftRow, Value step, Value place);
  Value multiplyAdd(Value left, Value right, Value sum);
  Values getSumsAt(const Panel &panel, Value row, int64_t vector);
  void addChain(const Panel &panel, Value row, int64_t vector, Value chain);

  void multiplyFew(const RowRange &rows, const PanelGroup &group);
  int64_t getMostRowsOfPairs(const PanelGroup &group) const;
  void multiplyOneTile(const RowRange &rows, ArrayRef<PanelGroup> groups,
                       int64_t mostRows, bool isCopied);
  void multiplyAlongSteps(const RowRange &rows, const PanelGroup &group);
  bool copyAllSteps(const RowRange &rows);
  void multiplyMany(const RowRange &rows, const PanelGroup &group);
  void multiplyBlocks(const RowRange &rows, const PanelGroup &narrow,
                      int64_t vector);
  void multiplyChains(const RowRange &rows, int64_t numRows, int64_t numChains,
                      int64_t first, int64_t end, const PanelGroup &narrow,
                      int64_t vector);
  Value multiplyWholeChains(const RowRange &rows, const PanelGroup &narrow,
                            int64_t vector);
  Values loadFourLines(const Panel &panel, int64_t vector, Value first);
  Values multiplyFourLines(const Panel &panel, const Tile &tile, int64_t vector,
                           Value first, ValueRange carried);
  void multiplyBlock(const Panel &panel, const RowRange &rows, int64_t vector,
                     Value first, Value rest);
  void multiplyLines(const Panel &panel, const RowRange &rows, Value number,
                     Value first, function_ref<Value(int64_t line)> getLine,
                     int64_t numLines);
  Value getLeftRow(Value row);
  Tile makeTile(Value firstRow, int64_t numRows, Value step, Value count,
                bool mayCopy = true);
  void multiplyTile(ArrayRef<Panel> panels, const Tile &tile, Value count,
                    function_ref<void(Value place)> fetch = nullptr);
  SmallVector<Values> loadColumns(const Panel &panel, Value place);
  Values multiplyPlace(const Panel &panel, const Tile &tile, Value place,
                       ValueRange chain);
  void fetchRows(ArrayRef<Value> rows, Value step, Value place);
  void switchRows(Value numRows, int64_t fewest, int64_t most,
                  function_ref<void(int64_t numRows)> body);

  Emitter &e;
  const ProductLeft left;
  const ProductRight right;
  const ProductSums sums;
  const PanelShape shape;
  const Value numColumns, pairOffset, numSteps;
  const bool inPairs;
  /// The steps of a chain.
  const int64_t chainLength;
  /// The rows of a whole register tile.
  const int64_t mostTileRows;
  /// Buffers that panels and rows are copied to, null where they are read where
  /// they lie; and the chains of few rows.
  Value packed, copied, chains;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCTCORE_H
