//===- QuantizedBlocks.h - Blocks of codes times tiles of rows --*- C++ -*-===//
//
// A tile are rows and vectors of columns whose sums lie in registers. Features
// are multiplied in blocks: first the codes of a block with the features of
// rows, then the sum with the scale of the block. This order is one for all
// tiles, so that a sum does not depend on which tile it is in.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_QUANTIZEDBLOCKS_H
#define MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_QUANTIZEDBLOCKS_H

#include "LayerSums.h"
#include "QuantizedRows.h"
#include "WeightCodes.h"

namespace mlir::moe {

/// Where a vector of columns lies in panels, and its sums.
struct QuantizedColumn {
  PanelPlace place;
  Value number;
  bool isSecond;
};

/// Columns of an expert, and rows that are multiplied with them: as rows of a
/// run, and where their copies are.
struct QuantizedTile {
  Value expert;
  ArrayRef<QuantizedColumn> columns;
  Values rows, positions;
};

class QuantizedBlocks {
public:
  QuantizedBlocks(Emitter &e, GroupedLinearOp op)
      : lhs(e, op), codes(e, op, lhs.product), e(e), op(op) {}

  QuantizedRows lhs;
  WeightCodes codes;

  /// Quads of a block; those that are multiplied before sums are complete.
  int64_t getBlockQuads() { return lhs.blockSize / 4; }
  int64_t getRun() { return std::min(codes.getQuadsOfSum(), getBlockQuads()); }
  /// A sum of no products.
  Value getZeroSum() {
    return areIntegers(lhs.product) ? e.i32(0) : e.f32(0.0);
  }

  /// Asks for codes that are read a few kilobytes later, or `blocksAhead`
  /// blocks; some hardware foresees them only within a page.
  void prefetchCodes(Value expert, const QuantizedColumn &column, Value block,
                     int64_t blocksAhead = 0);
  /// Of each column a quad of a block, expanded; `line` has the quads of the
  /// line of the quad before.
  SmallVector<Values> readQuad(const QuantizedTile &tile, Value block,
                               int64_t quad, SmallVector<Values> &line);
  /// `sums` of products, row by row, with those of `getRun` quads added. `read`
  /// gives vector `i` of what a quad of each column is expanded to.
  Values multiplyRun(const QuantizedTile &tile, Value firstQuad,
                     ValueRange sums,
                     function_ref<Values(int64_t quad, int64_t i)> read);
  /// What the codes of a block stand for: of each column its scale, and the
  /// negated zero, or minimum, where codes have one.
  struct Scales {
    Values scales, negatedZeros, negatedMinima;
  };
  Scales loadScales(const QuantizedTile &tile, Value block);
  /// The totals with a block added: scale (products - zero sum of x), less the
  /// minimum times the sum of x.
  Values addBlock(const QuantizedTile &tile, Value block, const Scales &of,
                  ValueRange products, ValueRange totals);
  /// The totals with all blocks added, whose codes become numbers in registers.
  /// `prefetches`: asks for codes and scales a little before they are read.
  Values multiplyBlocks(const QuantizedTile &tile, ValueRange totals,
                        bool prefetches);

private:
  /// Of each column what the bytes of a superblock are multiplied with.
  struct Units {
    Values ofScales, ofMinima;
  };
  void prefetchAhead(const QuantizedTile &tile, Value block);
  /// The sums of products of a block, row by row.
  Values multiplyBlock(const QuantizedTile &tile, Value block);
  /// The blocks that share the second level of scales; 0 where there is none.
  int64_t getSuperblock();
  /// The row of scales that a block of features has in a panel.
  Value getScaleRow(Value block);
  Values loadUnits(Value operand, const QuantizedTile &tile, Value superblock);
  Units loadUnits(const QuantizedTile &tile, Value superblock);
  Scales loadScales(const QuantizedTile &tile, Value block, const Units &units);

  Emitter &e;
  GroupedLinearOp op;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_EXPERTS_QUANTIZEDBLOCKS_H
