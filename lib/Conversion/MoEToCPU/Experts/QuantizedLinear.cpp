//===- QuantizedLinear.cpp - moe.grouped_linear on packed codes -----------===//
//
// Matches moe.grouped_linear on contiguous buffers with a packed weight of
// codes. What few rows wait for is memory, so that codes are read once, in the
// order of addresses, and become numbers in registers: a tile of rows and two
// vectors of columns takes a block of codes, 32 of each column, and adds
// scale (sum of x code - zero sum of x) to its sums. These stay in registers
// for all blocks. Many rows wait for products: some blocks of codes become
// numbers once, in a buffer that stays in the first cache, all tiles of rows
// are multiplied with it, and the sums lie in memory, so that tiles are larger.
// A matrix unit takes blocks from the buffer, however few rows there are.
// A sum is that of its blocks in their order, and that of a block is formed
// feature by feature, whatever the tile is; products with integers are exact.
//
//===----------------------------------------------------------------------===//

#include "Patterns.h"
#include "QuantizedBlocks.h"

#include "Product/MatrixUnit.h"

using namespace mlir;
using namespace mlir::moe;

/// The vectors of columns of a tile; of a matrix unit those of a whole panel,
/// with which one token reads codes of 8 bits 5 to 9 % faster than with two.
static constexpr int64_t kTileVectors = 2, kTileVectorsOfUnit = 4;

//===----------------------------------------------------------------------===//
// The kernel
//===----------------------------------------------------------------------===//

namespace {
class QuantizedLinearKernel {
public:
  QuantizedLinearKernel(Emitter &e, GroupedLinearOp op);
  void emit();

private:
  using Column = QuantizedColumn;
  using Tile = QuantizedTile;
  int64_t getTileVectors() const {
    return usesTiles() ? kTileVectorsOfUnit : kTileVectors;
  }
  PanelShape getShape();
  int64_t getTileRows() const;
  int64_t getLargeTileRows() const;
  SmallVector<Column> getColumns(const PanelGroup &group, Value slot);
  Tile getTile(const LayerPart &part, ArrayRef<Column> columns, Value first,
               int64_t numRows);
  void packRows(Value first, Value end);
  void emitPart(const LayerPart &part);
  void forEachTile(const LayerPart &part, int64_t fewest, int64_t most,
                   function_ref<void(Value first, int64_t numRows)> body);

  void multiplyFewRows(const LayerPart &part, ArrayRef<Column> columns);

  int64_t getChunkBlocks();
  void allocateForManyRows();
  void multiplyManyRows(const LayerPart &part, ArrayRef<Column> columns);
  void expandBlocks(Value expert, ArrayRef<Column> columns, Value first,
                    Value end);
  Values readExpanded(const Tile &tile, Value first, Value quad, int64_t i);
  void addChunk(const Tile &tile, Value first, Value end);
  Values loadTotals(const Tile &tile);
  void storeTotals(const Tile &tile, ValueRange values);

  bool usesTiles() const;
  void allocateForTiles();
  void multiplyByTiles(const LayerPart &part, ArrayRef<Column> columns);
  void addChunkByTiles(const LayerPart &part, ArrayRef<Column> columns,
                       Value firstRow, Value size, int64_t numTiles,
                       Value first, Value end);
  void addChunkOfOneRow(const LayerPart &part, ArrayRef<Column> columns,
                        Value row, Value first, Value end);
  Values loadTileSums(Value row, int64_t numColumns);
  void multiplyBlockByTiles(Value position, Value place, Value block,
                            int64_t numTiles, int64_t numColumns,
                            bool isOneRow = false);

  void clearTotals(const LayerPart &part, ArrayRef<Column> columns);
  void addTotals(const LayerPart &part, ArrayRef<Column> columns);
  void addToSums(const LayerPart &part, const Tile &tile, ValueRange totals);

  Emitter &e;
  GroupedLinearOp op;
  Value numRows, numSources, numColumns;
  QuantizedBlocks blocks;
  QuantizedRows &lhs;
  WeightCodes &codes;
  LayerSums sums;
  /// Of a chunk of blocks the codes, and the totals of rows, of two vectors of
  /// columns each; and the codes as bf16, for a matrix unit.
  Value expanded, totals, expandedElements;
  /// The sums of a block that tiles have.
  Value tileSums;
};
} // namespace

QuantizedLinearKernel::QuantizedLinearKernel(Emitter &e, GroupedLinearOp op)
    : e(e), op(op), numRows(e.dim(op.getOuts()[0], 0)),
      numSources(e.dim(op.getX(), 0)), numColumns(getNumColumns(e, op)),
      blocks(e, op), lhs(blocks.lhs), codes(blocks.codes),
      sums(e, op, numSources, numColumns) {}

PanelShape QuantizedLinearKernel::getShape() {
  bool hasHalves = op.getGate() == GateLayout::Concatenated;
  return PanelShape(e, numColumns, hasHalves ? numColumns : Value(),
                    /*areEven=*/op.isGated(), getTileVectors());
}

/// Registers hold sums of blocks, sums of all blocks, and what is multiplied.
int64_t QuantizedLinearKernel::getTileRows() const {
  constexpr int64_t kOthers = 8;
  return (e.target.vectorRegisters - kOthers) / (2 * kTileVectors);
}

/// Registers hold sums of blocks, the codes of a quad, and a number of a row.
/// There is code for each size, so that there are no more than a few.
int64_t QuantizedLinearKernel::getLargeTileRows() const {
  constexpr int64_t kMost = 8;
  return std::min(kMost,
                  (e.target.vectorRegisters - kTileVectors - 1) / kTileVectors);
}

SmallVector<QuantizedColumn>
QuantizedLinearKernel::getColumns(const PanelGroup &group, Value slot) {
  PanelShape shape = getShape();
  Value first =
      e.add(group.column, e.mul(slot, e.index(shape.getNumColumns())));
  SmallVector<Column> columns;
  for (int64_t vector = 0; vector < group.numVectors; ++vector) {
    Value column = shape.getColumn(first, group.numVectors, vector);
    bool isSecond = shape.pairOffset && vector >= group.numVectors / 2;
    Value number = isSecond ? e.sub(column, shape.pairOffset) : column;
    columns.push_back(
        {findInPanels(e, op, numColumns, column), number, isSecond});
  }
  return columns;
}

void QuantizedLinearKernel::packRows(Value first, Value end) {
  e.loop(first, end, 1, [&](Value row) {
    lhs.pack(readRow(e, op.getRows(), row, numSources), e.sub(row, first));
  });
}

QuantizedTile QuantizedLinearKernel::getTile(const LayerPart &part,
                                             ArrayRef<Column> columns,
                                             Value first, int64_t numRows) {
  Tile tile{part.expert, columns, {}, {}};
  for (int64_t row = 0; row < numRows; ++row) {
    tile.rows.push_back(e.add(first, e.index(row)));
    tile.positions.push_back(e.sub(tile.rows.back(), part.firstRow));
  }
  return tile;
}

/// Tiles of a part, as equal as they can be; there are `fewest` rows or more.
void QuantizedLinearKernel::forEachTile(
    const LayerPart &part, int64_t fewest, int64_t most,
    function_ref<void(Value first, int64_t numRows)> body) {
  Value count = e.sub(part.endRow, part.firstRow);
  Value numTiles = arith::CeilDivSIOp::create(e, count, e.index(most));
  auto getFirst = [&](Value number) -> Value {
    Value before = arith::DivSIOp::create(e, e.mul(number, count), numTiles);
    return e.add(part.firstRow, before);
  };
  e.loop(e.index(0), numTiles, 1, [&](Value number) {
    Value first = getFirst(number);
    Value size = e.sub(getFirst(e.add(number, e.index(1))), first);
    // Of two tiles or more none has less than half of the most.
    e.switchIndex(size, std::min(fewest, std::max<int64_t>(most / 2, 1)), most,
                  [&](int64_t numRows) { body(first, numRows); });
  });
}

/// The sums of a tile with its totals added.
void QuantizedLinearKernel::addToSums(const LayerPart &part, const Tile &tile,
                                      ValueRange totals) {
  ProductSums all = sums.get(part);
  for (auto [i, total] : llvm::enumerate(totals)) {
    const Column &column = tile.columns[i % tile.columns.size()];
    Values at = all.at(tile.rows[i / tile.columns.size()], column.number,
                       column.isSecond);
    Value added = total;
    if (codes.getUnit() != 1.0)
      added = e.mul(added, e.f32(codes.getUnit()));
    Value lanes;
    if (part.group.hasTail)
      lanes = e.firstLanes(e.sub(numColumns, column.number));
    Value before = e.loadFloats(all.memref, at, lanes);
    e.storeVector(e.add(before, added), all.memref, at, lanes);
  }
}

//===----------------------------------------------------------------------===//
// Few rows
//===----------------------------------------------------------------------===//

void QuantizedLinearKernel::multiplyFewRows(const LayerPart &part,
                                            ArrayRef<Column> columns) {
  forEachTile(part, 1, getTileRows(), [&](Value first, int64_t numRows) {
    Tile tile = getTile(part, columns, first, numRows);
    Values totals(numRows * columns.size(), e.f32(0.0));
    bool prefetches = numRows <= 2;
    addToSums(part, tile, blocks.multiplyBlocks(tile, totals, prefetches));
  });
}

//===----------------------------------------------------------------------===//
// Many rows
//===----------------------------------------------------------------------===//

/// As many blocks as fill half of a first cache of 32 KB; the other half is for
/// rows.
int64_t QuantizedLinearKernel::getChunkBlocks() {
  int64_t bytes = lhs.blockSize / 4 * codes.getNumExpanded() *
                  getTileVectors() * e.width * 4;
  return std::clamp<int64_t>((16 << 10) / bytes, 1,
                             std::max<int64_t>(lhs.numBlocks, 1));
}

void QuantizedLinearKernel::allocateForManyRows() {
  auto make = [&](ArrayRef<int64_t> shape, Type element) {
    return e.scratch(getAsIndexOpFoldResult(e.getContext(), shape), element);
  };
  int64_t lanes = kTileVectors * e.width;
  totals = make({lhs.getMostRows(), lanes}, e.getF32Type());
  bool areFloats = lhs.product == CodeProduct::Floats;
  if (!codes.isExpanded())
    expanded = make({getChunkBlocks() * blocks.getBlockQuads(),
                     codes.getNumExpanded(), lanes},
                    areFloats ? Type(e.getF32Type()) : Type(e.getI32Type()));
}

/// Blocks `first` to `end` of codes of columns, into the buffer.
void QuantizedLinearKernel::expandBlocks(Value expert, ArrayRef<Column> columns,
                                         Value first, Value end) {
  Tile tile{expert, columns, {}, {}};
  e.loop(first, end, 1, [&](Value block) {
    Value before = e.mul(e.sub(block, first), e.index(blocks.getBlockQuads()));
    SmallVector<Values> line;
    for (int64_t quad = 0; quad < blocks.getBlockQuads(); ++quad) {
      SmallVector<Values> weights = blocks.readQuad(tile, block, quad, line);
      for (auto [column, vectors] : llvm::enumerate(weights))
        for (auto [i, vector] : llvm::enumerate(vectors))
          e.storeVector(vector, expanded,
                        {e.add(before, e.index(quad)), e.index(i),
                         e.index(column * e.width)});
    }
  });
}

/// Of each column vector `i` of a quad of a chunk that begins with block
/// `first`.
Values QuantizedLinearKernel::readExpanded(const Tile &tile, Value first,
                                           Value quad, int64_t i) {
  Values vectors;
  for (auto [number, column] : llvm::enumerate(tile.columns)) {
    if (!codes.isExpanded()) {
      vectors.push_back(e.loadVector(
          expanded, {quad, e.index(i), e.index(number * e.width)}));
      continue;
    }
    Value line = e.add(e.mul(first, e.index(blocks.getBlockQuads())), quad);
    vectors.append(codes.load({tile.expert, column.place.panel, line,
                               column.place.lane, e.index(0)}));
  }
  return vectors;
}

/// Adds blocks `first` to `end` to the totals of a tile.
void QuantizedLinearKernel::addChunk(const Tile &tile, Value first, Value end) {
  Values zeros(tile.rows.size() * tile.columns.size(), blocks.getZeroSum());
  e.loop(first, end, 1, [&](Value block) {
    Value before = e.mul(e.sub(block, first), e.index(blocks.getBlockQuads()));
    Value beforeInRow = e.mul(block, e.index(blocks.getBlockQuads()));
    Values products = e.loop(
        e.index(0), e.index(blocks.getBlockQuads()), blocks.getRun(), zeros,
        [&](Value quad, ValueRange sums) {
          return blocks.multiplyRun(
              tile, e.add(beforeInRow, quad), sums,
              [&](int64_t offset, int64_t i) {
                Value number = e.add(quad, e.index(offset));
                return readExpanded(tile, first, e.add(before, number), i);
              });
        });
    storeTotals(tile,
                blocks.addBlock(tile, block, blocks.loadScales(tile, block),
                                products, loadTotals(tile)));
  });
}

Values QuantizedLinearKernel::loadTotals(const Tile &tile) {
  Values loaded;
  for (Value position : tile.positions)
    for (size_t column = 0; column < tile.columns.size(); ++column)
      loaded.push_back(
          e.loadVector(totals, {position, e.index(column * e.width)}));
  return loaded;
}

void QuantizedLinearKernel::storeTotals(const Tile &tile, ValueRange values) {
  for (auto [i, value] : llvm::enumerate(values)) {
    int64_t column = i % tile.columns.size();
    e.storeVector(
        value, totals,
        {tile.positions[i / tile.columns.size()], e.index(column * e.width)});
  }
}

void QuantizedLinearKernel::clearTotals(const LayerPart &part,
                                        ArrayRef<Column> columns) {
  e.loop(part.firstRow, part.endRow, 1, [&](Value row) {
    Tile tile = getTile(part, columns, row, 1);
    storeTotals(tile, Values(columns.size(), e.f32(0.0)));
  });
}

void QuantizedLinearKernel::addTotals(const LayerPart &part,
                                      ArrayRef<Column> columns) {
  e.loop(part.firstRow, part.endRow, 1, [&](Value row) {
    Tile tile = getTile(part, columns, row, 1);
    addToSums(part, tile, loadTotals(tile));
  });
}

void QuantizedLinearKernel::multiplyManyRows(const LayerPart &part,
                                             ArrayRef<Column> columns) {
  clearTotals(part, columns);
  Value numBlocks = e.index(lhs.numBlocks);
  e.loop(e.index(0), numBlocks, getChunkBlocks(), [&](Value first) {
    Value end = e.minSigned(e.add(first, e.index(getChunkBlocks())), numBlocks);
    if (!codes.isExpanded())
      expandBlocks(part.expert, columns, first, end);
    forEachTile(part, getTileRows() + 1, getLargeTileRows(),
                [&](Value row, int64_t numRows) {
                  addChunk(getTile(part, columns, row, numRows), first, end);
                });
  });
  addTotals(part, columns);
}

//===----------------------------------------------------------------------===//
// A matrix unit
//===----------------------------------------------------------------------===//

/// Pairs of bf16, for any number of rows: tiles round sums in another order
/// than vectors do.
bool QuantizedLinearKernel::usesTiles() const {
  return lhs.product == CodeProduct::Pairs && e.target.bf16Tiles &&
         lhs.blockSize % kTileKs == 0;
}

void QuantizedLinearKernel::allocateForTiles() {
  int64_t lanes = getTileVectors() * e.width;
  auto make = [&](int64_t rows) {
    return e.scratch({e.getIndexAttr(rows), e.getIndexAttr(lanes)},
                     e.getF32Type());
  };
  totals = make(lhs.getMostRows());
  tileSums = make(2 * kUnitTileSize);
  std::tie(expanded, expandedElements) =
      e.scratchPairs({getChunkBlocks() * blocks.getBlockQuads(),
                      codes.getNumExpanded(), lanes});
}

/// The sums of a block at `place` of the buffer times tiles of rows, the first
/// of which lies at `position`. Where there is only one row, a tile reads and
/// writes its line sixteen times: those behind it would take the cache.
void QuantizedLinearKernel::multiplyBlockByTiles(Value position, Value place,
                                                 Value block, int64_t numTiles,
                                                 int64_t numColumns,
                                                 bool isOneRow) {
  Value stride = isOneRow ? e.index(0) : Value();
  Value before = e.mul(block, e.index(lhs.blockSize));
  TileSources rows;
  for (int64_t tile = 0; tile < numTiles; ++tile) {
    Value first = e.add(position, e.index(tile * kUnitTileSize));
    rows.push_back(
        {lhs.getFeatures(),
         [=, this](Value k) { return Values{first, e.add(before, k)}; },
         stride});
  }
  int64_t most = kMostTiles / numTiles;
  for (int64_t first = 0; first < numColumns; first += most) {
    TileSources columns;
    for (int64_t i = first; i < std::min(first + most, numColumns); ++i)
      columns.push_back({expandedElements, [=, this](Value packedK) {
                           Value quad =
                               arith::DivSIOp::create(e, packedK, e.index(2));
                           return Values{e.add(place, quad), e.index(0),
                                         e.index(2 * i * e.width)};
                         }});
    Values chain = getZeroTiles(e, numTiles * columns.size());
    for (int64_t k = 0; k < lhs.blockSize; k += kTileKs)
      chain = multiplyTiles(e, rows, columns, e.index(k), chain);
    storeTiles(e, chain, columns.size(), tileSums, 0, first * e.width, stride);
  }
}

Values QuantizedLinearKernel::loadTileSums(Value row, int64_t numColumns) {
  Values loaded;
  for (int64_t column = 0; column < numColumns; ++column)
    loaded.push_back(e.loadVector(tileSums, {row, e.index(column * e.width)}));
  return loaded;
}

void QuantizedLinearKernel::addChunkOfOneRow(const LayerPart &part,
                                             ArrayRef<Column> columns,
                                             Value row, Value first,
                                             Value end) {
  Tile tile = getTile(part, columns, row, 1);
  int64_t numColumns = columns.size();
  Values added = e.loop(
      first, end, 1, loadTotals(tile), [&](Value block, ValueRange carried) {
        for (const Column &column : columns)
          blocks.prefetchCodes(part.expert, column, block, getChunkBlocks());
        Value place =
            e.mul(e.sub(block, first), e.index(blocks.getBlockQuads()));
        multiplyBlockByTiles(tile.positions.front(), place, block,
                             /*numTiles=*/1, numColumns, /*isOneRow=*/true);
        return blocks.addBlock(tile, block, blocks.loadScales(tile, block),
                               loadTileSums(e.index(0), numColumns), carried);
      });
  storeTotals(tile, added);
}

void QuantizedLinearKernel::addChunkByTiles(const LayerPart &part,
                                            ArrayRef<Column> columns,
                                            Value firstRow, Value size,
                                            int64_t numTiles, Value first,
                                            Value end) {
  Value position = e.sub(firstRow, part.firstRow);
  e.loop(first, end, 1, [&](Value block) {
    // With few rows memory is what the next blocks wait for.
    if (numTiles == 1)
      for (const Column &column : columns)
        blocks.prefetchCodes(part.expert, column, block, getChunkBlocks());
    Value place = e.mul(e.sub(block, first), e.index(blocks.getBlockQuads()));
    multiplyBlockByTiles(position, place, block, numTiles, columns.size());
    QuantizedBlocks::Scales of =
        blocks.loadScales(getTile(part, columns, firstRow, 1), block);
    e.loop(e.index(0), size, 1, [&](Value row) {
      Tile tile = getTile(part, columns, e.add(firstRow, row), 1);
      Values products = loadTileSums(row, columns.size());
      storeTotals(tile,
                  blocks.addBlock(tile, block, of, products, loadTotals(tile)));
    });
  });
}

void QuantizedLinearKernel::multiplyByTiles(const LayerPart &part,
                                            ArrayRef<Column> columns) {
  constexpr int64_t kMost = 2 * kUnitTileSize;
  clearTotals(part, columns);
  Value numBlocks = e.index(lhs.numBlocks);
  e.loop(e.index(0), numBlocks, getChunkBlocks(), [&](Value first) {
    Value end = e.minSigned(e.add(first, e.index(getChunkBlocks())), numBlocks);
    expandBlocks(part.expert, columns, first, end);
    e.loop(part.firstRow, part.endRow, kMost, [&](Value row) {
      Value size = e.minSigned(e.sub(part.endRow, row), e.index(kMost));
      auto add = [&](int64_t numTiles) -> Values {
        addChunkByTiles(part, columns, row, size, numTiles, first, end);
        return {};
      };
      auto isUpTo = [&](int64_t rows) {
        return e.compare(arith::CmpIPredicate::sle, size, e.index(rows));
      };
      e.ifElse(
          isUpTo(1), TypeRange(),
          [&]() -> Values {
            addChunkOfOneRow(part, columns, row, first, end);
            return {};
          },
          [&] {
            return e.ifElse(
                isUpTo(kUnitTileSize), TypeRange(), [&] { return add(1); },
                [&] { return add(2); });
          });
    });
  });
  addTotals(part, columns);
}

//===----------------------------------------------------------------------===//
// Parts
//===----------------------------------------------------------------------===//

void QuantizedLinearKernel::emitPart(const LayerPart &part) {
  sums.start(part);
  Value count = e.sub(part.endRow, part.firstRow);
  Value areFew =
      e.compare(arith::CmpIPredicate::sle, count, e.index(getTileRows()));
  // Without rows of x there is nothing to read.
  e.ifThen(e.compare(arith::CmpIPredicate::sgt, numSources, e.index(0)), [&] {
    e.loop(e.index(0), part.group.numPanels, 1, [&](Value slot) {
      SmallVector<Column> columns = getColumns(part.group, slot);
      if (usesTiles())
        return multiplyByTiles(part, columns);
      e.ifElse(
          areFew, TypeRange(),
          [&] {
            multiplyFewRows(part, columns);
            return Values();
          },
          [&] {
            multiplyManyRows(part, columns);
            return Values();
          });
    });
  });
  sums.finish(part);
}

void QuantizedLinearKernel::emit() {
  Value numExperts = e.dim(op.getW(), 0);
  Value zero = e.index(0), last = e.sub(numExperts, e.index(1));
  Value offsets = op.getOffsets();
  sums.clearRows(zero, readRun(e, offsets, zero, numRows).begin);
  sums.clearRows(readRun(e, offsets, last, numRows).end, numRows);
  PanelShape shape = getShape();
  forEachPartOfPanels(
      e, numExperts, shape.getNumPanels(),
      [&](Value expert, Value firstPanel, Value endPanel) {
        lhs.allocate();
        if (usesTiles())
          allocateForTiles();
        else
          allocateForManyRows();
        ExpertRun run = readRun(e, offsets, expert, numRows);
        int64_t most = lhs.getMostRows();
        e.loop(run.begin, run.end, most, [&](Value first) {
          Value end = e.minSigned(e.add(first, e.index(most)), run.end);
          e.ifThen(e.compare(arith::CmpIPredicate::sgt, numSources, zero),
                   [&] { packRows(first, end); });
          shape.forEachGroup(firstPanel, endPanel,
                             [&](const PanelGroup &group) {
                               sums.allocate(group);
                               emitPart({expert, first, end, group});
                             });
        });
      });
}

//===----------------------------------------------------------------------===//
// Patterns
//===----------------------------------------------------------------------===//

/// Why there is no kernel for an op with a weight of codes; empty if there is.
static StringRef whyNoKernel(GroupedLinearOp op, int64_t vectorWidth) {
  int64_t parts = op.hasPanelsOfHalves() ? 2 : 1;
  if (!op.getPacked() || *op.getPacked() % (parts * vectorWidth) != 0)
    return "expected codes in panels, or halves of panels, of whole vectors";
  if (op.getProductBlock() % vectorWidth != 0)
    return "expected groups of whole vectors";
  if (op.getFormat() == WeightFormat::Fp4E2M1 && vectorWidth != 8 &&
      vectorWidth != 16)
    return "expected vectors of 8 or 16 lanes with floats of 4 bits";
  if (cast<ShapedType>(op.getX().getType()).isDynamicDim(1))
    return "expected a static number of features";
  return "";
}

bool mlir::moe::hasQuantizedKernel(GroupedLinearOp op, int64_t vectorWidth) {
  return whyNoKernel(op, vectorWidth).empty();
}

namespace {
struct QuantizedLinearPattern
    : KernelPattern<GroupedLinearOp, QuantizedLinearKernel> {
  using KernelPattern::KernelPattern;

  LogicalResult matchAndRewrite(GroupedLinearOp op,
                                PatternRewriter &rewriter) const override {
    if (!op.isQuantized())
      return rewriter.notifyMatchFailure(op, "expected a weight of codes");
    StringRef reason = whyNoKernel(op, options.vectorWidth);
    if (!reason.empty())
      return rewriter.notifyMatchFailure(op, reason);
    return KernelPattern::matchAndRewrite(op, rewriter);
  }
};
} // namespace

void mlir::moe::populateQuantizedLinearToCPUPatterns(
    RewritePatternSet &patterns, const CPUTarget &options) {
  patterns.add<QuantizedLinearPattern>(patterns.getContext(), options);
}
