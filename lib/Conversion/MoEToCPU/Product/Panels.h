//===- Panels.h - The right operand as panels of columns --------*- C++ -*-===//
//
// Weights that do not lie as panels become some on the way, a chain of ks at a
// time, in a buffer that stays in cache.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PANELS_H
#define MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PANELS_H

#include "MatrixUnit.h"
#include "ProductProblem.h"

namespace mlir::moe {

/// Columns as register tiles read them from k on: `memref` at `at`.
struct Panel {
  Value column, k;
  /// Which one of its group it is.
  Value slot;
  int64_t numVectors;
  /// The lanes of each vector that exist; null for all.
  Values masks;
  Value memref;
  std::function<Values(Value packedK, int64_t vector)> at;
};

class RhsPanels {
public:
  /// Makes a buffer for the panels of a group, unless they are read where they
  /// lie.
  RhsPanels(const ProductProblem &problem, const PanelGroup &group);

  bool arePacked() const { return bool(packed); }
  /// A panel of a group from `k` on.
  Panel get(const PanelGroup &group, Value slot, Value k) const;
  /// Fills the buffer with `count` ks of a panel; nothing where panels are read
  /// where they lie.
  void pack(const Panel &panel, Value count) const;
  /// A vector of columns of a panel as tiles, where `problem.usesTiles`.
  TileSource getTile(const Panel &panel, int64_t vector) const;
  /// The vectors of a packed k, for each of its ks that is multiplied by
  /// itself.
  SmallVector<Values> loadColumns(const Panel &panel, Value packedK) const;

  // Blocks of columns whose ks lie side by side, transposed in registers: a
  // vector of columns, from `offset` of a panel on, for each k or pair of ks.

  /// Calls `body` for the blocks of `count` ks; `rest`, if not null, is how
  /// many of the ks of the last one exist.
  void forEachBlock(Value count,
                    function_ref<void(Value first, Value rest)> body) const;
  /// The block from `first` of the panel's ks on.
  Values loadBlock(const Panel &panel, Value offset, Value first,
                   Value rest) const;
  /// Stores a block from `packedK` of the buffer on: what exists of it, the
  /// last of pairs with a zero.
  void storeBlock(const Panel &panel, ValueRange block, Value packedK,
                  Value offset, Value rest) const;
  /// The columns of a packed k of a block that was stored at the beginning of
  /// the buffer.
  Value loadOfBlock(Value packedK) const;
  /// Four lanes of each of the columns of `vector`, from `first` of the panel's
  /// ks on, as a block.
  Values loadFourLanes(const Panel &panel, int64_t vector, Value first) const;

private:
  void packNContiguous(const Panel &panel, Value count) const;
  void packKContiguous(const Panel &panel, Value count) const;
  std::pair<Value, Value> splitPairs(Value pairs) const;
  Values splitBlock(ValueRange block) const;

  const ProductProblem &problem;
  Emitter &e;
  /// Null where panels are read where they lie; and the same as bf16.
  Value packed, elements;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_PRODUCT_PANELS_H
