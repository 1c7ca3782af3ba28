//===- LayerSums.h - The sums of a layer of experts -------------*- C++ -*-===//
//
// What the products of a layer of experts are added to, and what becomes of the
// sums: a bias comes before them; a gate, an activation and a rounding follow
// while those of a block of rows and a panel are in cache. Without any of it
// they are formed in y itself.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_LAYERSUMS_H
#define MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_LAYERSUMS_H

#include "ExpertRuns.h"
#include "Product/ProductProblem.h"

#include "MoE/Dialect/MoE/IR/MoE.h"

namespace mlir::moe {

/// A part of one expert's work: some rows, the columns of a group of panels.
struct LayerPart {
  Value expert, firstRow, endRow;
  PanelGroup group;
};

/// The sums of a part: where they are, what they begin with, and what becomes
/// of them.
class LayerSums {
public:
  /// `numColumns` are the columns of z, or of one of its halves.
  LayerSums(Emitter &e, GroupedLinearOp op, Value numSources, Value numColumns)
      : e(e), op(op), y(op.getOuts()[0]), numSources(numSources),
        numColumns(numColumns) {}

  /// Makes a buffer for the parts of a group, unless sums are formed in y.
  void allocate(const PanelGroup &group);
  ProductSums get(const LayerPart &part);
  /// Begins with the bias.
  void start(const LayerPart &part);
  /// Writes y. Of sums that are formed in it only those without a row of x are
  /// left to do.
  void finish(const LayerPart &part);
  /// Rows of no run are zero.
  void clearRows(Value begin, Value end);

private:
  bool hasHalves() { return op.getGate() == GateLayout::Concatenated; }
  /// Whether sums are formed in y.
  bool isDirect() { return !op.hasEpilogue() && getElementType(y).isF32(); }

  /// A vector of columns of z: where they are, and where its sums are.
  struct Vector {
    Value column, mask, sums;
  };
  void forEachVector(const LayerPart &part, bool isSecond,
                     function_ref<void(const Vector &vector)> body);
  Value loadBias(const LayerPart &part, const Vector &vector);
  Value loadSums(const LayerPart &part, Value row, const Vector &vector);
  void finishRow(const LayerPart &part, Value row);
  void storeY(Value values, Value row, Value column, Value mask);

  Emitter &e;
  GroupedLinearOp op;
  Value y, numSources, numColumns, buffer;
  /// Where sums of the second half of columns begin in a row of the buffer.
  int64_t secondHalf = 0;
};

/// The columns of z, or of one of its halves.
Value getNumColumns(Emitter &e, GroupedLinearOp op);

/// Where a vector of columns begins in a packed weight.
struct PanelPlace {
  Value panel, lane;
};
/// Vectors wholly behind the last column, which nobody uses, are in the last
/// panel.
PanelPlace findInPanels(Emitter &e, GroupedLinearOp op, Value numColumns,
                        Value column);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_LAYERSUMS_H
