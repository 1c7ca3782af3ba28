//===- PanelShape.h - How columns are cut into panels -----------*- C++ -*-===//
//
// A panel is a block of columns that register tiles of rows are multiplied
// with: a few vectors of them, by ks that lie one behind the other. The last
// panel may be narrower.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PANELSHAPE_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PANELSHAPE_H

#include "Emit/Emitter.h"

namespace mlir::moe {

/// Some panels that lie one behind the other and are multiplied together: rows
/// are fetched once for all of them. Panels are whole, of `numVectors` vectors
/// each; where `hasTail`, lanes from the last column on do not exist.
struct PanelGroup {
  Value column, numPanels;
  /// A bound of `numPanels`, for the sizes of buffers.
  int64_t mostPanels;
  int64_t numVectors;
  bool hasTail;
};

class PanelShape {
public:
  /// With `pairOffset` the second half of a panel's vectors are the columns so
  /// far behind those of the first half: a gate and what it multiplies.
  /// `areEven` asks for even numbers of vectors. A panel has `numVectors`, or
  /// as many as the target's register tile of products.
  PanelShape(Emitter &e, Value numColumns, Value pairOffset = {},
             bool areEven = false, int64_t numVectors = 0)
      : numColumns(numColumns), pairOffset(pairOffset), e(e), areEven(areEven),
        numVectors(numVectors) {}

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

  // Of a panel of `numVectors` vectors from `column` on.

  /// The first column of a vector.
  Value getColumn(Value column, int64_t numVectors, int64_t vector) const;
  /// The column at `offset`; and where it must stop.
  std::pair<Value, Value> getColumnAt(Value column, int64_t numVectors,
                                      Value offset) const;
  /// The lanes of each vector that exist.
  Values getMasks(Value column, int64_t numVectors) const;

private:
  Emitter &e;
  const bool areEven;
  const int64_t numVectors;
};

/// Calls `body` for parts of the work on `numMatrices` matrices, in parallel:
/// panels `first` to `end` of `numPanels`, which cost the same, of one matrix.
/// One thread takes a matrix whole, so that it is read as it lies; several cut
/// every matrix alike, whichever has the rows.
void forEachPartOfPanels(
    Emitter &e, Value numMatrices, Value numPanels,
    function_ref<void(Value matrix, Value first, Value end)> body);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PANELSHAPE_H
